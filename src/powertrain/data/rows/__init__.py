"""The fate of each Arrow type on its way to numpy, to Python values and to tensors.

======================  =============================  =========================  ===============================
Arrow                   numpy                          one row, in Python         torch
======================  =============================  =========================  ===============================
integers, floats, bool  the same type                  int, float, bool           the same type (uint16, 32 and 64
                                                                                  become int32, int64 and int64)
text, binary            object array of str, bytes     str, bytes                 list of str, bytes
lists of one length     stacked: (rows, \\*shape)        list                       stacked
tensors                 stacked: (rows, \\*shape)        array                      stacked
lists of other lengths  object array of arrays         list (where rows were      refused: pad or keep them ragged
                                                       arrays, an array)
struct                  object array of dicts          dict                       dict of columns
decimal                 object array of Decimal        Decimal                    float64
timestamp               datetime64 (UTC)               datetime; in nanoseconds,  int64, nanoseconds since 1970 UTC
                                                       pandas.Timestamp
duration                timedelta64                    timedelta; likewise        int64, nanoseconds
                                                       pandas.Timedelta
time of day             timedelta64 since midnight     time                       int64, nanoseconds since midnight
date                    datetime64[D]                  date                       int64, days since 1970
dictionary, run-end     as its values                  as its values              as its values
extension               as its storage (a tensor       as its storage             as its storage
                        type: stacked)
map                     object array of lists of       list of (key, value)       refused
                        (key, value)
null                    NaN in floats, NaT in times,   None                       refused, naming the row
                        else None in an object array
======================  =============================  =========================  ===============================

What comes out depends on the values at hand alone, never on how blocks were cut or columns were kept on the way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from powertrain.data.plan.order import Ints
from powertrain.data.rows.rows import Column
from powertrain.data.sources.base import ARRAYS
from powertrain.errors import DataError

if TYPE_CHECKING:
    import torch

NumpyArray = np.ndarray[Any, Any]
# What can be done with an Arrow array follows from its type, which mypy does not know: here it is looked at first.
ArrowArray = Any
ArrowType = Any
ArrowField = Any

_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DATE = np.dtype("M8[D]")
_LARGEST_INT64 = 2**63 - 1
#: Offsets of a plain Arrow list are 32 bits wide.
LONGEST_LIST_COLUMN = 2**31 - 1
#: torch can hold these, but has hardly any operation for them.
_WIDENED = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


# --------------------------------------------------------------------------- what a type is


def _is(kind: ArrowType, name: str) -> bool:
    """Whether ``kind`` is one of Arrow's types; older versions of Arrow do not know all of them."""
    test: Callable[[ArrowType], bool] | None = getattr(pa.types, f"is_{name}", None)
    return test is not None and test(kind)


def is_list(kind: ArrowType) -> bool:
    """Whether values are lists that say where they begin and end by offsets, or are of fixed size."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_list_view(kind: ArrowType) -> bool:
    return _is(kind, "list_view") or _is(kind, "large_list_view")


def is_marked(field: ArrowField, mark: tuple[bytes, bytes]) -> bool:
    """Whether a field has one of the marks of ``sources.base``."""
    key, value = mark
    found: bool = (field.metadata or {}).get(key) == value
    return found


def rows_are_lists(field: ArrowField) -> bool:
    """Whether a row of the column is Python's list; tensors, and lists that are marked so, have arrays."""
    return (is_list(field.type) or _is_list_view(field.type)) and not is_marked(field, ARRAYS)


def is_text(kind: ArrowType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_binary(kind: ArrowType) -> bool:
    return (
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    ) and not pa.types.is_decimal(kind)


def leaf_type(kind: ArrowType) -> ArrowType:
    """The type of the values within lists and extensions."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif is_list(kind) or _is_list_view(kind):
            kind = kind.value_type
        else:
            return kind


def _has_numpy_type(kind: ArrowType) -> bool:
    """Whether numpy can look at values of this type where they lie."""
    if pa.types.is_timestamp(kind):
        return kind.tz is None  # numpy has no zones: with one it stays Arrow's until somebody asks for numpy
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_duration(kind)


# --------------------------------------------------------------------------- looking at Arrow arrays


@dataclass(frozen=True)
class _Uniform:
    """An array whose rows all have the same shape: the values one after the other, and how they are laid out."""

    values: ArrowArray
    shape: tuple[int, ...]
    #: Where each dimension is found among those of ``shape``; tensor types may permute them.
    axes: tuple[int, ...]

    def laid_out(self, flat: NumpyArray) -> NumpyArray:
        shaped = flat.reshape(self.shape)
        return shaped if self.axes == tuple(range(len(self.axes))) else shaped.transpose(self.axes)


def _uniform(array: ArrowArray) -> _Uniform | None:
    """``array`` as values of one shape; None where lists have different lengths or are null."""
    shape, axes = [len(array)], [0]
    while True:
        kind = array.type
        if isinstance(kind, pa.BaseExtensionType):
            found = _tensor_storage(array)
            if found is None:
                array = _storage(array)
                continue
            array, inner, permutation = found
            axes += [len(shape) + axis for axis in permutation]
            shape += inner
        elif is_list(kind):
            size = _common_length(array)
            if size is None:
                return None
            array = array.flatten()
            axes.append(len(shape))
            shape.append(size)
        else:
            return _Uniform(array, tuple(shape), tuple(axes))


def _storage(array: ArrowArray) -> ArrowArray:
    if array.type.extension_name == "arrow.bool8":
        return array.storage.cast(pa.bool_())
    return array.storage


def _tensor_storage(array: ArrowArray) -> tuple[ArrowArray, list[int], list[int]] | None:
    """The flat values of an extension type that says the shape of its rows, that shape, and the order of its
    dimensions; None for any other extension type.

    Arrow's own tensor type is one; those of Ray Data and Hugging Face have an attribute ``shape`` too.
    """
    shape = getattr(array.type, "shape", None)
    if not isinstance(shape, (list, tuple)) or not all(isinstance(size, int) for size in shape):
        return None
    storage = _uniform(array.storage)
    if storage is None or int(np.prod(storage.shape[1:])) != int(np.prod(shape)):
        return None
    permutation = getattr(array.type, "permutation", None)
    return storage.values, list(shape), list(permutation or range(len(shape)))


def _common_length(array: ArrowArray) -> int | None:
    """The length of every list of ``array``; None where they differ or one is null. 0 where there is no list."""
    if array.null_count:
        return None
    if pa.types.is_fixed_size_list(array.type):
        return int(array.type.list_size)
    offsets = list_offsets(array)
    if len(array) == 0:
        return 0
    first, last = int(offsets[0]), int(offsets[-1])
    size, rest = divmod(last - first, len(array))
    if rest or not np.array_equal(offsets, np.arange(len(array) + 1, dtype=offsets.dtype) * size + first):
        return None
    return size


def list_offsets(array: ArrowArray) -> NumpyArray:
    """Where each list of ``array`` begins among all its values, and where the last one ends."""
    if pa.types.is_fixed_size_list(array.type):
        first = int(array.offset)
        return np.arange(first, first + len(array) + 1) * int(array.type.list_size)
    if len(array) == 0:
        return np.zeros(1, np.int64)
    return _numbers(array.offsets, is_bool=False)


def view(array: ArrowArray) -> NumpyArray | ArrowArray:
    """``array`` as numpy, without a copy, where all its values have one type and shape and none is null.

    Otherwise ``array`` itself. Only bools are copied: Arrow packs eight into a byte. What is seen through a
    view belongs to whoever owns the Arrow memory, and cannot be written to.
    """
    if not _viewable(leaf_type(array.type)):
        return array
    found = _uniform(array)
    if found is None or found.values.null_count or not _viewable(found.values.type):
        return array
    is_bool = pa.types.is_boolean(found.values.type)
    return found.laid_out(_numbers(found.values, is_bool))


#: Types of the same layout in both.
_NUMPY_TYPES: dict[Any, Any] = {
    getattr(pa, name)(): np.dtype(name)
    for name in (
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "float32",
        "float64",
    )
}


def _numbers(values: ArrowArray, is_bool: bool) -> NumpyArray:
    """Values without nulls as numpy has them, where they lie if that is possible.

    Arrow's own ``to_numpy`` loads pandas when it is first called, which would take a third of a second of the first
    batch on every rank.
    """
    kind = _NUMPY_TYPES.get(values.type)
    memory = values.buffers()[1] if kind is not None else None
    if kind is None or memory is None:
        copied: NumpyArray = values.to_numpy(zero_copy_only=not is_bool)
        return copied
    seen = np.frombuffer(memory, kind)[values.offset : values.offset + len(values)]
    seen.flags.writeable = False
    return seen


def is_number(kind: ArrowType) -> bool:
    """Whether values of this type, which is no list, can be in a tensor."""
    return _viewable(kind) or pa.types.is_temporal(kind) or pa.types.is_decimal(kind)


def _viewable(kind: ArrowType) -> bool:
    return pa.types.is_boolean(kind) or _has_numpy_type(kind)


def plain(array: ArrowArray) -> ArrowArray:
    """``array`` in the plainest type that holds its values: no dictionary, no run-ends, no extension, no view
    types."""
    kind = array.type
    if _is_plain(kind):
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return plain(_storage(array))
    if pa.types.is_dictionary(kind):
        return plain(array.dictionary_decode())
    if _is(kind, "run_end_encoded"):
        return plain(pc.call_function("run_end_decode", [array]))
    if _is(kind, "string_view"):
        return array.cast(pa.string())
    if _is(kind, "binary_view"):
        return array.cast(pa.binary())
    return _plain_struct(array) if pa.types.is_struct(kind) else _plain_list(array)


def _is_plain(kind: ArrowType) -> bool:
    if isinstance(kind, pa.BaseExtensionType) or pa.types.is_dictionary(kind):
        return False
    if any(_is(kind, name) for name in ("run_end_encoded", "string_view", "binary_view")) or _is_list_view(
        kind
    ):
        return False
    if pa.types.is_map(kind):
        return True  # only ever handed on as Python's own values
    return all(_is_plain(kind.field(index).type) for index in range(kind.num_fields))


def _plain_struct(array: ArrowArray) -> ArrowArray:
    names = [field.name for field in array.type]
    return pa.StructArray.from_arrays([plain(child) for child in array.flatten()], names, mask=_nulls(array))


def _plain_list(array: ArrowArray) -> ArrowArray:
    # Not by Arrow's cast, which makes lists of view types that read beyond their memory (seen with 26.0).
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        values = array.values.slice(array.offset * size, len(array) * size)
        return pa.FixedSizeListArray.from_arrays(plain(values), size, mask=_nulls(array))
    known: ArrowArray = pc.list_value_length(array)
    lengths = known.fill_null(0).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    is_large = pa.types.is_large_list(array.type) or _is(array.type, "large_list_view")
    lists = pa.LargeListArray if is_large else pa.ListArray
    starts: ArrowArray = pa.array(offsets.astype(np.int64 if is_large else np.int32))
    return lists.from_arrays(starts, plain(array.flatten()), mask=_nulls(array))


def _nulls(array: ArrowArray) -> ArrowArray | None:
    return array.is_null() if array.null_count else None


# --------------------------------------------------------------------------- to Arrow


def arrow_of(column: Column, name: str = "", *, as_lists: bool = False) -> ArrowArray:
    """The column as an Arrow array: rows of one dimension as lists, of more as tensors unless ``as_lists``. Raises
    DataError where Arrow has no type for its values."""
    if not isinstance(column, np.ndarray):
        return column
    try:
        if column.dtype == object:
            return pa.array([_listed(value) for value in column])
        if column.ndim == 1:
            return _flat_arrow(column)
        return nested_lists(column) if column.ndim == 2 or as_lists else _tensor_array(column)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError) as problem:
        raise DataError(
            f"Column {name!r} cannot be an Arrow column: {problem}. Convert its values to numbers, text, lists or "
            "arrays of one type, or drop it."
        ) from problem


def _listed(value: Any) -> Any:
    """Arrow takes arrays of one dimension, and lists of them."""
    if isinstance(value, np.ndarray) and value.ndim > 1:
        return [_listed(part) for part in value]
    return value


def _flat_arrow(values: NumpyArray) -> ArrowArray:
    return pa.array(_in_arrow_units(values) if values.dtype.kind in "Mm" else values)


def _in_arrow_units(times: NumpyArray) -> NumpyArray:
    """Times in one of the units that Arrow has too; dates stay days."""
    unit, count = np.datetime_data(times.dtype)
    if (unit in _NANOSECONDS and count == 1) or times.dtype == _DATE:
        return times
    return times.astype(f"{times.dtype.kind}8[s]")


def nested_lists(values: NumpyArray) -> ArrowArray:
    """Rows of several dimensions as lists of lists, to be put together with such."""
    inner = _flat_arrow(values.reshape(-1))
    for axis in range(values.ndim - 1, 0, -1):
        offsets = np.arange(int(np.prod(values.shape[:axis])) + 1) * values.shape[axis]
        is_large = int(offsets[-1]) > LONGEST_LIST_COLUMN
        starts: ArrowArray = pa.array(offsets.astype(np.int64 if is_large else np.int32))
        inner = (pa.LargeListArray if is_large else pa.ListArray).from_arrays(starts, inner)
    return inner


def _tensor_array(values: NumpyArray) -> ArrowArray:
    shape = values.shape[1:]
    flat = _flat_arrow(values.reshape(-1))
    kind = pa.list_(flat.type, int(np.prod(shape)))
    storage = pa.Array.from_buffers(kind, len(values), [None], null_count=0, children=[flat])
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, shape), storage)


# --------------------------------------------------------------------------- to numpy and to Python values


def writable(array: NumpyArray) -> NumpyArray:
    """``array`` where it may be written to, otherwise a copy: Arrow's memory, and a file mapped by it, may not."""
    return array if array.flags.writeable else array.copy()


def object_array(values: list[Any]) -> NumpyArray:
    """One object per row, also where numpy would rather stack them."""
    array = np.empty(len(values), object)
    for index, value in enumerate(values):
        array[index] = value
    return array


def _seen(array: ArrowArray) -> NumpyArray | ArrowArray:
    """Numpy where rows have one type and shape, otherwise the array in plain types."""
    for form in (array, plain(array)):
        seen = view(form)
        if isinstance(seen, np.ndarray):
            return seen
        stacked = _stacked_with_gaps(form)
        if stacked is not None:
            return stacked
    return plain(array)


def _stacked_with_gaps(array: ArrowArray) -> NumpyArray | None:
    """Lists of one length of floats or times, with NaN and NaT for nulls inside."""
    leaf = leaf_type(array.type)
    if leaf is array.type or not (pa.types.is_floating(leaf) or pa.types.is_temporal(leaf)):
        return None
    found = _uniform(array)
    if found is None or len(found.shape) == 1 or not found.values.type.equals(leaf):
        return None
    return found.laid_out(_with_gaps(found.values))


def numpy_of(column: Column) -> NumpyArray:
    """The column as the numpy array of the table above; it may be written to."""
    if isinstance(column, np.ndarray):
        return writable(column)
    array = _seen(column)
    if isinstance(array, np.ndarray):
        return writable(array)
    kind = array.type
    if pa.types.is_floating(kind) or pa.types.is_temporal(kind):
        return _with_gaps(array)
    if is_text(kind) or is_binary(kind) or pa.types.is_decimal(kind):
        return writable(array.to_numpy(zero_copy_only=False))
    return object_array(values_of(array))


def _with_gaps(array: ArrowArray) -> NumpyArray:
    """Floats and times with NaN and NaT for nulls."""
    kind = array.type
    if pa.types.is_time(kind):
        width = pa.int64() if kind.bit_width == 64 else pa.int32()
        array = array.cast(width).cast(pa.int64()).cast(pa.duration(kind.unit))
    elif pa.types.is_date(kind):
        array = array.cast(pa.date32())
    return writable(array.to_numpy(zero_copy_only=False))


def values_of(column: Column) -> list[Any]:
    """The rows of a column as Python values: scalars, text, dicts; arrays for lists and tensors; None for null."""
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
    """The rows of a column as a row's dict has them: as :func:`values_of`, but with lists for lists, also for those
    inside of structs."""
    if are_lists:
        return lists_of(column)
    if not isinstance(column, np.ndarray) and pa.types.is_struct(column.type):
        return _struct_values(plain(column), _field_values)
    return values_of(column)


def _field_values(array: ArrowArray) -> list[Any]:
    # Lists of fixed size inside of a struct are what arrays become there: see ``sources.items``.
    return row_values(array, is_list(array.type) and not pa.types.is_fixed_size_list(array.type))


def lists_of(column: Column) -> list[Any]:
    """The rows of a column of lists as Python's lists; None for null."""
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
        # numpy gives nanoseconds as integers, without a word.
        return list(_flat_arrow(column).to_pylist())
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
    """The values of each list. What one row becomes must not depend on its neighbours, so only values that
    look the same in any company are converted together."""
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


# --------------------------------------------------------------------------- to torch


@dataclass(frozen=True)
class Named:
    """What an error says about a column: its name, and the number of each of its rows."""

    name: str
    numbers: Ints
    #: Where it is a field of a struct: the column, and the fields down to it.
    path: tuple[str, ...] = ()

    def row(self, index: int) -> str:
        return f"row {int(self.numbers[index])}"

    def field(self, name: str) -> Named:
        return Named(f"{self.name}.{name}", self.numbers, (*(self.path or (self.name,)), name))


Tensors = Any  #: torch.Tensor | list of str or bytes | dict of these


def arrow_ints(values: Ints) -> ArrowArray:
    """Whole numbers as an Arrow array over the same memory; ``pa.array`` would load pandas."""
    whole = np.ascontiguousarray(values, np.int64)
    memory: Any = whole  # its stub does not know that arrays have the buffer protocol
    found: ArrowArray = pa.Array.from_buffers(pa.int64(), len(whole), [None, pa.py_buffer(memory)])
    return found


def tensor_of(
    column: Column, named: Named, *, dtype: torch.dtype | None = None, python_floats: bool = False
) -> Tensors:
    """The column as the tensor (or list, or dict) of the table above; it owns its memory and may be written to.

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
    found = _uniform(array)
    if found is None:
        raise ragged_error(named, *_two_lengths(plain(array)))
    return convert.tensor(found.laid_out(flat_numbers(found.values)), named)


def flat_numbers(values: ArrowArray) -> NumpyArray:
    """Values that are no lists, and of which none is null, as numbers or times of numpy. May be Arrow's memory."""
    kind = values.type
    if pa.types.is_decimal(kind):
        values = values.cast(pa.float64())
    elif not _viewable(kind):
        return _with_gaps(values)
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


def as_numpy(value: Any) -> Any:
    """A torch tensor as numpy, on the CPU; an image of Pillow's as its pixels; anything else unchanged."""
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(value, pillow.Image):
        from powertrain.data.operations.images import pixels_of

        return pixels_of(value)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # numpy has no bfloat16


@dataclass(frozen=True)
class _Conversion:
    """Numbers in numpy to a tensor of the right type."""

    dtype: torch.dtype | None
    python_floats: bool

    def tensor(self, values: NumpyArray, named: Named) -> torch.Tensor:
        import torch

        if values.dtype.kind in "Mm":
            values = _since_epoch(values, named)
        wanted = self.dtype
        if wanted is None and self.python_floats and values.dtype == np.float64:
            wanted = torch.get_default_dtype()
        if wanted is None and values.dtype.kind == "u" and values.dtype.name in _WIDENED:
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
    wider = _WIDENED[values.dtype.name]
    if values.dtype == np.uint64 and values.size and int(values.max()) > _LARGEST_INT64:
        row = int(np.argmax(values.reshape(len(values), -1).max(axis=1)))
        raise DataError(
            f"Column {named.name!r} has the value {int(values.max())} in {named.row(row)}, too large for "
            f"torch.int64, which uint64 columns become. Pass dtypes={{{named.name!r}: torch.uint64}} or another "
            "type to keep it."
        )
    return values.astype(wider)


def _since_epoch(values: NumpyArray, named: Named) -> NumpyArray:
    """Days for dates, nanoseconds for all other times."""
    missing = np.isnat(values)
    if missing.any():
        raise _null_error(named, int(np.argwhere(missing)[0][0]))
    values = _in_arrow_units(values)
    if values.dtype == _DATE:
        return values.astype(np.int64)
    factor = _NANOSECONDS[np.datetime_data(values.dtype)[0]]
    counts = values.astype(np.int64)
    too_far = np.abs(counts) > _LARGEST_INT64 // factor
    if too_far.any():
        row = int(np.argwhere(too_far)[0][0])
        raise DataError(
            f"Column {named.name!r} has a time in {named.row(row)} that is too far from 1970 to be counted in "
            "nanoseconds, as tensors of times are. Convert the column to numbers of your own unit in "
            "map_batches()."
        )
    return counts * factor


# --------------------------------------------------------------------------- what is refused


def refuse_nulls(array: ArrowArray, named: Named) -> None:
    """Raises DataError where a value, also one within a list, is null."""
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
    """For a null in a list of type ``kind``: what can be said of columns to Arrow does not reach it."""
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
    """Two lists of ``array`` that differ in length, each as (row, length). Requires that there are such, and
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
    """For two values of different size: each is the index of its row, and the size, a length or a shape."""
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
