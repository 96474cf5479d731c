"""Rows brought together by the values of columns: aggregated, or given to a function group by group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from powertrain.data.aggregate.functions import AggregateFn
from powertrain.data.aggregate.standard import SqlAggregate
from powertrain.data.loading.pipeline import Pipeline
from powertrain.data.operations.calls import Call, Setting
from powertrain.data.operations.functions import MapBatches
from powertrain.data.operations.operation import Applied, RowPiece
from powertrain.data.operations.runner import Runner
from powertrain.data.output.materialized import BLOCK_BYTES
from powertrain.data.output.tables import as_type, pieces_by_bytes, table_of
from powertrain.data.rows.rows import Rows
from powertrain.data.sources.plain import checked_columns, plain_table
from powertrain.data.whole.blocks import changes, cut_at_changes, cut_evenly
from powertrain.data.whole.database import Database
from powertrain.data.whole.inputs import Input, is_held
from powertrain.data.whole.ordering import order_by, ordered
from powertrain.data.whole.query import Query, QueryResult
from powertrain.errors import DataError

_pt = pa.types


@dataclass(frozen=True, eq=False)
class MapGroupRows(MapBatches):
    """Calls the function with the rows of each group. It is given whole groups, sorted by their keys."""

    keys: tuple[str, ...] = ()
    #: In rows: no piece is cut.
    batch_size: int = 2**62

    verb: ClassVar[str] = "map_groups"

    def _applied(self, call: Call, piece: RowPiece, setting: Setting) -> Applied:
        from powertrain.data.rows.formats import to_arrow
        from powertrain.data.rows.gather import concat_rows

        rows = piece.rows
        keys = to_arrow(rows.with_columns({name: rows.columns[name] for name in self.keys}))
        ends = changes(keys, self.keys).tolist() if self.keys else []
        made: list[Rows] = []
        for start, end in itertools.pairwise([0, *ends, len(rows)]):
            applied = super()._applied(call, RowPiece(rows.between(start, end)), setting)
            if len(applied.rows):
                made.append(applied.rows)
        return Applied(concat_rows(made) if made else Rows({}, np.empty(0, np.int64)))


def _in_groups(
    database: Database, rows: Input, keys: Sequence[str], operation: MapGroupRows
) -> Iterator[pa.Table]:
    """Yield the results of an operation on groups, the groups in the order of their keys."""
    order = order_by(rows, keys, [False] * len(keys))
    in_order = ordered(database, rows, order)
    blocks: Iterable[pa.Table] = cut_at_changes(in_order, keys, each=False) if keys else _one(in_order)
    runner = Runner([operation], seed=0, name_row=lambda number: f"row {number} in the order of the groups")
    work = Pipeline(
        _numbered(blocks),
        lambda block: runner.run(block, 0).rows,
        threads=operation.concurrency,
        depth=operation.concurrency + 1,
    )
    try:
        with closing(work):
            for made in work:
                if len(made):
                    yield table_of(made)
    finally:
        runner.close()


def _one(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    found = list(tables)
    if found:
        yield pa.concat_tables(found)


def _numbered(blocks: Iterable[pa.Table]) -> Iterator[Rows]:
    from dataclasses import replace

    from powertrain.data.rows.formats import from_arrow
    from powertrain.data.sources.base import PYTHON_FLOATS

    first = 0
    for table in blocks:
        floats = frozenset(
            field.name for field in table.schema if PYTHON_FLOATS in (field.metadata or {}).items()
        )
        numbers = np.arange(first, first + table.num_rows, dtype=np.int64)
        yield replace(from_arrow(table.combine_chunks(), numbers), python_floats=floats)
        first += table.num_rows


@dataclass(frozen=True)
class MapGroups(Query):
    """The results of a function of the user for each group."""

    keys: tuple[str, ...]
    operation: MapGroupRows

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def identity(self) -> str:
        return repr((self.keys, self.operation.batch_format))

    @property
    def calls_functions(self) -> bool:
        return True

    def compute(self, inputs: Sequence[Input], database: Database) -> QueryResult:
        [rows] = inputs
        rows.check_keys("groupby()", self.keys)
        made = _in_groups(database, rows, self.keys, self.operation)
        return QueryResult(pieces_by_bytes(made, BLOCK_BYTES), rows.schema)


class _AggregatedByFunctions:
    """Returns the results of a group, for :class:`MapGroupRows`."""

    def __init__(self, keys: Sequence[str], functions: Sequence[AggregateFn]) -> None:
        self._keys, self._functions = keys, functions

    def __call__(self, table: pa.Table) -> dict[str, list[Any]]:
        key: Any = tuple(table.column(name)[0].as_py() for name in self._keys)
        key = key[0] if len(key) == 1 else key or None
        return {each.name: [each.finish(each.add(each.start(key), table))] for each in self._functions}


@dataclass(frozen=True, eq=False)
class AggregateGroups(Query):
    """One row for each group: its keys and the results of aggregations."""

    keys: tuple[str, ...]
    aggregations: tuple[AggregateFn, ...]

    @property
    def name(self) -> str:
        return "groupby().aggregate()"

    @property
    def identity(self) -> str:
        settings = [
            (type(each).__qualname__, each.name, sorted((k, repr(v)) for k, v in vars(each).items()))
            if isinstance(each, SqlAggregate)
            else each.name
            for each in self.aggregations
        ]
        return repr((self.keys, settings))

    def compute(self, inputs: Sequence[Input], database: Database) -> QueryResult:
        [rows] = inputs
        rows.check_keys("groupby()", self.keys)
        by_sql, by_functions = _separated(self.aggregations, rows, self.keys)
        schema, tables = _by_sql(database, rows, self.keys, by_sql)
        if not by_functions:
            return QueryResult(cut_evenly(tables), schema)
        operation = MapGroupRows(
            fn=_AggregatedByFunctions(self.keys, by_functions), batch_format="pyarrow", keys=self.keys
        )
        with Database(self.name) as another:
            # Both are in the order of the keys, and have a row for each group.
            results = list(_in_groups(another, rows, self.keys, operation))
        both = _side_by_side(list(tables), results, [each.name for each in self.aggregations], self.keys)
        made = both.select([each.name for each in by_functions])
        return QueryResult([both] if both.num_rows else [], both.schema, made)


def aggregate_all(aggregations: Sequence[AggregateFn], rows: Input) -> dict[str, Any]:
    """Return the results of aggregations of all rows, by their names."""
    by_sql, by_functions = _separated(aggregations, rows, ())
    found: dict[str, Any] = {}
    if by_sql:
        with Database("aggregate()") as database:
            _, tables = _by_sql(database, rows, (), by_sql)
            [row] = [row for table in tables for row in table.to_pylist()]
            found.update(row)
    if by_functions:
        accumulators = [each.start(None) for each in by_functions]
        for table in rows.tables():
            for number, each in enumerate(by_functions):
                accumulators[number] = each.add(accumulators[number], table)
        for each, accumulator in zip(by_functions, accumulators, strict=True):
            found[each.name] = each.finish(accumulator)
    return {each.name: found[each.name] for each in aggregations}


def _separated(
    aggregations: Sequence[AggregateFn], rows: Input, keys: Sequence[str]
) -> tuple[list[SqlAggregate], list[AggregateFn]]:
    names = [*keys, *(each.name for each in aggregations)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(
            f"Several results would be named {twice}. Give aggregations an alias_name=... of their own."
        )
    by_sql, by_functions = [], []
    for each in aggregations:
        on = each.get_target_column()
        if on is not None:
            checked_columns([on], rows.schema.names, each.name)
        if not isinstance(each, SqlAggregate):
            by_functions.append(each)
            continue
        each.check(rows.schema)
        if on is not None and not _can_aggregate(rows.schema.field(on).type):
            raise DataError(
                f"{each.name} cannot be computed: the column {on!r} has the type {rows.schema.field(on).type}. Use "
                "map_groups(), or an AggregateFn of your own."
            )
        by_sql.append(each)
    return by_sql, by_functions


def _can_aggregate(kind: Any) -> bool:
    if _pt.is_list(kind) or _pt.is_large_list(kind):
        return _can_aggregate(kind.value_type)
    return is_held(kind)


def _by_sql(
    database: Database, rows: Input, keys: Sequence[str], aggregations: Sequence[SqlAggregate]
) -> tuple[pa.Schema, Iterator[pa.Table]]:
    """Return the results of aggregations of each group, in the order of the keys."""
    targets = [each.get_target_column() for each in aggregations]
    columns = list(dict.fromkeys([*keys, *(name for name in targets if name is not None)]))
    database.add("input", rows.read_schema(columns), rows.read(columns))
    selected = [rows.sql(name) for name in keys]
    for number, (each, target) in enumerate(zip(aggregations, targets, strict=True)):
        kind = None if target is None else rows.schema.field(target).type
        selected.append(f"{each.sql('' if target is None else rows.sql(target), kind)} AS result{number}")
    query = f'SELECT {", ".join(selected) or "1"} FROM "input"'
    if keys:
        grouped = ", ".join(rows.sql(name) for name in keys)
        query += f" GROUP BY {grouped} ORDER BY {order_by(rows, keys, [False] * len(keys))}"
    schema, batches = database.query(query)
    names = [*keys, *(each.name for each in aggregations)] or schema.names
    fields = {name: rows.schema.field(name) for name in keys}
    return _typed(schema.empty_table().rename_columns(names), fields).schema, (
        _typed(pa.Table.from_batches([batch]).rename_columns(names), fields) for batch in batches
    )


def _typed(table: pa.Table, fields: dict[str, Any]) -> pa.Table:
    """Return results in plain types, and the keys in theirs."""
    table = plain_table(table)
    for name, field in fields.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, field, as_type(table.column(name), field.type))
    return table


def _side_by_side(
    keyed: Sequence[pa.Table], more: Sequence[pa.Table], names: Sequence[str], keys: Sequence[str]
) -> pa.Table:
    """Return the columns of both, whose rows belong together."""
    left = pa.concat_tables(keyed) if keyed else pa.table({})
    right = pa.concat_tables(more, promote_options="permissive") if more else pa.table({})
    columns: dict[str, Any] = {name: left.column(name) for name in left.column_names}
    columns.update({name: right.column(name) for name in right.column_names})
    return pa.table({name: columns[name] for name in [*keys, *names] if name in columns})
