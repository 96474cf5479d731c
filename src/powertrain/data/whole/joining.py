"""Rows of two datasets put together by equal values of columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from powertrain.data.whole.blocks import cut_evenly
from powertrain.data.whole.database import ROW, Database
from powertrain.data.whole.inputs import Input
from powertrain.data.whole.ordering import restored
from powertrain.data.whole.query import Query, QueryResult
from powertrain.errors import DataError

#: Ray Data's kinds of joins, as SQL.
_OUTER = {
    "inner": "INNER JOIN",
    "left_outer": "LEFT JOIN",
    "right_outer": "RIGHT JOIN",
    "full_outer": "FULL JOIN",
}
_ONE_SIDED = {
    "left_semi": ("SEMI", 0),
    "left_anti": ("ANTI", 0),
    "right_semi": ("SEMI", 1),
    "right_anti": ("ANTI", 1),
}
JOIN_TYPES = (*_OUTER, *_ONE_SIDED)
#: What the columns of each side begin with in results.
_LEFT, _RIGHT = "left_", "right_"


@dataclass(frozen=True)
class JoinRows(Query):
    """Rows of two inputs whose keys are equal; null equals nothing."""

    kind: str
    left_on: tuple[str, ...]
    right_on: tuple[str, ...]
    left_suffix: str | None = None
    right_suffix: str | None = None

    @property
    def name(self) -> str:
        return "join()"

    @property
    def identity(self) -> str:
        return repr((self.kind, self.left_on, self.right_on, self.left_suffix, self.right_suffix))

    def compute(self, inputs: Sequence[Input], database: Database) -> QueryResult:
        left, right = inputs
        left.check_keys("join(): on", self.left_on)
        right.check_keys("join(): right_on", self.right_on)
        for one, other in zip(self.left_on, self.right_on, strict=True):
            kinds = left.schema.field(one).type, right.schema.field(other).type
            if kinds[0] != kinds[1]:
                raise DataError(
                    f"join(): the columns {one!r} and {other!r} have the types {kinds[0]} and {kinds[1]}. Give them "
                    "one type first, for example with map_batches() or with_column()."
                )
        for rows, name in ((left, "left"), (right, "right")):
            if rows.gathered:
                rows.keep()
            database.add(name, rows.read_schema(rows.held), rows.read(rows.held))
        if self.kind in _ONE_SIDED:
            return self._one_sided(left, right, database)
        return self._both(left, right, database)

    def _condition(self, left: Input, right: Input) -> str:
        pairs = zip(self.left_on, self.right_on, strict=True)
        return " AND ".join(f'"left".{left.sql(one)} = "right".{right.sql(other)}' for one, other in pairs)

    def _one_sided(self, left: Input, right: Input, database: Database) -> QueryResult:
        how, side = _ONE_SIDED[self.kind]
        kept, name, other = (left, "left", "right") if side == 0 else (right, "right", "left")
        columns = [f'"{name}".{column}' for column in [*map(kept.sql, kept.held), ROW]]
        _, batches = database.query(
            f'SELECT {", ".join(columns)} FROM "{name}" {how} JOIN "{other}" ON {self._condition(left, right)} '
            f'ORDER BY "{name}".{ROW}'
        )
        names = {column: column for column in kept.schema.names}
        tables: Iterator[pa.Table] = (
            table for batch in batches for table in restored(batch, [(kept, "", names)])
        )
        return QueryResult(cut_evenly(tables), kept.schema)

    def _both(self, left: Input, right: Input, database: Database) -> QueryResult:
        left_names, right_names = self._names(left, right)
        keys = dict(zip(self.left_on, self.right_on, strict=True))
        selected = [f'"left".{ROW} AS {_LEFT}{ROW}', f'"right".{ROW} AS {_RIGHT}{ROW}']
        for column in left.held:
            value = f'"left".{left.sql(column)}'
            if column in keys:
                value = f'coalesce({value}, "right".{right.sql(keys[column])})'
            if column in left_names:
                selected.append(f"{value} AS {_LEFT}{left.sql(column)}")
        for column in right.held:
            if column in right_names:
                selected.append(f'"right".{right.sql(column)} AS {_RIGHT}{right.sql(column)}')
        _, batches = database.query(
            f'SELECT {", ".join(selected)} FROM "left" {_OUTER[self.kind]} "right" '
            f"ON {self._condition(left, right)} "
            f"ORDER BY {_LEFT}{ROW} NULLS LAST, {_RIGHT}{ROW} NULLS LAST"
        )
        sides = [(left, _LEFT, left_names), (right, _RIGHT, right_names)]
        schema = pa.schema(
            [
                rows.schema.field(name).with_name(new).with_nullable(True)
                for rows, _, names in sides
                for name, new in names.items()
            ]
        )
        return QueryResult(cut_evenly(table for batch in batches for table in restored(batch, sides)), schema)

    def _names(self, left: Input, right: Input) -> tuple[dict[str, str], dict[str, str]]:
        """Return the new names of both sides' columns. The keys are those of the left side; where all rows of the
        right side are kept, those of the right."""
        brought = [name for name in right.schema.names if name not in self.right_on]
        twice = set(left.schema.names) & set(brought)
        if twice and self.left_suffix is None and self.right_suffix is None:
            raise DataError(
                f"join(): both datasets have the columns {sorted(twice)}. Give left_suffix=... or right_suffix=..., "
                "which is added to their names, or drop them on one side."
            )
        left_names = {
            name: name + (self.left_suffix or "") * (name in twice and name not in self.left_on)
            for name in left.schema.names
        }
        right_names = {name: name + (self.right_suffix or "") * (name in twice) for name in brought}
        if self.kind == "right_outer":
            left_names = {name: new for name, new in left_names.items() if name not in self.left_on}
            right_names = {name: right_names.get(name, name) for name in right.schema.names}
        found = [*left_names.values(), *right_names.values()]
        clashing = sorted({name for name in found if found.count(name) > 1})
        if clashing:
            raise DataError(
                f"join(): the result would have several columns named {clashing}. Give other suffixes, or rename "
                "columns first."
            )
        return left_names, right_names
