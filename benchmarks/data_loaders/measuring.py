"""Common parts of the loader programs: the request, timed epochs, counted rows, one JSON file.

A loader program is started as ``python PROGRAM REQUEST``, REQUEST being a :class:`Request` as JSON, and imports all
modules before it calls :func:`measure`: imports do not count as opening.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from schemas import verify

Batch = Mapping[str, Any]
#: The batches of one epoch, by its number from 0.
Epoch = Callable[[int], Iterable[Batch]]


@dataclass(frozen=True)
class Request:
    """The request of a loader program: read ``directory`` and write a :class:`Loading` to ``output``."""

    schema: str
    directory: str
    rows: int
    batch_size: int
    epochs: int
    output: str
    #: Settings of this loader, by name.
    settings: Mapping[str, Any]

    def as_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_command_line(cls) -> Request:
        return cls(**json.loads(sys.argv[1]))

    @property
    def files(self) -> list[str]:
        return [str(path) for path in sorted(Path(self.directory).glob("*.parquet"))]


@dataclass(frozen=True)
class Loading:
    """The measurements of one loader program."""

    rows: int
    opening_seconds: float
    epoch_seconds: tuple[float, ...]
    #: Over all epochs: missing rows, and rows duplicated within an epoch.
    lost: int
    twice: int

    @property
    def whole(self) -> float:
        """Rows a second of all epochs, opening included."""
        return self.rows * len(self.epoch_seconds) / (self.opening_seconds + sum(self.epoch_seconds))

    @property
    def first(self) -> float:
        """Rows a second of the first epoch alone, without opening."""
        return self.rows / self.epoch_seconds[0]

    @property
    def later(self) -> float:
        """Rows a second from the second epoch on."""
        return self.rows * (len(self.epoch_seconds) - 1) / sum(self.epoch_seconds[1:])


def measure(request: Request, open_loader: Callable[[], Epoch]) -> None:
    """Open the loader, iterate over all epochs, check each epoch's last batch, and write the :class:`Loading`."""
    began = time.perf_counter()
    epoch = open_loader()
    opening = time.perf_counter() - began
    seconds, lost, twice = [], 0, 0
    for number in range(request.epochs):
        ids = []
        batch: Batch = {}
        began = time.perf_counter()
        for batch in epoch(number):
            # A copy: tensors of worker processes hold shared memory for as long as they are kept.
            ids.append(batch["id"].numpy().copy())
        seconds.append(time.perf_counter() - began)
        verify(request.schema, batch)
        came = np.bincount(np.concatenate(ids), minlength=request.rows)
        lost += int((came == 0).sum())
        twice += int(came[came > 1].sum() - (came > 1).sum())
    loading = Loading(request.rows, opening, tuple(seconds), lost, twice)
    Path(request.output).write_text(json.dumps(asdict(loading)))
