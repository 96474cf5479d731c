"""A source that counts its reads over all processes, and a program that opens blocks of it through a store.

Run as ``python -m tests.data.block_reader SETTINGS`` with the JSON of :class:`Reading`; prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from powertrain.data.loading.cache import BlockStore
from powertrain.data.sources.base import BlockFacts, Source, SourceFacts

PATIENCE = 30.0


class CountingSource(Source):
    """Blocks of random bytes that follow from their numbers. Each read adds a line to a file."""

    def __init__(
        self, log: str, *, blocks: int = 4, rows: int = 64, width: int = 1024, batches: int = 1
    ) -> None:
        self.log, self.blocks, self.rows, self.width, self.batches = log, blocks, rows, width, batches
        #: While this file exists, a read that has been written down does not go on.
        self.barred_by = f"{log}.barred"

    def inspect(self) -> SourceFacts:
        schema = pa.schema({"x": pa.list_(pa.int8(), self.width)})
        facts = BlockFacts(self.rows, self.rows * self.width)
        return SourceFacts((facts,) * self.blocks, schema, f"counting {self.rows} {self.width}")

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        with open(self.log, "a") as log:
            log.write(f"{block}\n")
        wait_until(lambda: not os.path.exists(self.barred_by))
        for part in np.split(self.values(block), self.batches):
            yield pa.record_batch(
                {"x": pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), self.width)}
            )

    def values(self, block: int) -> np.ndarray[Any, np.dtype[np.int8]]:
        words = np.random.Generator(np.random.PCG64(block)).bytes(self.rows * self.width)
        return np.frombuffer(words, np.int8).reshape(self.rows, self.width)

    def name_row(self, block: int, row: int) -> str:
        return f"block {block}, row {row}"

    def reads(self) -> list[int]:
        """The blocks that were read, in order, by all processes."""
        return [int(line) for line in Path(self.log).read_text().split()] if os.path.exists(self.log) else []


@dataclass(frozen=True)
class Reading:
    """What one process does: opens blocks in this order, and holds them all until the end."""

    log: str
    directory: str
    blocks: tuple[int, ...]
    source: dict[str, int] = field(default_factory=dict)
    disk_bytes: int = 1 << 30
    memory_bytes: int = 1 << 26
    release: bool = False


def matches(batches: Sequence[pa.RecordBatch], expected: np.ndarray[Any, np.dtype[np.int8]]) -> bool:
    """Whether these are the values that the source gave."""
    columns: list[Any] = [batch.column(0) for batch in batches]
    arrays = [np.asarray(column.flatten()).reshape(len(column), -1) for column in columns]
    return bool(np.array_equal(np.concatenate(arrays), expected))


def anonymous_bytes() -> int:
    """Memory of this process that is not backed by a file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.002)


def main() -> None:
    reading = Reading(**json.loads(sys.argv[1]))
    source = CountingSource(reading.log, **reading.source)
    warnings: list[str] = []
    store = BlockStore(
        [source],
        [None],
        directory=reading.directory,
        disk_bytes=reading.disk_bytes,
        memory_bytes=reading.memory_bytes,
        threads=1,
        warn=warnings.append,
    )
    print("opening", flush=True)
    before, held, right = anonymous_bytes(), [], True
    for block in reading.blocks:
        batches = store.open(0, block)
        right = right and matches(batches, source.values(block))
        if reading.release:
            store.release(0, block)
        else:
            held.append(batches)
        del batches
    grown = anonymous_bytes() - before
    told = {
        "right": right,
        "decoded": sorted(block for _, block in store.counters.decoded.elements()),
        "hits": store.counters.hits,
        "grown": grown,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "warnings": warnings,
    }
    store.close()
    print(json.dumps(told), flush=True)


def as_arguments(reading: Reading) -> list[str]:
    return [sys.executable, "-m", "tests.data.block_reader", json.dumps(asdict(reading))]


if __name__ == "__main__":
    main()
