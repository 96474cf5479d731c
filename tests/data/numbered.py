"""Datasets of numbered rows, in blocks that a test chooses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from powertrain.data.dataset import Dataset
from powertrain.data.plan.plan import Part, Plan
from powertrain.data.sources.base import BlockFacts, Source, SourceFacts


class Tables(Source):
    """Tables in memory, each a block; tells how often it was looked at and what was read."""

    cheap_to_decode = True

    def __init__(self, *tables: pa.Table) -> None:
        self.tables = tables
        self.looks = 0
        self.read_blocks: list[int] = []

    def inspect(self) -> SourceFacts:
        self.looks += 1
        blocks = tuple(BlockFacts(table.num_rows, table.nbytes) for table in self.tables)
        return SourceFacts(
            blocks, self.tables[0].schema, f"{[table.to_pylist() for table in self.tables]}"[:32]
        )

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        self.read_blocks.append(block)
        table = self.tables[block]
        yield from (table if columns is None else table.select(list(columns))).to_batches()

    def name_row(self, block: int, row: int) -> str:
        return f"table {block}, row {row}"


def numbered(*counts: int) -> Dataset:
    """Blocks of so many rows, with the columns "id" (0, 1, 2, …) and "half" (0.0, 0.5, 1.0, …)."""
    return Dataset(Plan((Part(tables(*counts)),)))


def tables(*counts: int) -> Tables:
    made, first = [], 0
    for count in counts:
        ids = np.arange(first, first + count)
        made.append(pa.table({"id": pa.array(ids), "half": pa.array(ids / 2)}))
        first += count
    return Tables(*made)


def ids(dataset: Dataset) -> list[int]:
    return [row["id"] for row in dataset.iter_rows()]
