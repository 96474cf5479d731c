"""Common parts of the programs that pack documents: the files, the request, timed epochs, counted tokens.

Documents have log-normal lengths with a mean of about 600 tokens, and tokens are numbered through all of
them, so that lost and duplicated ones are counted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DOCUMENTS, QUICK_DOCUMENTS = 100_000, 10_000
FILES = 4
ROW_GROUP_DOCUMENTS = 2_000
WINDOW, BATCH_SIZE, EPOCHS = 2048, 16, 3


@dataclass(frozen=True)
class Request:
    """Read ``directory`` and write a :class:`Packed` to ``output``."""

    directory: str
    tokens: int
    output: str
    num_workers: int = 0

    def as_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_command_line(cls) -> Request:
        return cls(**json.loads(sys.argv[1]))


@dataclass(frozen=True)
class Packed:
    """The measurements of one program; ``lost`` and ``twice`` are tokens over all epochs."""

    tokens: int
    opening_seconds: float
    epoch_seconds: tuple[float, ...]
    lost: int
    twice: int

    @property
    def whole(self) -> float:
        """Tokens a second of all epochs, opening included."""
        return self.tokens * len(self.epoch_seconds) / (self.opening_seconds + sum(self.epoch_seconds))

    @property
    def later(self) -> float:
        """Tokens a second from the second epoch on."""
        return self.tokens * (len(self.epoch_seconds) - 1) / sum(self.epoch_seconds[1:])


def write_documents(directory: Path, documents: int) -> int:
    """Write the files, and return the number of tokens."""
    directory.mkdir(parents=True)
    lengths = np.random.default_rng(0).lognormal(6, 0.9, documents).astype(np.int64) + 1
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    for number, rows in enumerate(np.array_split(np.arange(documents), FILES)):
        first, last = int(rows[0]), int(rows[-1]) + 1
        tokens = pa.array(np.arange(offsets[first], offsets[last], dtype=np.int32))
        starts: Any = pa.array((offsets[first : last + 1] - offsets[first]).astype(np.int32))
        table = pa.table({"tokens": pa.ListArray.from_arrays(starts, tokens)})
        pq.write_table(table, directory / f"{number}.parquet", row_group_size=ROW_GROUP_DOCUMENTS)
    return int(offsets[-1])


def measure(request: Request, open_loader: Callable[[], Callable[[int], Iterable[Any]]]) -> None:
    """Open the loader, iterate over all epochs of batches of windows, and write the :class:`Packed`."""
    began = time.perf_counter()
    epoch = open_loader()
    opening = time.perf_counter() - began
    seconds, lost, twice = [], 0, 0
    for number in range(EPOCHS):
        windows = []
        began = time.perf_counter()
        for batch in epoch(number):
            windows.append(batch.numpy().copy())
        seconds.append(time.perf_counter() - began)
        came = np.bincount(np.concatenate(windows).reshape(-1) + 1, minlength=request.tokens + 1)[1:]
        lost += int((came == 0).sum())
        twice += int(came[came > 1].sum() - (came > 1).sum())
    Path(request.output).write_text(
        json.dumps(asdict(Packed(request.tokens, opening, tuple(seconds), lost, twice)))
    )
