"""Arrow columns as numpy arrays and Python values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from powertrain.data.rows.arrow_types import (
    is_binary,
    is_list,
    is_text,
    leaf_type,
    list_offsets,
    object_array,
    plain,
    uniform,
    view,
    writable,
)
from powertrain.data.rows.rows import Column
from powertrain.data.rows.to_arrow import flat_arrow, nested_lists

if TYPE_CHECKING:
    from powertrain.data.rows.arrow_types import ArrowArray, NumpyArray


def _seen(array: ArrowArray) -> NumpyArray | ArrowArray:
    """Return numpy where rows have one type and shape, otherwise the array in plain types."""
    for form in (array, plain(array)):
        seen = view(form)
        if isinstance(seen, np.ndarray):
            return seen
        stacked = _stacked_with_gaps(form)
        if stacked is not None:
            return stacked
    return plain(array)


def _stacked_with_gaps(array: ArrowArray) -> NumpyArray | None:
    """Return lists of one length of floats or times, with NaN and NaT for nulls inside."""
    leaf = leaf_type(array.type)
    if leaf is array.type or not (pa.types.is_floating(leaf) or pa.types.is_temporal(leaf)):
        return None
    found = uniform(array)
    if found is None or len(found.shape) == 1 or not found.values.type.equals(leaf):
        return None
    return found.laid_out(with_gaps(found.values))


def numpy_of(column: Column) -> NumpyArray:
    """Return the column as the numpy array of the table above; it is writable."""
    if isinstance(column, np.ndarray):
        return writable(column)
    array = _seen(column)
    if isinstance(array, np.ndarray):
        return writable(array)
    kind = array.type
    if pa.types.is_floating(kind) or pa.types.is_temporal(kind):
        return with_gaps(array)
    if is_text(kind) or is_binary(kind) or pa.types.is_decimal(kind):
        return writable(array.to_numpy(zero_copy_only=False))
    return object_array(values_of(array))


def with_gaps(array: ArrowArray) -> NumpyArray:
    """Return floats and times with NaN and NaT for nulls."""
    kind = array.type
    if pa.types.is_time(kind):
        width = pa.int64() if kind.bit_width == 64 else pa.int32()
        array = array.cast(width).cast(pa.int64()).cast(pa.duration(kind.unit))
    elif pa.types.is_date(kind):
        array = array.cast(pa.date32())
    return writable(array.to_numpy(zero_copy_only=False))


def values_of(column: Column) -> list[Any]:
    """Return the rows of a column as Python values: scalars, text, dicts; arrays for lists and tensors; None for
    null."""
    if isinstance(column, np.ndarray):
        return _numpy_values(column)
    array = _seen(column)
    if isinstance(array, np.ndarray):
        return _numpy_values(array)
    if pa.types.is_struct(array.type):
        return _struct_values(array)
    if is_list(array.type):
        return _list_values(array)
    values: list[Any] = array.to_pylist()
    return values


def row_values(column: Column, are_lists: bool) -> list[Any]:
    """Return the rows of a column as values of a row's dict: as :func:`values_of`, but with lists for lists, also for
    those inside of structs."""
    if are_lists:
        return lists_of(column)
    if not isinstance(column, np.ndarray) and pa.types.is_struct(column.type):
        return _struct_values(plain(column), _field_values)
    return values_of(column)


def _field_values(array: ArrowArray) -> list[Any]:
    # Arrays inside of a struct are stored as lists of fixed size: see ``sources.items``.
    return row_values(array, is_list(array.type) and not pa.types.is_fixed_size_list(array.type))


def lists_of(column: Column) -> list[Any]:
    """Return the rows of a column of lists as Python lists; None for null."""
    if isinstance(column, np.ndarray):
        if column.dtype == object:
            return [value.tolist() if isinstance(value, np.ndarray) else value for value in column]
        return list(nested_lists(column).to_pylist() if column.dtype.kind in "Mm" else column.tolist())
    array = plain(column)
    values = view(array.flatten()) if is_list(array.type) and not array.null_count else None
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype.kind not in "Mm":
        flat, offsets = values.tolist(), list_offsets(array)
        return [flat[start:stop] for start, stop in pairwise((offsets - offsets[0]).tolist())]
    return list(array.to_pylist())


def _numpy_values(column: NumpyArray) -> list[Any]:
    if column.ndim > 1:
        return list(writable(column))
    if column.dtype.kind in "Mm":
        # numpy silently returns nanoseconds as integers.
        return list(flat_arrow(column).to_pylist())
    values: list[Any] = column.tolist()
    return values


def _struct_values(
    array: ArrowArray, values_of_field: Callable[[ArrowArray], list[Any]] = values_of
) -> list[Any]:
    names = [array.type.field(index).name for index in range(array.type.num_fields)]
    fields = [values_of_field(child) for child in array.flatten()]
    rows: list[Any] = (
        [dict(zip(names, row, strict=True)) for row in zip(*fields, strict=True)]
        if fields
        else [{} for _ in range(len(array))]
    )
    if array.null_count:
        present = array.is_valid().to_pylist()
        rows = [row if there else None for row, there in zip(rows, present, strict=True)]
    return rows


def _list_values(array: ArrowArray) -> list[Any]:
    present = array.is_valid().to_pylist() if array.null_count else None
    offsets = list_offsets(array).tolist()
    inner = array.values
    pieces = _cut(inner, offsets)
    if present is None:
        return pieces
    return [piece if there else None for piece, there in zip(pieces, present, strict=True)]


def _cut(inner: ArrowArray, offsets: list[int]) -> list[NumpyArray]:
    """Return the values of each list. A row's result must not depend on its neighbours, so only values whose conversion
    is independent of others are converted together."""
    first = offsets[0] if offsets else 0
    ours = inner.slice(first, offsets[-1] - first)
    kind = ours.type
    together = (
        isinstance(view(ours), np.ndarray) or pa.types.is_floating(kind) or is_text(kind) or is_binary(kind)
    )
    if together:
        values = numpy_of(ours)
        return [values[start - first : stop - first] for start, stop in pairwise(offsets)]
    return [numpy_of(inner.slice(start, stop - start)) for start, stop in pairwise(offsets)]
