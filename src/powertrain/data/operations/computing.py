"""Operations that compute expressions: columns added or replaced, and rows kept."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from powertrain.data.arguments import shortened
from powertrain.data.expressions.arrow import CHECKED, floor_divided
from powertrain.data.expressions.expr import (
    Aliased,
    Called,
    Column,
    Computed,
    Downloaded,
    Expr,
    Literal,
    OfRow,
    Star,
)
from powertrain.data.operations.calls import Call, FunctionFailed, Setting, defined_at
from powertrain.data.operations.columns import check_columns
from powertrain.data.operations.functions import BATCH_SIZE, kept_rows
from powertrain.data.operations.operation import Applied, Apply, Operation, RowPiece
from powertrain.data.operations.returned import quoted
from powertrain.data.rows.rows import Rows
from powertrain.errors import DataError, StorageError

if TYPE_CHECKING:
    from powertrain.data.plan.order import Ints

#: Rows made from one row have ids this far apart.
_COPY_STRIDE = 2**40


@dataclass(frozen=True, eq=False)
class ComputeColumns(Operation):
    """Adds or replaces columns, each computed by an expression; with ``only`` the rows have no other columns."""

    columns: tuple[tuple[str, Expr], ...]
    only: bool = False
    verb: str = "with_column"

    @property
    def name(self) -> str:
        return f"{self.verb}({quoted(name for name, _ in self.columns)})"

    @property
    def batch_size(self) -> int | None:
        return _batch_size([expr for _, expr in self.columns])

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        return _functions([expr for _, expr in self.columns])

    @property
    def keeps_row_numbers(self) -> bool:
        return any(_is_of_number(each) for _, expr in self.columns for each in expr.walk())

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        if self.only:
            named = {name: value for name, value in self.columns if isinstance(value, Column)}
            return {name: columns[v.column] for name, v in named.items() if v.column in columns}
        made = {name for name, _ in self.columns}
        return {name: stored for name, stored in columns.items() if name not in made}

    def begin(self) -> Apply:
        evaluation = Evaluation(self.name, [expr for _, expr in self.columns])
        return lambda piece, setting: self._applied(evaluation, piece, setting)

    def _applied(self, evaluation: Evaluation, piece: RowPiece, setting: Setting) -> Applied:
        rows = piece.rows
        made: dict[str, Any] = {}
        kept: dict[str, Any] = {} if self.only else dict(rows.columns)
        sources: dict[str, str] = {}
        # Later columns may use earlier ones, as in Ray Data's chains of with_column().
        for name, expr in self.columns:
            inner = expr.inner if isinstance(expr, Aliased) else expr
            if isinstance(inner, Star):
                kept.update(rows.columns)
            elif isinstance(inner, Column):  # unchanged, with the marks that it has
                check_columns(self.name, [inner.column], rows.columns)
                kept[name], sources[name] = rows.columns[inner.column], inner.column
            else:
                made[name] = evaluation.array(expr, piece, setting)
                kept[name] = None
        return Applied(_with_arrays(rows, kept, sources, made))


def _with_arrays(
    rows: Rows, kept: Mapping[str, Any], sources: Mapping[str, str], made: Mapping[str, Any]
) -> Rows:
    import pyarrow as pa

    from powertrain.data.rows.formats import from_arrow

    found = from_arrow(pa.table(dict(made)), rows.numbers) if made else None
    columns = {
        name: found.columns[name] if found and name in made else column for name, column in kept.items()
    }
    old = {name: sources.get(name, name) for name in kept if name not in made}
    return Rows(
        columns,
        rows.numbers,
        python_floats=frozenset(name for name, source in old.items() if source in rows.python_floats),
        lists=frozenset(name for name, source in old.items() if source in rows.lists)
        | (found.lists if found else frozenset()),
    )


@dataclass(frozen=True, eq=False)
class FilterComputed(Operation):
    """Keeps the rows for which an expression with functions holds; a null counts as false."""

    expression: Expr

    @property
    def name(self) -> str:
        return f"filter({shortened(repr(self.expression), 200)})"

    @property
    def keeps_count(self) -> bool:
        return False

    @property
    def batch_size(self) -> int | None:
        return _batch_size([self.expression])

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        return _functions([self.expression])

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        return columns

    def begin(self) -> Apply:
        evaluation = Evaluation(self.name, [self.expression])
        return lambda piece, setting: self._applied(evaluation, piece, setting)

    def _applied(self, evaluation: Evaluation, piece: RowPiece, setting: Setting) -> Applied:
        import pyarrow as pa

        found = evaluation.array(self.expression, piece, setting)
        if not pa.types.is_boolean(found.type) and not pa.types.is_null(found.type):
            raise DataError(
                f"{self.name} gives {found.type} and not true or false. Compare it with something."
            )
        stays = found.cast(pa.bool_()).fill_null(False).to_numpy(zero_copy_only=False)
        return kept_rows(piece.rows, stays)


def _functions(expressions: Sequence[Expr]) -> list[Callable[..., Any]]:
    """Return the functions of the user: those of this package follow from each row alone."""
    called = (each for expr in expressions for each in expr.walk() if isinstance(each, Called))
    return [each.fn for each in called if not each.is_by_row]


def _batch_size(expressions: Sequence[Expr]) -> int | None:
    """Return the rows that functions of the user get at a time: never those of a rank or of a batch."""
    return BATCH_SIZE if _functions(expressions) else None


def _is_of_number(expr: Expr) -> bool:
    """Return True for a value that follows from the number of the row alone."""
    return isinstance(expr, OfRow) and (expr.kind == "monotonically_increasing_id" or expr.is_fixed)


class Evaluation:
    """Computes expressions in one process: functions of the user are made ready once."""

    def __init__(self, name: str, expressions: Sequence[Expr]) -> None:
        self._name = name
        nodes = {id(each): each for expr in expressions for each in expr.walk()}
        self._calls = {name: _ready(each) for name, each in nodes.items() if isinstance(each, Called)}
        drawing = [name for name, each in nodes.items() if isinstance(each, (Called, OfRow))]
        #: Several functions of one operation draw different numbers.
        self._ordinals = {name: ordinal for ordinal, name in enumerate(drawing)}

    def array(self, expr: Expr, piece: RowPiece, setting: Setting) -> Any:
        """Return the values of an expression for the rows of a piece, as an Arrow array."""
        import pyarrow as pa

        try:
            found = self._value(expr, piece, setting)
        except (pa.ArrowException, KeyError, TypeError) as error:
            raise DataError(
                f"{self._name} cannot compute {shortened(repr(expr), 200)}: {shortened(str(error), 300)}. The columns "
                f"are {quoted(piece.rows.columns)}."
            ) from error
        if isinstance(found, pa.Scalar):
            constant: Any = found
            return pa.repeat(constant, len(piece.rows))
        return _one(found)

    def _value(self, expr: Expr, piece: RowPiece, setting: Setting) -> Any:
        import pyarrow as pa
        import pyarrow.compute as pc

        if isinstance(expr, Aliased):
            return self._value(expr.inner, piece, setting)
        if isinstance(expr, Column):
            return self._column(expr.column, piece.rows)
        if isinstance(expr, Literal):
            return pa.scalar(expr.value)
        if isinstance(expr, Computed):
            operands = [self._value(operand, piece, setting) for operand in expr.operands]
            function = expr.function
            if function == "add" and any(_is_text(operand.type) for operand in operands):
                return pc.binary_join_element_wise(*operands, pa.scalar("", operands[0].type))
            if function in ("floor_divide", "modulo"):
                return floor_divided(*operands)[0 if function == "floor_divide" else 1]
            return pc.call_function(CHECKED.get(function, function), operands, expr.arrow_options())
        if isinstance(expr, Called):
            return self._called(expr, piece, setting)
        if isinstance(expr, Downloaded):
            return _downloaded(
                self._name, expr, self._value(expr.column_expr, piece, setting), piece, setting
            )
        if isinstance(expr, OfRow):
            return _of_rows(expr, piece, self._own(expr, setting))
        raise DataError(
            f"{self._name} cannot compute {expr!r}, which only select_columns() takes. Name the columns."
        )

    def _own(self, expr: Expr, setting: Setting) -> Setting:
        """Return the setting of one function of the operation."""
        return replace(setting, ordinal=self._ordinals[id(expr)])

    def _column(self, name: str, rows: Rows) -> Any:
        from powertrain.data.rows.to_arrow import arrow_of

        check_columns(self._name, [name], rows.columns)
        return arrow_of(rows.columns[name], name, as_lists=name in rows.lists)

    def _called(self, expr: Called, piece: RowPiece, setting: Setting) -> Any:
        call, numbers = self._calls[id(expr)], piece.rows.numbers
        operands = [_one(self._value(each, piece, setting)) for each in expr.operands]
        keywords = {name: _one(self._value(each, piece, setting)) for name, each in expr.kwargs.items()}
        returned = call((operands, keywords), self._own(expr, setting), numbers, piece.copy(0))
        found = _as_array(call, returned, expr.result_type, numbers)
        if len(found) != len(numbers):
            raise call.returned(f"it returned {len(found)} values for {len(numbers)} rows", numbers)
        return found


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _one(values: Any) -> Any:
    """Return an array without chunks; a constant as it is."""
    import pyarrow as pa

    if not isinstance(values, pa.ChunkedArray):
        return values
    return (
        values.chunk(0)
        if values.num_chunks == 1
        else pa.concat_arrays(values.chunks or [pa.array([], values.type)])
    )


def _ready(expr: Called) -> Call:
    """Return a function, or an instance of a class, that takes its operands as one argument."""
    fn: Any = expr.fn
    if isinstance(fn, type):

        def spread(self: Any, given: Any, **more: Any) -> Any:
            return fn.__call__(self, *given[0], **given[1], **more)

        made: Any = type(fn.__name__, (fn,), {"__call__": functools.wraps(fn.__call__)(spread)})
        call = Call(made, (), {}, expr.constructor_args, expr.constructor_kwargs)
    else:

        @functools.wraps(fn)
        def spread_function(given: Any, **more: Any) -> Any:
            return fn(*given[0], **given[1], **more)

        call = Call(spread_function)
    call.file = defined_at(fn)[0]
    return call


def _as_array(call: Call, returned: Any, kind: Any, numbers: Ints) -> Any:
    import pyarrow as pa

    try:
        if isinstance(returned, pa.ChunkedArray):
            returned = _one(returned)
        if not isinstance(returned, pa.Array):
            if type(returned).__module__.startswith("pandas"):
                returned = returned.array
            returned = pa.array(returned, from_pandas=True)
        return returned if kind is None or returned.type == kind else returned.cast(kind)
    except (pa.ArrowException, TypeError, ValueError) as error:
        wanted = "an array of values" if kind is None else f"an array of {kind}"
        raise call.returned(
            f"it returned a value of type {type(returned).__name__}, which cannot be {wanted} ({error})",
            numbers,
        ) from error


def _downloaded(name: str, expr: Downloaded, uris: Any, piece: RowPiece, setting: Setting) -> Any:
    import pyarrow as pa

    from powertrain.data.sources.files.files import read_address

    def fetch(place: int) -> bytes | None:
        uri = uris[place].as_py()
        if uri is None:
            return None
        try:
            return read_address(uri, expr.filesystem)
        except (OSError, StorageError, DataError) as error:
            numbers = piece.rows.numbers[place : place + 1]
            raise FunctionFailed(
                f"{uri!r} cannot be read: {str(error).rstrip('.')}. Restore the file, or leave the row out before with "
                "filter(); a null in place of the path gives a null.",
                int(numbers[0]),
                1,
                error=error,
            ) from error

    return pa.array(setting.over(fetch, range(len(uris))), pa.binary())


def _of_rows(expr: OfRow, piece: RowPiece, setting: Setting) -> Any:
    """Return values that follow from the number of each row, so that they do not depend on ranks or threads."""
    import pyarrow as pa

    numbers = piece.rows.numbers
    copies = np.zeros_like(numbers) if piece.copies is None else piece.copies
    if expr.kind == "monotonically_increasing_id":
        return pa.array(numbers + copies * _COPY_STRIDE)
    if expr.kind == "uuid":
        words = (setting.words(int(n), int(c)) for n, c in zip(numbers, copies, strict=True))
        return pa.array([str(uuid.UUID(bytes=word, version=4)) for word in words])
    if expr.is_fixed:
        setting = Setting(0, 0, 0)
    elif expr.seed is not None:  # the seed distinguishes such columns
        setting = replace(setting, ordinal=0)
    key = setting.words(-1 if expr.seed is None else expr.seed, 0)
    state = np.frombuffer(key[:8], "<u8")[0]
    mixed = _scrambled(_scrambled(numbers.astype(np.uint64) ^ state) ^ copies.astype(np.uint64))
    return pa.array((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _scrambled(values: Any) -> Any:
    """Return 64 random bits for each value: the finalizer of SplitMix64."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))
