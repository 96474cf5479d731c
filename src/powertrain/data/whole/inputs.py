"""The rows of a plan as DuckDB reads them, numbered, and what DuckDB does not hold gathered by those numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from powertrain.data.consuming import PlanReader
from powertrain.data.output.materialized import MaterializedSource
from powertrain.data.output.tables import conformed, declared_schema
from powertrain.data.plan.plan import Plan
from powertrain.data.sources.plain import checked_columns
from powertrain.data.whole.database import ROW
from powertrain.errors import DataError

_pt = pa.types


def is_held(kind: pa.DataType) -> bool:
    """Return whether DuckDB holds values of this type without a change: it can compare them, too."""
    if _pt.is_timestamp(kind):
        return kind.tz is None or kind.unit != "ns"  # times with a zone have microseconds there
    return (
        _pt.is_integer(kind)
        or _pt.is_float32(kind)
        or _pt.is_float64(kind)
        or _pt.is_boolean(kind)
        or _pt.is_string(kind)
        or _pt.is_large_string(kind)
        or _pt.is_binary(kind)
        or _pt.is_large_binary(kind)
        or _pt.is_date32(kind)
        or _pt.is_decimal128(kind)
    )


class Input:
    """The rows of a plan, read in the order of its blocks whether it is shuffled or not."""

    def __init__(self, plan: Plan) -> None:
        if plan.mixture is None:
            plan = dataclasses.replace(plan, shuffled=False)
        #: Identifies the rows: by their sources, or by the values that functions have made of them, which may decide
        #: the order of a result.
        self.fingerprint = plan.inspected().fingerprint
        declared = declared_schema(plan)
        # Rows that functions make have no type before all are made; a mixture has no order of blocks.
        if declared is None or plan.mixture is not None:
            plan = PlanReader(plan).materialize()
            facts = plan.parts[0].source.inspect()
            declared, self.fingerprint = facts.schema, facts.fingerprint
        self._plan, self.schema = plan, declared

    @property
    def held(self) -> list[str]:
        """The columns that DuckDB holds; the others are gathered."""
        return [field.name for field in self.schema if is_held(field.type)]

    @property
    def gathered(self) -> list[str]:
        """The columns that are carried by the number of their row."""
        return [field.name for field in self.schema if not is_held(field.type)]

    def check_keys(self, what: str, names: Sequence[str]) -> None:
        """Raise :class:`DataError` for names of columns that do not exist, or whose values cannot be compared."""
        checked_columns(names, self.schema.names, what)
        for name in names:
            kind = self.schema.field(name).type
            if not is_held(kind):
                raise DataError(
                    f"{what}: the column {name!r} has the type {kind}, whose values cannot be ordered. Name a column "
                    "of numbers, text or times, or make one with map()."
                )

    def sql(self, name: str) -> str:
        """Return the name of a column in DuckDB, which does not tell capital letters from small ones."""
        return f"c{self.schema.get_field_index(name)}"

    def read_schema(self, columns: Sequence[str]) -> pa.Schema:
        """Return the types of :meth:`read`: these columns, by their names in DuckDB, then the number of the row."""
        fields: list[Any] = [pa.field(self.sql(name), self.schema.field(name).type) for name in columns]
        return pa.schema([*fields, pa.field(ROW, pa.int64())])

    def read(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows, with these columns and the number of each."""
        schema = self.read_schema(columns)
        first = 0
        for table in self._tables(columns):
            numbers: Any = pa.array(np.arange(first, first + table.num_rows, dtype=np.int64))
            first += table.num_rows
            columns_of = [table.column(name) for name in columns]
            numbered = pa.table([*columns_of, pa.chunked_array([numbers])], schema=schema)
            yield from numbered.to_batches()

    def tables(self) -> Iterator[pa.Table]:
        """Yield all rows with all columns."""
        yield from self._tables(self.schema.names)

    def _tables(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        schema = pa.schema([self.schema.field(name) for name in columns])
        for block in self._plan.inspected().blocks:
            source = self._plan.parts[block.part].source
            first, found, stop = 0, 0, block.start + block.rows
            for batch in source.read(block.index, list(columns)):
                low, high = max(block.start - first, 0), min(stop - first, batch.num_rows)
                first += batch.num_rows
                if low < high:
                    found += high - low
                    yield _table(batch.slice(low, high - low), schema)
                if first >= stop:
                    break
            if found != block.rows:
                raise DataError(
                    f"The data has changed while it was in use: there are {found} rows where {block.rows} were, in the "
                    f"block that begins with {source.name_row(block.index, block.start)}. Do not write to files that "
                    "are being read, and start again."
                )

    @property
    def row_bytes(self) -> float:
        """Approximate bytes of a row."""
        blocks = [block for part in self._plan.parts for block in part.source.inspect().blocks]
        return sum(block.nbytes for block in blocks) / max(sum(block.rows for block in blocks), 1)

    # -- rows by their number

    def keep(self) -> None:
        """Keep the rows in files, so that :meth:`take` finds single ones."""
        source = self._plan.parts[0].source
        if (
            len(self._plan.parts) > 1
            or self._plan.blocks is not None
            or not isinstance(source, MaterializedSource)
        ):
            self._plan = PlanReader(self._plan).materialize()
            kept = self._plan.parts[0].source.inspect().schema
            self.schema = pa.schema(
                [self.schema.field(name).with_type(kept.field(name).type) for name in kept.names]
            )

    def take(self, rows: pa.Array[Any], columns: Sequence[str]) -> pa.Table:
        """Return these columns of the rows of these numbers, in that order; a null number gives nulls."""
        source = self._plan.parts[0].source
        schema = pa.schema([self.schema.field(name) for name in columns])
        wanted = rows.drop_null().to_numpy(zero_copy_only=False)
        ends = np.cumsum([block.rows for block in source.inspect().blocks])
        different, back = np.unique(wanted, return_inverse=True)
        blocks = np.searchsorted(ends, different, side="right")
        pieces = []
        for number in np.unique(blocks).tolist():
            inside = different[blocks == number] - (int(ends[number - 1]) if number else 0)
            batches = list(source.read(number, list(columns)))
            pieces.append(pa.Table.from_batches(batches).take(pa.array(inside)))
        found = pa.concat_tables(pieces) if pieces else schema.empty_table()
        places = np.zeros(len(rows), np.int64)
        present = rows.is_valid().to_numpy(zero_copy_only=False)
        places[present] = back
        indices: Any = pa.array(places, mask=~present)
        return conformed(found.take(indices), schema, "")


def _table(batch: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    if not schema.names:
        return pa.Table.from_batches([batch]).select([])
    return conformed(pa.Table.from_batches([batch]), schema, "")
