"""Rows in another order: sorted by columns, or brought together by them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from powertrain.data.output.materialized import BLOCK_BYTES
from powertrain.data.output.tables import as_type
from powertrain.data.whole.blocks import cut_at_changes, cut_evenly
from powertrain.data.whole.database import ROW, Database
from powertrain.data.whole.inputs import Input
from powertrain.data.whole.query import Query, QueryResult
from powertrain.errors import DataError

#: Name of the column that holds the part that a row belongs to.
PART = "__powertrain_part"


def order_by(rows: Input, keys: Sequence[str], descending: Sequence[bool]) -> str:
    """Return the order by columns as SQL: NaN after all numbers and null after NaN, also in descending order."""
    terms = []
    for name, down in zip(keys, descending, strict=True):
        column = rows.sql(name)
        if down and pa.types.is_floating(rows.schema.field(name).type):
            terms.append(f"isnan({column}) NULLS LAST")
        terms.append(f"{column} {'DESC' if down else 'ASC'} NULLS LAST")
    return ", ".join(terms)


def ordered(database: Database, rows: Input, order: str, part: str | None = None) -> Iterator[pa.Table]:
    """Yield all rows in an order given as SQL; rows that are equal in it in theirs. ``part`` is one more column."""
    if rows.gathered:
        rows.keep()
    held = rows.held
    database.add("input", rows.read_schema(held), rows.read(held))
    selected = [rows.sql(name) for name in held] + [ROW] * bool(rows.gathered)
    more = [] if part is None else [f"{part} AS {PART}"]
    _, batches = database.query(
        f'SELECT {", ".join([*selected, *more])} FROM "input" ORDER BY {order}{", " if order else ""}{ROW}'
    )
    for batch in batches:
        names = {name: name for name in rows.schema.names}
        yield from restored(batch, [(rows, "", names)], [PART] if more else [])


#: An input, what its columns begin with in a batch of results, and the new names of its columns.
Side = tuple[Input, str, dict[str, str]]


def restored(batch: pa.RecordBatch, sides: Sequence[Side], more: Sequence[str] = ()) -> Iterator[pa.Table]:
    """Yield the rows of a batch of DuckDB's with the names and types of the inputs, and the columns that it does not
    hold: as few rows at a time as their size requires."""
    width = sum(rows.row_bytes for rows, _, _ in sides if rows.gathered)
    step = max(1, int(BLOCK_BYTES // width)) if width else batch.num_rows
    for start in range(0, batch.num_rows, step):
        yield _restored(batch.slice(start, step), sides, more)


def _restored(batch: pa.RecordBatch, sides: Sequence[Side], more: Sequence[str]) -> pa.Table:
    columns: list[Any] = []
    fields: list[Any] = []
    for rows, prefix, names in sides:
        wanted = [name for name in names if name in rows.gathered]
        gathered = rows.take(batch.column(prefix + ROW), wanted) if wanted else None
        for name, new in names.items():
            field = rows.schema.field(name).with_name(new).with_nullable(True)
            if gathered is not None and name in wanted:
                column = gathered.column(name)
            else:
                column = pa.chunked_array([batch.column(prefix + rows.sql(name))])
            columns.append(as_type(column, field.type))
            fields.append(field)
    for name in more:
        columns.append(pa.chunked_array([batch.column(name)]))
        fields.append(pa.field(name, columns[-1].type))
    return pa.table(columns, schema=pa.schema(fields))


def without_part(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    for table in tables:
        yield table.drop_columns([PART])


@dataclass(frozen=True)
class SortRows(Query):
    """All rows, sorted by columns. With ``boundaries`` blocks end where the first column crosses one of them."""

    keys: tuple[str, ...]
    descending: tuple[bool, ...]
    boundaries: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        return "sort()"

    @property
    def identity(self) -> str:
        return repr((self.keys, self.descending, self.boundaries))

    def compute(self, inputs: Sequence[Input], database: Database) -> QueryResult:
        [rows] = inputs
        rows.check_keys("sort()", self.keys)
        order = order_by(rows, self.keys, self.descending)
        if not self.boundaries:
            return QueryResult(cut_evenly(ordered(database, rows, order)), rows.schema)
        first, kind = rows.sql(self.keys[0]), rows.schema.field(self.keys[0]).type
        limits = [_literal(value, kind) for value in self.boundaries]
        part = " + ".join(f"coalesce(({first} >= {limit})::INTEGER, 1)" for limit in limits)
        tables = cut_at_changes(ordered(database, rows, order, part), [PART], each=True)
        return QueryResult(without_part(tables), rows.schema)


def _literal(value: Any, kind: pa.DataType) -> str:
    """Return a boundary as SQL."""
    try:
        text = str(pa.scalar(value, kind).as_py())
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"sort(): boundaries has {value!r}, which is not a value of a column of the type {kind} ({error}). Give "
            "values of the first column."
        ) from error
    if pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        return text
    if pa.types.is_floating(kind):
        return f"'{text}'::DOUBLE"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "'" + text.replace("'", "''") + "'"
    if pa.types.is_date32(kind):
        return f"DATE '{text}'"
    raise DataError(f"sort(): boundaries of a column of the type {kind} are not possible. Leave them out.")


@dataclass(frozen=True)
class PartitionRows(Query):
    """All rows in as many blocks as given, those with equal keys in the same one."""

    keys: tuple[str, ...]
    count: int
    sort: bool

    @property
    def name(self) -> str:
        return "repartition()"

    @property
    def identity(self) -> str:
        return repr((self.keys, self.count, self.sort))

    def compute(self, inputs: Sequence[Input], database: Database) -> QueryResult:
        [rows] = inputs
        rows.check_keys("repartition()", self.keys)
        # A hash that no version of DuckDB changes. A null differs from its text by the mark before it.
        text = " || ".join(
            f"coalesce('=' || {rows.sql(name)}::VARCHAR, '0') || chr(31)" for name in self.keys
        )
        part = f"(md5_number_lower({text}) % {self.count})"
        order = part
        if self.sort:
            order += ", " + order_by(rows, self.keys, [False] * len(self.keys))
        tables = cut_at_changes(ordered(database, rows, order, part), [PART], each=True)
        return QueryResult(without_part(tables), rows.schema)
