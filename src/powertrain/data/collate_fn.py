"""Collation of a batch for the training loop: base classes, and two ready-made functions.

``iter_torch_batches(collate_fn=...)`` takes any function of a dict of numpy arrays. Derive from one of the classes
instead to get another form of batch, and define ``__call__``::

    class Tokenize(ArrowBatchCollateFn):
        def __call__(self, batch: pa.Table) -> dict[str, torch.Tensor]: ...

For lists of different lengths there are :func:`pad` and :func:`ragged`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from powertrain.data.arguments import (
    ODD,
    column_names,
    keyword_arguments,
    one_of,
    optional_whole,
    refused,
    shortened,
    shown,
)
from powertrain.data.rows.rows import Column, Rows
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch

    from powertrain.data.rows.arrow_types import ArrowArray, Named, NumpyArray

__all__ = [
    "CollateFn",
    "ArrowBatchCollateFn",
    "NumpyBatchCollateFn",
    "PandasBatchCollateFn",
    "Ragged",
    "pad",
    "ragged",
]


#: Longest length that a list is padded to.
MOST_LENGTH = 2**31


class CollateFn(ABC):
    """Base class of the collate functions in this module: callables that take a batch."""

    @abstractmethod
    def __call__(self, batch: Any) -> Any:
        """Return the object that the training loop gets for ``batch``."""


class ArrowBatchCollateFn(CollateFn):
    """A collate function of a ``pyarrow.Table``. The cheapest format for text and lists."""

    @abstractmethod
    def __call__(self, batch: pa.Table) -> Any:
        """Return the object that the training loop gets for ``batch``, a table."""


class NumpyBatchCollateFn(CollateFn):
    """A collate function of a dict of numpy arrays, as a plain function is."""

    @abstractmethod
    def __call__(self, batch: dict[str, NumpyArray]) -> Any:
        """Return the object that the training loop gets for ``batch``, a dict of arrays."""


class PandasBatchCollateFn(CollateFn):
    """A collate function of a ``pandas.DataFrame``."""

    @abstractmethod
    def __call__(self, batch: pd.DataFrame) -> Any:
        """Return the object that the training loop gets for ``batch``, a DataFrame."""


class RowsCollateFn(CollateFn):
    """A ready-made collate function.

    It gets rows with their numbers; called directly, it takes a dict of arrays or an Arrow table.
    """

    def __call__(self, batch: Mapping[str, Any] | pa.Table) -> dict[str, Any]:
        from powertrain.data.rows import formats

        try:
            if isinstance(batch, Mapping):
                length = len(next(iter(batch.values()), ()))
                rows = formats.from_numpy(batch, np.arange(length))
            else:
                rows = formats.from_arrow(batch, np.arange(len(batch)))
        except DataError:
            raise
        except ODD as error:
            raise refused(
                "A collate_fn is called with a dict of arrays or a pyarrow.Table, and not with", batch, error
            ) from error
        return self.collate_rows(rows)

    @abstractmethod
    def collate_rows(self, rows: Rows) -> dict[str, Any]:
        """Return the batch of these rows."""


class Ragged(NamedTuple):
    """Lists of different lengths as two tensors: list i is ``values[offsets[i]:offsets[i + 1]]``."""

    values: torch.Tensor
    offsets: torch.Tensor


def pad(
    value: float | Mapping[str, float] = 0,
    columns: Collection[str] | None = None,
    length: int | None = None,
    side: str = "right",
) -> RowsCollateFn:
    """Return a ``collate_fn`` that pads lists to one length, and leaves other columns unchanged.

    Args:
        value: The value to pad with; or by column, ``{"labels": -100}``, and 0 for columns that are not named.
        columns: The columns to pad; None for all whose rows are lists of numbers. Lists of lists, and arrays of
            different shapes, are padded in every dimension.
        length: The length to pad to; None for that of the longest list of the batch. A longer list is an error.
        side: The side to pad, "right" or "left".

    Returns:
        An object for the argument ``collate_fn`` of ``iter_torch_batches``.

    Raises:
        DataError: An argument has a wrong value.

    Example::

        shard.iter_torch_batches(batch_size=32, collate_fn=pad({"labels": -100}))
    """
    side = one_of("side", side, ("right", "left"), "Lists are filled up on one of these sides by pad().")
    if isinstance(value, Mapping):
        values = keyword_arguments("value", value)
        value = {name: _filling(f"value[{name!r}]", each) for name, each in values.items()}
    else:
        value = _filling("value", value)
    return _Pad(_names("pad", columns), value, optional_whole("length", length, 0, MOST_LENGTH), side)


def _filling(name: str, value: Any) -> Any:
    """Return a single value to pad with. A column's type is only known later, so it is not checked here."""
    if type(value).__module__.partition(".")[0] in ("numpy", "torch") and getattr(value, "shape", None) == ():
        value = value[()] if isinstance(value, np.ndarray) else value
        value = value if isinstance(value, np.generic) else value.item()
    if not isinstance(value, (int, float, str, bytes, np.generic)):
        raise DataError(f"{name}={shown(value)} cannot fill lists of numbers. Give one number.")
    return value


def ragged(columns: Collection[str] | None = None) -> RowsCollateFn:
    """Return a ``collate_fn`` that gives lists of numbers as :class:`Ragged`, and leaves other columns unchanged.

    Args:
        columns: The columns; None for all whose rows are lists of numbers, also where all lists of a batch happen to
            have one length. Lists of lists need inner lists of one length; where rows have several dimensions, name
            the columns.

    Returns:
        An object for the argument ``collate_fn`` of ``iter_torch_batches``.

    Raises:
        DataError: ``columns`` are not names.

    Example::

        shard.iter_torch_batches(batch_size=32, collate_fn=ragged(["tokens"]))
    """
    return _Ragged(_names("ragged", columns))


def _names(function: str, columns: Collection[str] | None) -> frozenset[str] | None:
    if columns is None:
        return None
    if isinstance(columns, (list, tuple, set, frozenset)) and not columns:
        return frozenset()
    return frozenset(column_names(function, columns))


@dataclass(frozen=True)
class _ListColumns(RowsCollateFn):
    """A collate function with its own handling of list columns; other columns are handled as by ``to_torch``."""

    columns: frozenset[str] | None

    def collate_rows(self, rows: Rows) -> dict[str, Any]:
        from powertrain.data.rows.arrow_types import Named
        from powertrain.data.rows.to_tensors import tensor_of

        unknown = sorted((self.columns or frozenset()) - rows.columns.keys())
        if unknown:
            there = ", ".join(map(shown, rows.columns)) or "none"
            raise DataError(
                f"The collate_fn was given column {shown(unknown[0])}, and there are {there}. Name columns that "
                "are there."
            )
        made: dict[str, Any] = {}
        for name, column in rows.columns.items():
            named, floats = Named(name, rows.numbers), name in rows.python_floats
            if self.is_chosen(name, column):
                made[name] = self.collated(_without_codes(column, named), named, floats)
            else:
                made[name] = tensor_of(column, named, python_floats=floats)
        return made

    def is_chosen(self, name: str, column: Column) -> bool:
        return _has_lists(column) if self.columns is None else name in self.columns

    @abstractmethod
    def collated(self, column: Column, named: Named, python_floats: bool) -> Any:
        """Return one collated column of lists; no row is null."""


def _has_lists(column: Column) -> bool:
    """Return whether rows are lists of numbers. A column of two dimensions may hold lists of one common length."""
    from powertrain.data.rows.arrow_types import is_list, is_number, leaf_type, plain

    if not isinstance(column, np.ndarray):
        kind = plain(column).type
        return is_list(kind) and is_number(leaf_type(kind))
    if column.dtype == object:
        return len(column) > 0 and all(isinstance(value, np.ndarray) for value in column)
    return column.ndim == 2


def _without_codes(column: Column, named: Named) -> Column:
    """Return the column in plain types. Raises DataError for nulls, and for columns without lists of numbers."""
    from powertrain.data.rows.arrow_types import plain
    from powertrain.data.rows.to_tensors import refuse_nulls

    if not isinstance(column, np.ndarray):
        column = plain(column)
        refuse_nulls(column, named)
    is_wide = isinstance(column, np.ndarray) and column.dtype != object and column.ndim > 1
    if not (is_wide or _has_lists(column)):
        what = column.dtype if isinstance(column, np.ndarray) else column.type
        raise DataError(
            f"Column {named.name!r} holds {what}, and only lists of numbers can be padded or kept ragged. Leave it "
            "out of the columns given to the collate_fn."
        )
    return column


@dataclass(frozen=True)
class _Pad(_ListColumns):
    value: float | Mapping[str, float] = 0
    length: int | None = None
    side: str = field(default="right")

    def collated(self, column: Column, named: Named, python_floats: bool) -> torch.Tensor:
        from powertrain.data.rows.to_tensors import tensor_of

        value = self.value.get(named.name, 0) if isinstance(self.value, Mapping) else self.value
        try:
            if not isinstance(column, np.ndarray):
                filled = self._filled(column, value, self.length, named)
            elif column.dtype == object:
                filled = self._filled_arrays(list(column), value, named)
            else:
                filled = self._lengthened(column, value, named)
        except (OverflowError, ValueError, TypeError) as problem:
            if isinstance(problem, DataError):
                raise
            raise DataError(
                f"Column {named.name!r} cannot be padded with {shown(value)}: {shortened(str(problem))}. Choose "
                "a value that its type can hold."
            ) from problem
        made: torch.Tensor = tensor_of(filled, named, python_floats=python_floats)
        return made

    def _filled(self, array: ArrowArray, value: float, length: int | None, named: Named) -> NumpyArray:
        """Return lists as an array, the inner ones first; ``length`` is that of the outermost."""
        from powertrain.data.rows.arrow_types import is_list, list_offsets
        from powertrain.data.rows.to_tensors import flat_numbers

        if not is_list(array.type):
            return flat_numbers(array)
        inner = self._filled(array.flatten(), value, None, named)
        lengths = np.diff(list_offsets(array))
        longest = self._longest(lengths, length, named)
        made = _filled_with(value, (len(array), longest, *inner.shape[1:]), inner.dtype)
        places = np.arange(longest)
        first = (longest - lengths)[:, None] if self.side == "left" else 0
        made[(places >= first) & (places < first + lengths[:, None])] = inner
        return made

    def _lengthened(self, column: NumpyArray, value: float, named: Named) -> NumpyArray:
        """Return rows that have one length already, padded to the requested one."""
        length = column.shape[1]
        longest = self._longest(np.full(len(column), length), self.length, named)
        if longest == length:
            return column
        made = _filled_with(value, (len(column), longest, *column.shape[2:]), column.dtype)
        made[:, slice(longest - length, None) if self.side == "left" else slice(length)] = column
        return made

    def _filled_arrays(self, arrays: list[NumpyArray], value: float, named: Named) -> NumpyArray:
        from powertrain.data.rows.to_tensors import ragged_error

        other = next((at for at, array in enumerate(arrays) if array.ndim != arrays[0].ndim), None)
        if other is not None or arrays[0].ndim == 0:
            raise ragged_error(named, (0, arrays[0].shape), (other or 0, arrays[other or 0].shape))
        sizes = np.array([array.shape for array in arrays])
        largest = sizes.max(axis=0)
        largest[0] = self._longest(sizes[:, 0], self.length, named)
        made = _filled_with(value, (len(arrays), *largest.tolist()), np.result_type(*arrays))
        for array, place in zip(arrays, made, strict=True):
            if self.side == "left":
                place[
                    tuple(slice(place.shape[axis] - size, None) for axis, size in enumerate(array.shape))
                ] = array
            else:
                place[tuple(slice(size) for size in array.shape)] = array
        return made

    def _longest(self, lengths: NumpyArray, length: int | None, named: Named) -> int:
        longest = int(lengths.max(initial=0))
        if length is not None and longest > length:
            raise DataError(
                f"Column {named.name!r} has {longest} values in {named.row(int(np.argmax(lengths)))}, and pad() "
                f"was given length={length}. Cut longer lists in map() or map_batches(), or give a "
                "larger length."
            )
        return longest if length is None else length


def _filled_with(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NumpyArray:
    """Return an array full of ``value``; raises ValueError where its type would change the value."""
    with np.errstate(all="ignore"):
        held = np.asarray(value).astype(dtype)
    if dtype.kind == "f":
        is_kept = bool(np.isfinite(held)) or not np.isfinite(value)
    else:
        is_kept = dtype.kind in "mM" or bool(held == value)
    if not is_kept:
        raise ValueError(f"{dtype} cannot hold it, and would make it {held}")
    return np.full(shape, held, dtype)


@dataclass(frozen=True)
class _Ragged(_ListColumns):
    def collated(self, column: Any, named: Named, python_floats: bool) -> Ragged:
        import torch

        from powertrain.data.rows.arrow_types import Named, list_offsets
        from powertrain.data.rows.to_tensors import tensor_of

        values: Column
        if not isinstance(column, np.ndarray):
            offsets = list_offsets(column).astype(np.int64)
            offsets, values = offsets - offsets[0], column.flatten()
        elif column.dtype == object:
            offsets = np.cumsum([0, *map(len, column)], dtype=np.int64)
            values = _end_to_end(list(column), named)
        else:
            offsets = np.arange(len(column) + 1) * column.shape[1]
            values = column.reshape(-1, *column.shape[2:])
        # Each value has the number of its row, so that an error names the row.
        inside = Named(named.name, np.repeat(named.numbers, np.diff(offsets)))
        return Ragged(tensor_of(values, inside, python_floats=python_floats), torch.from_numpy(offsets))


def _end_to_end(arrays: list[NumpyArray], named: Named) -> NumpyArray:
    from powertrain.data.rows.to_tensors import ragged_error

    other = next((at for at, array in enumerate(arrays) if array.shape[1:] != arrays[0].shape[1:]), None)
    if other is not None:
        raise ragged_error(named, (0, arrays[0].shape), (other, arrays[other].shape))
    return np.concatenate(arrays)
