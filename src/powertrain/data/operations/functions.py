"""Operations that call a function of the user: on rows, on batches, as a filter."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from powertrain.data.arguments import shown
from powertrain.data.operations.calls import Call, Setting, name_of
from powertrain.data.operations.operation import Applied, Apply, Operation, RowPiece
from powertrain.data.operations.returned import (
    check_row,
    drawn,
    from_batch,
    kind_of,
    length_of_batch,
    no_rows,
    quoted,
    rows_of_dicts,
)
from powertrain.data.rows.rows import Rows
from powertrain.errors import ConfigError

#: Default rows of a batch.
BATCH_SIZE = 1024
_FORMATS = ("numpy", "pandas", "pyarrow")


@dataclass(frozen=True, eq=False)
class _WithFunction(Operation):
    """An operation that calls ``fn(argument, *fn_args, **fn_kwargs)``.

    A class is instantiated once per process (on threads: once per rank, and called by one thread at a time) with its
    constructor arguments. A parameter named ``rng`` gets a generator that belongs to the row, or to the first row of
    the batch.
    """

    verb: ClassVar[str]

    fn: Callable[..., Any]
    fn_args: tuple[Any, ...] = ()
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    fn_constructor_args: tuple[Any, ...] = ()
    fn_constructor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int = 0

    def __post_init__(self) -> None:
        if not callable(self.fn) or not _gives_callables(self.fn):
            raise ConfigError(
                f"{self.verb} needs a function, or a class whose instances can be called, not {shown(self.fn)}."
            )
        if not isinstance(self.fn, type) and (self.fn_constructor_args or self.fn_constructor_kwargs):
            raise ConfigError(
                f"{self.name} was given constructor arguments, but {name_of(self.fn)} is not a class. Pass them as "
                "fn_args or fn_kwargs."
            )
        if (
            isinstance(self.concurrency, bool)
            or not isinstance(self.concurrency, int)
            or self.concurrency < 0
        ):
            raise ConfigError(
                f"{self.name}: concurrency is {self.concurrency!r}, and must be a number of processes, or 0 for none."
            )

    @property
    def name(self) -> str:
        return f"{self.verb}({name_of(self.fn)})"

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        return (self.fn,)

    def begin(self) -> Apply:
        call = Call(
            self.fn, self.fn_args, self.fn_kwargs, self.fn_constructor_args, self.fn_constructor_kwargs
        )
        return lambda piece, setting: self._applied(call, piece, setting)

    @abstractmethod
    def _applied(self, call: Call, piece: RowPiece, setting: Setting) -> Applied: ...


def _gives_callables(fn: Any) -> bool:
    return not isinstance(fn, type) or any("__call__" in vars(kind) for kind in fn.__mro__)


@dataclass(frozen=True, eq=False)
class MapRows(_WithFunction):
    """Replaces each row, a dict, by the dict that the function returns."""

    verb: ClassVar[str] = "map"

    def _applied(self, call: Call, piece: RowPiece, setting: Setting) -> Applied:
        numbers = piece.rows.numbers
        made: list[Mapping[str, Any]] = []
        for index, returned in _each_row(call, piece, setting):
            check_row(call, returned, made, numbers[index : index + 1])
            made.append(returned)
        return Applied(rows_of_dicts(call, made, numbers, piece.rows))


@dataclass(frozen=True, eq=False)
class FlatMap(_WithFunction):
    """Replaces each row, a dict, by the dicts that the function returns: none, one or more."""

    verb: ClassVar[str] = "flat_map"

    @property
    def keeps_count(self) -> bool:
        return False

    def _applied(self, call: Call, piece: RowPiece, setting: Setting) -> Applied:
        numbers = piece.rows.numbers
        made: list[Mapping[str, Any]] = []
        counts = np.zeros(len(piece.rows), np.int64)
        for index, returned in _each_row(call, piece, setting):
            row = numbers[index : index + 1]
            if isinstance(returned, (Mapping, str, bytes)) or not isinstance(returned, Iterable):
                raise call.returned(f"it returned {kind_of(returned)}, and must return a list of dicts", row)
            for one in drawn(call, returned, row):
                check_row(call, one, made, row)
                made.append(one)
                counts[index] += 1
        return Applied(rows_of_dicts(call, made, np.repeat(numbers, counts), piece.rows), counts)


@dataclass(frozen=True, eq=False)
class FilterRows(_WithFunction):
    """Keeps the rows for which the function returns a true value."""

    verb: ClassVar[str] = "filter"

    @property
    def keeps_count(self) -> bool:
        return False

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        return columns

    def _applied(self, call: Call, piece: RowPiece, setting: Setting) -> Applied:
        stays = np.zeros(len(piece.rows), bool)
        for index, returned in _each_row(call, piece, setting):
            try:
                stays[index] = bool(returned)
            except Exception:
                problem = f"it returned {kind_of(returned)}, which is neither true nor false"
                raise call.returned(problem, piece.rows.numbers[index : index + 1]) from None
        return kept_rows(piece.rows, stays)


@dataclass(frozen=True, eq=False)
class MapBatches(_WithFunction):
    """Replaces batches of neighbouring rows by the batches that the function returns, or yields."""

    batch_size: int = BATCH_SIZE
    #: Format of the function's batches; it may return any format.
    batch_format: str = "numpy"
    #: True where it may return another number of rows: Ray Data's ``udf_modifying_row_count``.
    changes_count: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            isinstance(self.batch_size, bool)
            or not isinstance(self.batch_size, (int, np.integer))
            or self.batch_size < 1
        ):
            raise ConfigError(
                f"{self.name}: batch_size is {self.batch_size!r}, and must be a number of rows, 1 or more."
            )
        if self.batch_format not in _FORMATS:
            raise ConfigError(
                f"{self.name}: batch_format is {self.batch_format!r}, and must be one of {quoted(_FORMATS)}."
            )

    verb: ClassVar[str] = "map_batches"

    @property
    def keeps_count(self) -> bool:
        return not self.changes_count

    def _applied(self, call: Call, piece: RowPiece, setting: Setting) -> Applied:
        from powertrain.data.rows.gather import concat_rows

        numbers = piece.rows.numbers
        batch = _as_batch(piece.rows, self.batch_format)
        returned = call(batch, setting, numbers, piece.copy(0))
        batches = list(drawn(call, returned, numbers)) if isinstance(returned, Iterator) else [returned]
        lengths = [length_of_batch(call, made, numbers) for made in batches]
        count = sum(lengths)
        if count == len(numbers):
            counts, made_numbers = None, numbers
        elif self.changes_count:
            counts = np.diff(np.arange(len(numbers) + 1) * count // len(numbers))
            made_numbers = np.repeat(numbers, counts)
        else:
            raise call.returned(
                f"it returned {count} rows for {len(numbers)}, although it was said not to change their number",
                numbers,
            )
        ends = np.cumsum([0, *lengths])
        made_rows = [
            from_batch(call, made, made_numbers[start:end], numbers)
            for made, start, end in zip(batches, ends[:-1].tolist(), ends[1:].tolist(), strict=True)
            if end > start
        ]
        return Applied(
            concat_rows(made_rows) if len(made_rows) > 1 else (made_rows or [no_rows()])[0], counts
        )


class AddColumn(MapBatches):
    """Adds a column: the function returns the batch that it was given, with the values that the user's returned."""

    verb: ClassVar[str] = "add_column"


def _each_row(call: Call, piece: RowPiece, setting: Setting) -> Iterator[tuple[int, Any]]:
    """Yield the function's result for each row, with the row's place."""
    from powertrain.data.rows.formats import row_dicts

    numbers = piece.rows.numbers
    for index, row in enumerate(row_dicts(piece.rows)):
        yield index, call(row, setting, numbers[index : index + 1], piece.copy(index))


def _as_batch(rows: Rows, batch_format: str) -> Any:
    from powertrain.data.rows import formats

    return {"numpy": formats.to_numpy, "pandas": formats.to_pandas, "pyarrow": formats.to_arrow}[
        batch_format
    ](rows)


def kept_rows(rows: Rows, stays: Any) -> Applied:
    from powertrain.data.rows.gather import take_rows

    if stays.all():
        return Applied(rows)
    return Applied(take_rows(rows, np.flatnonzero(stays)), stays.astype(np.int64))
