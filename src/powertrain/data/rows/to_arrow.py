"""Numpy arrays and Python values as Arrow columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from powertrain.data.rows.arrow_types import DATE, LONGEST_LIST_COLUMN, NANOSECONDS
from powertrain.data.rows.rows import Column
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.rows.arrow_types import ArrowArray, NumpyArray


def arrow_of(column: Column, name: str = "", *, as_lists: bool = False) -> ArrowArray:
    """Return the column as an Arrow array: rows of one dimension as lists, of more as tensors unless ``as_lists``.
    Raises DataError where Arrow has no type for its values."""
    if not isinstance(column, np.ndarray):
        return column
    try:
        if column.dtype == object:
            return pa.array([_listed(value) for value in column])
        if column.ndim == 1:
            return flat_arrow(column)
        return nested_lists(column) if column.ndim == 2 or as_lists else _tensor_array(column)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as problem:
        raise DataError(
            f"Column {name!r} cannot be an Arrow column: {problem}. Convert its values to numbers, text, lists or "
            "arrays of one type, or drop it."
        ) from problem


def _listed(value: Any) -> Any:
    """Return values in a form that Arrow accepts: arrays of one dimension, and lists of them."""
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return [_listed(part) for part in value]
    return value


def flat_arrow(values: NumpyArray) -> ArrowArray:
    return pa.array(in_arrow_units(values) if values.dtype.kind in "Mm" else values)


def in_arrow_units(times: NumpyArray) -> NumpyArray:
    """Return times in one of Arrow's units; dates stay days."""
    unit, count = np.datetime_data(times.dtype)
    if (unit in NANOSECONDS and count == 1) or times.dtype == DATE:
        return times
    return times.astype(f"{times.dtype.kind}8[s]")


def nested_lists(values: NumpyArray) -> ArrowArray:
    """Return rows of several dimensions as nested lists, to be joined with such."""
    inner = flat_arrow(values.reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        offsets = np.arange(int(np.prod(values.shape[:axis])) + 1) * values.shape[axis]
        is_large = int(offsets[-1]) > LONGEST_LIST_COLUMN
        starts: ArrowArray = pa.array(offsets.astype(np.int64 if is_large else np.int32))
        inner = (pa.LargeListArray if is_large else pa.ListArray).from_arrays(starts, inner)
    return inner


def _tensor_array(values: NumpyArray) -> ArrowArray:
    shape = values.shape[1:]
    flat = flat_arrow(values.reshape(-1))
    kind = pa.list_(flat.type, int(np.prod(shape)))
    storage = pa.Array.from_buffers(kind, len(values), [None], null_count=0, children=[flat])
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, shape), storage)
