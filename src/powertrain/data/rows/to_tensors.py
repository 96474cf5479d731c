"""Arrow columns as torch tensors, and the errors for columns that cannot be tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from powertrain.data.rows.arrow_types import (
    DATE,
    LARGEST_INT64,
    NANOSECONDS,
    WIDENED,
    is_binary,
    is_list,
    is_number,
    is_text,
    leaf_type,
    list_offsets,
    plain,
    uniform,
    viewable,
    writable,
)
from powertrain.data.rows.pixels_of import as_numpy
from powertrain.data.rows.rows import Column
from powertrain.data.rows.to_arrow import in_arrow_units
from powertrain.data.rows.to_python import with_gaps
from powertrain.errors import DataError

if TYPE_CHECKING:
    import torch

    from powertrain.data.rows.arrow_types import ArrowArray, ArrowType, Named, NumpyArray


Tensors = Any  #: torch.Tensor | list of str or bytes | dict of these


def tensor_of(
    column: Column, named: Named, *, dtype: torch.dtype | None = None, python_floats: bool = False
) -> Tensors:
    """Return the column as the tensor (or list, or dict) of the table above; it owns its memory and is writable.

    ``dtype`` is that of every tensor; without one ``python_floats`` gives float64 torch's default. Raises DataError
    for nulls and for rows of different shapes, naming column and rows.
    """
    convert = _Conversion(dtype, python_floats)
    if isinstance(column, np.ndarray):
        if column.dtype == object:
            return _objects_tensor(column, named, convert)
        return convert.tensor(column, named)
    return _arrow_tensor(column, named, convert)


def _arrow_tensor(array: ArrowArray, named: Named, convert: _Conversion) -> Tensors:
    if not isinstance(array.type, pa.BaseExtensionType):
        array = plain(array)
    refuse_nulls(plain(array), named)
    leaf = leaf_type(array.type)
    if pa.types.is_struct(array.type):
        names = [array.type.field(index).name for index in range(array.type.num_fields)]
        return {
            name: _arrow_tensor(child, named.field(name), convert)
            for name, child in zip(names, array.flatten(), strict=True)
        }
    if is_text(leaf) or is_binary(leaf):
        return plain(array).to_pylist()
    if not is_number(leaf):
        raise DataError(
            f"Column {named.name!r} has values of Arrow type {array.type}, which no tensor can hold. Choose the "
            "parts you need in map() or map_batches(), leave the column out with drop_columns(), or pass a "
            "collate_fn."
        )
    found = uniform(array)
    if found is None:
        raise ragged_error(named, *_two_lengths(plain(array)))
    return convert.tensor(found.laid_out(flat_numbers(found.values)), named)


def flat_numbers(values: ArrowArray) -> NumpyArray:
    """Return values that are not lists, and of which none is null, as numpy numbers or times. May share memory."""
    kind = values.type
    if pa.types.is_decimal(kind):
        values = values.cast(pa.float64())
    elif not viewable(kind):
        return with_gaps(values)
    numbers: NumpyArray = values.to_numpy(zero_copy_only=False)
    return numbers


def _objects_tensor(column: NumpyArray, named: Named, convert: _Conversion) -> Tensors:
    values = column.tolist()
    if set(map(type, values)) <= {str, bytes}:
        return values
    missing = next((index for index, value in enumerate(values) if value is None), None)
    if missing is not None:
        raise _null_error(named, missing)
    if all(isinstance(value, (str, bytes)) for value in values):
        return values
    arrays = [as_numpy(value) for value in values]
    if all(isinstance(value, np.ndarray) and value.dtype != object for value in arrays):
        other = next((index for index, value in enumerate(arrays) if value.shape != arrays[0].shape), None)
        if other is not None:
            raise ragged_error(named, (0, arrays[0].shape), (other, arrays[other].shape))
        return convert.tensor(np.stack(arrays) if arrays else np.empty(0), named)
    found = sorted({type(value).__name__ for value in values})
    raise DataError(
        f"Column {named.name!r} holds Python objects ({', '.join(found)}), which no tensor can hold. Return "
        "numbers, arrays or text from map() or map_batches(), leave the column out with drop_columns(), or pass a "
        "collate_fn."
    )


@dataclass(frozen=True)
class _Conversion:
    """Convert numbers in numpy to a tensor of the right type."""

    dtype: torch.dtype | None
    python_floats: bool

    def tensor(self, values: NumpyArray, named: Named) -> torch.Tensor:
        import torch

        if values.dtype.kind in "Mm":
            values = _since_epoch(values, named)
        wanted = self.dtype
        if wanted is None and self.python_floats and values.dtype == np.float64:
            wanted = torch.get_default_dtype()
        if wanted is None and values.dtype.kind == "u" and values.dtype.name in WIDENED:
            values = _widened(values, named)
        try:
            made = torch.from_numpy(writable(np.ascontiguousarray(values)))
        except TypeError as problem:
            raise DataError(
                f"Column {named.name!r} has numpy type {values.dtype}, which no tensor can hold ({problem}). "
                "Convert it in map_batches(), or leave it out with drop_columns()."
            ) from problem
        return made if wanted is None else made.to(wanted)


def _widened(values: NumpyArray, named: Named) -> NumpyArray:
    wider = WIDENED[values.dtype.name]
    if values.dtype == np.uint64 and values.size and int(values.max()) > LARGEST_INT64:
        row = int(np.argmax(values.reshape(len(values), -1).max(axis=1)))
        raise DataError(
            f"Column {named.name!r} has the value {int(values.max())} in {named.row(row)}, too large for "
            f"torch.int64, which uint64 columns become. Pass dtypes={{{named.name!r}: torch.uint64}} or another "
            "type to keep it."
        )
    return values.astype(wider)


def _since_epoch(values: NumpyArray, named: Named) -> NumpyArray:
    """Return days for dates, nanoseconds for all other times."""
    missing = np.isnat(values)
    if missing.any():
        raise _null_error(named, int(np.argwhere(missing)[0][0]))
    values = in_arrow_units(values)
    if values.dtype == DATE:
        return values.astype(np.int64)
    factor = NANOSECONDS[np.datetime_data(values.dtype)[0]]
    counts = values.astype(np.int64)
    too_far = np.abs(counts) > LARGEST_INT64 // factor
    if too_far.any():
        row = int(np.argwhere(too_far)[0][0])
        raise DataError(
            f"Column {named.name!r} has a time in {named.row(row)} that is too far from 1970 to be counted in "
            "nanoseconds, as tensors of times are. Convert the column to numbers of your own unit in "
            "map_batches()."
        )
    return counts * factor


def refuse_nulls(array: ArrowArray, named: Named) -> None:
    """Raise DataError where a value, also one within a list, is null."""
    row = _null_row(array)
    if row is not None:
        raise _null_error(named, row) if array.null_count else _inner_null_error(named, row, array.type)


def _null_row(array: ArrowArray) -> int | None:
    if array.null_count:
        return int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
    if not is_list(array.type):
        return None
    inner = _null_row(array.flatten())
    return None if inner is None else int(np.searchsorted(_ends(array), inner, side="right"))


def _ends(array: ArrowArray) -> NumpyArray:
    offsets = list_offsets(array)
    ends: NumpyArray = offsets[1:] - offsets[0]
    return ends


def _inner_null_error(named: Named, index: int, kind: ArrowType) -> DataError:
    """Return the error for a null in a list of type ``kind``, which column options of Arrow do not reach."""
    value = "row" + "".join(f"[{name!r}]" for name in named.path or (named.name,))
    example = fill = ""
    if not is_list(kind.value_type):
        fill = f" ([0 if value is None else value for value in {value}])"
        example = f": lambda row: None not in {value}"
    return DataError(
        f"Column {named.name!r} has a null in the list of {named.row(index)}, and a tensor cannot hold nulls. Put a "
        f"value in its place in map(){fill}, leave such rows out by a function given to filter(){example}; or drop "
        "the column."
    )


def _null_error(named: Named, index: int) -> DataError:
    path = named.path or (named.name,)
    names = ", ".join(map(repr, path))
    fill = "map_batches() (pyarrow.compute.fill_null, DataFrame.fillna)" if len(path) == 1 else "map()"
    return DataError(
        f"Column {named.name!r} is null in {named.row(index)}, and a tensor cannot hold nulls. Fill them in {fill}, "
        f"leave such rows out with filter(expr=pyarrow.compute.field({names}).is_valid()), or drop the column."
    )


def _two_lengths(array: ArrowArray) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return two lists of ``array`` that differ in length, each as (row, length). Requires that there are such, and
    no nulls."""
    lengths = np.diff(list_offsets(array))
    differs = lengths != lengths[0]
    if differs.any():
        other = int(np.argmax(differs))
        return (0, int(lengths[0])), (other, int(lengths[other]))
    (one, one_length), (other, other_length) = _two_lengths(array.flatten())
    row_of = np.searchsorted(_ends(array), [one, other], side="right")
    return (int(row_of[0]), one_length), (int(row_of[1]), other_length)


def ragged_error(named: Named, one: tuple[int, object], other: tuple[int, object]) -> DataError:
    """Return the error for two values of different size: each is the index of its row, and a length or a shape."""
    if isinstance(one[1], tuple) and len(one[1]) > 1:
        return DataError(
            f"Column {named.name!r} has arrays of different shapes: {one[1]} in {named.row(one[0])}, {other[1]} in "
            f"{named.row(other[0])}. A tensor needs one shape for all. Images are brought to one by "
            "size=(height, width) and mode='RGB' in read_images() or decode_images(); other arrays by map(), by "
            "collate_fn=powertrain.data.collate_fn.pad(value=0), or by a collate_fn of your own."
        )
    return DataError(
        f"Column {named.name!r} has values of different lengths: {one[1]} in {named.row(one[0])}, {other[1]} in "
        f"{named.row(other[0])}. A tensor needs one length for all. Pass "
        "collate_fn=powertrain.data.collate_fn.pad(value=0) to fill them up, "
        "collate_fn=powertrain.data.collate_fn.ragged() to get values and offsets, or a collate_fn of your own."
    )
