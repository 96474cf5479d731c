"""A source of numbered rows in blocks of any sizes, which counts what is read of it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa

from powertrain.data.plan.plan import Part, Plan
from powertrain.data.sources.base import BlockFacts, Source, SourceFacts


class NumberedBlocks(Source):
    """Column ``id``: the number of each row; blocks as given."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.fingerprint = hashlib.blake2b(repr(self.sizes).encode(), digest_size=16).hexdigest()
        self.reads: Counter[int] = Counter()

    def inspect(self) -> SourceFacts:
        blocks = tuple(BlockFacts(size, 8 * size) for size in self.sizes)
        return SourceFacts(blocks, pa.schema([("id", pa.int64())]), self.fingerprint)

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        self.reads[block] += 1
        first = sum(self.sizes[:block])
        ids = pa.array(range(first, first + self.sizes[block]), pa.int64())
        yield pa.record_batch({"id": ids})

    def name_row(self, block: int, row: int) -> str:
        return f"block {block}, row {row}"


def numbered(sizes: Sequence[int], *, shuffled: bool = True, seed: int | None = 0) -> Plan:
    """A plan over such a source."""
    return Plan((Part(NumberedBlocks(sizes)),), shuffled=shuffled, seed=seed)
