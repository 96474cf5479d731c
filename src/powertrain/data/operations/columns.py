"""Operations on columns: select, drop, rename, filter by expression."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from powertrain.data.arguments import shortened, shown
from powertrain.data.operations.calls import Setting
from powertrain.data.operations.functions import kept_rows
from powertrain.data.operations.operation import Applied, Apply, Operation, RowPiece
from powertrain.data.operations.returned import quoted
from powertrain.data.rows.rows import Rows
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow.compute as pc


@dataclass(frozen=True)
class FilterExpression(Operation):
    """Keeps the rows for which an Arrow expression holds; a null counts as false."""

    expression: pc.Expression

    @property
    def name(self) -> str:
        return f"filter({shortened(str(self.expression), 200)})"

    @property
    def keeps_count(self) -> bool:
        return False

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        return columns

    def begin(self) -> Apply:
        return self._applied

    def _applied(self, piece: RowPiece, setting: Setting) -> Applied:
        import pyarrow as pa

        from powertrain.data.rows.formats import to_arrow
        from powertrain.data.sources.filtered import mask_of

        rows, text = piece.rows, str(self.expression)
        # A column that the expression uses is named in its text. The others, images perhaps, need not be converted.
        used = {name: column for name, column in rows.columns.items() if name in text}
        table = to_arrow(rows.with_columns(used or rows.columns))
        try:
            stays = mask_of(self.expression, table.combine_chunks().to_batches()[0])
        except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.name} cannot be computed: {error}. The columns are {quoted(rows.columns)}."
            ) from error
        return kept_rows(rows, stays)


@dataclass(frozen=True)
class SelectColumns(Operation):
    """Keeps only these columns, in this order."""

    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"select_columns({quoted(self.columns)})"

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        return {name: columns[name] for name in self.columns if name in columns}

    def begin(self) -> Apply:
        return self._applied

    def _applied(self, piece: RowPiece, setting: Setting) -> Applied:
        there = piece.rows.columns
        check_columns(self.name, self.columns, there)
        return Applied(piece.rows.with_columns({name: there[name] for name in self.columns}))


@dataclass(frozen=True)
class DropColumns(Operation):
    """Removes these columns."""

    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"drop_columns({quoted(self.columns)})"

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        return without(columns, self.columns)

    def begin(self) -> Apply:
        return self._applied

    def _applied(self, piece: RowPiece, setting: Setting) -> Applied:
        there = piece.rows.columns
        check_columns(self.name, self.columns, there)
        return Applied(
            piece.rows.with_columns({name: there[name] for name in there if name not in self.columns})
        )


@dataclass(frozen=True, eq=False)
class RenameColumns(Operation):
    """Renames columns in place: by a mapping of old to new, or by the new names of all."""

    names: Mapping[str, str] | Sequence[str]

    @property
    def name(self) -> str:
        return "rename_columns"

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        names = self.names
        if isinstance(names, Mapping):
            return {names.get(name, name): stored for name, stored in columns.items()}
        # Where some columns differ from the stored ones, the position of each is unknown.
        return dict(zip(names, columns.values(), strict=True)) if len(names) == len(columns) else {}

    def begin(self) -> Apply:
        return self._applied

    def _applied(self, piece: RowPiece, setting: Setting) -> Applied:
        rows = piece.rows
        names = renamed(list(rows.columns), self.names)
        new_name = dict(zip(rows.columns, names, strict=True))
        return Applied(
            Rows(
                dict(zip(names, rows.columns.values(), strict=True)),
                rows.numbers,
                python_floats=frozenset(new_name[name] for name in rows.python_floats),
                lists=frozenset(new_name[name] for name in rows.lists),
            )
        )


def renamed(columns: Sequence[str], names: Mapping[str, str] | Sequence[str]) -> list[str]:
    """Return the new names of ``columns``. Raises :class:`DataError` unless they are unique."""
    if isinstance(names, Mapping):
        check_columns("rename_columns", names, columns)
        new = [names.get(name, name) for name in columns]
    elif len(names) == len(columns):
        new = list(names)
    else:
        raise DataError(
            f"rename_columns was given {len(names)} names ({quoted(names)}) for {len(columns)} columns "
            f"({quoted(columns)}). Give one for each, or a dict of old to new names."
        )
    twice = sorted({name for name in new if new.count(name) > 1})
    if twice:
        raise DataError(f"rename_columns would give two columns the name {twice[0]!r}: {quoted(new)}.")
    return new


def without(columns: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: stored for name, stored in columns.items() if name not in set(names)}


def check_columns(operation: str, wanted: Iterable[str], there: Iterable[str]) -> None:
    """Raise :class:`DataError` unless all ``wanted`` columns are there."""
    there = list(there)
    for name in wanted:
        if name not in there:
            near = difflib.get_close_matches(str(name)[:200], there, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise DataError(
                f"{operation}: there is no column {shown(name)}; the columns are {quoted(there)}.{meant}"
            )
