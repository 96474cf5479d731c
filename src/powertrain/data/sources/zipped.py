"""Rows of several sources side by side: row i has the columns of row i of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.data.sources.plain import with_rows_only
from powertrain.data.sources.remembering import RememberingSource
from powertrain.errors import DataError

#: (source, block) of each block of a side; None for all of them, one source after the other.
BlockOrder = Sequence[tuple[int, int]] | None


class OrderedRows:
    """The rows of some sources by their numbers: one source after the other, or blocks in a given order."""

    def __init__(self, sources: Sequence[Source], order: BlockOrder = None) -> None:
        self.sources, self.order = tuple(sources), order
        self.blocks: list[tuple[int, int, BlockFacts]] = []
        self.firsts = np.zeros(1, np.int64)

    def inspect(self) -> list[SourceFacts]:
        facts = [source.inspect() for source in self.sources]
        order = self.order
        if order is None:
            order = [
                (number, index) for number, fact in enumerate(facts) for index in range(len(fact.blocks))
            ]
        self.blocks = [(number, index, facts[number].blocks[index]) for number, index in order]
        self.firsts = np.cumsum([0, *(block.rows for _, _, block in self.blocks)], dtype=np.int64)
        return facts

    @property
    def rows(self) -> int:
        return int(self.firsts[-1])

    @property
    def in_memory(self) -> bool:
        return all(source.in_memory for source in self.sources)

    def read(self, start: int, stop: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield rows ``start`` to before ``stop``, in order. A block is read from its beginning."""
        place = int(np.searchsorted(self.firsts, start, side="right")) - 1
        while start < stop:
            source, index, block = self.blocks[place]
            at = int(self.firsts[place])
            if block.rows:
                for batch in self.sources[source].read(index, columns):
                    low, high = max(start - at, 0), min(stop - at, batch.num_rows)
                    if low < high:
                        yield batch.slice(low, high - low)
                    at += batch.num_rows
                    if at >= stop:
                        return
            place += 1
            start = int(self.firsts[place])

    def name_row(self, number: int) -> str:
        place = int(np.searchsorted(self.firsts, number, side="right")) - 1
        source, index, _ = self.blocks[place]
        return self.sources[source].name_row(index, number - int(self.firsts[place]))


class ZippedSource(RememberingSource):
    """Columns of several sides, which have as many rows each; a side is some sources one after the other.

    Blocks are those of the side with the fewest, so that blocks of the others are read about once; sides in memory do
    not count unless all are. A column whose name an earlier side has gets the first free number: "x_1", "x_2".
    """

    def __init__(self, sides: Sequence[Sequence[Source]], orders: Sequence[BlockOrder] | None = None) -> None:
        super().__init__()
        given = orders or [None] * len(sides)
        self._sides = [OrderedRows(sources, order) for sources, order in zip(sides, given, strict=True)]
        everything = [source for sources in sides for source in sources]
        self._inners = tuple(everything)
        self.in_memory = all(source.in_memory for source in everything)
        self.cheap_to_decode = all(source.cheap_to_decode for source in everything)
        self._leading = 0
        #: (side, name there) of each column.
        self._columns: dict[str, tuple[int, str]] = {}

    def _inspect_data(self) -> SourceFacts:
        from powertrain.data.output.tables import widened

        facts = [side.inspect() for side in self._sides]
        rows = [side.rows for side in self._sides]
        if len(set(rows)) > 1:
            raise DataError(
                f"zip() needs datasets with the same number of rows, and these have {', '.join(map(str, rows))}. Use "
                "limit() to make them equal."
            )
        # Rows in memory, often one block, can be cut anywhere at no cost.
        self._leading = min(
            range(len(rows)),
            key=lambda number: (self._sides[number].in_memory, len(self._sides[number].blocks)),
        )
        self._columns, fields = {}, []
        for number, side in enumerate(facts):
            schema = side[0].schema
            for other in side[1:]:
                schema = widened(schema, other.schema)
            for field in schema:
                names = (f"{field.name}_{suffix}" for suffix in itertools.count(1))
                name = next(
                    name for name in itertools.chain([field.name], names) if name not in self._columns
                )
                self._columns[name] = (number, field.name)
                fields.append(field.with_name(name))
        per_row = [
            sum(block.nbytes for _, _, block in side.blocks) / max(side.rows, 1) for side in self._sides
        ]
        blocks = tuple(
            BlockFacts(block.rows, int(block.rows * sum(per_row)))
            for _, _, block in self._sides[self._leading].blocks
        )
        joined = "/".join("+".join(fact.fingerprint for fact in side) for side in facts) + self._order_key()
        digest = xxhash.xxh3_128_hexdigest(f"zip/{joined}".encode())
        return SourceFacts(blocks, pa.schema(fields), digest)

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self.inspect().schema
        wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        start = int(self._sides[self._leading].firsts[block])
        stop = start + self.inspect().blocks[block].rows
        if not wanted.names:
            yield with_rows_only(stop - start)
            return
        names: dict[int, list[str]] = {}
        for name in wanted.names:
            side, stored = self._columns[name]
            names.setdefault(side, []).append(stored)
        streams = {side: self._sides[side].read(start, stop, stored) for side, stored in names.items()}
        places = [self._columns[name] for name in wanted.names]
        for pieces in _in_step(streams):
            arrays = [
                pieces[side].column(pieces[side].schema.get_field_index(stored)) for side, stored in places
            ]
            typed = [_as(array, field.type) for array, field in zip(arrays, wanted, strict=True)]
            yield pa.RecordBatch.from_arrays(typed, schema=wanted)

    def _order_key(self) -> str:
        orders = [side.order for side in self._sides]
        return f"/{orders}" if any(order is not None for order in orders) else ""

    @property
    def cache_key(self) -> str:
        sides = ["+".join(source.cache_key for source in side.sources) for side in self._sides]
        return f"zip/{'/'.join(sides)}{self._order_key()}"

    def name_row(self, block: int, row: int) -> str:
        self.inspect()
        number = int(self._sides[self._leading].firsts[block]) + row
        return self._sides[0].name_row(number)

    def publish(self, directory: str) -> Source:
        import copy
        import os

        other = copy.copy(self)
        sides, count = [], 0
        for side in self._sides:
            published = copy.copy(side)
            found = []
            for source in side.sources:
                found.append(source.publish(os.path.join(directory, f"zipped-{count}")))
                count += 1
            published.sources = tuple(found)
            sides.append(published)
        other._sides = sides
        other._inners = tuple(source for side in sides for source in side.sources)
        return other


def _as(array: Any, kind: Any) -> Any:
    from powertrain.data.output.tables import as_type

    if array.type == kind:
        return array
    return as_type(pa.chunked_array([array]), kind).combine_chunks()


def _in_step(streams: dict[int, Iterator[pa.RecordBatch]]) -> Iterator[dict[int, pa.RecordBatch]]:
    """Yield batches of equal length from streams of equally many rows."""
    held: dict[int, pa.RecordBatch | None] = dict.fromkeys(streams)
    while True:
        for side, stream in streams.items():
            batch = held[side]
            while batch is None or not batch.num_rows:
                batch = next(stream, None)
                if batch is None:
                    return
            held[side] = batch
        ready = {side: batch for side, batch in held.items() if batch is not None}
        rows = min(batch.num_rows for batch in ready.values())
        yield {side: batch.slice(0, rows) for side, batch in ready.items()}
        held = {side: batch.slice(rows) for side, batch in ready.items()}
