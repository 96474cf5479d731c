"""Arrow types and the numpy types they become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from powertrain.data.plan.order import Ints
from powertrain.data.sources.base import ARRAYS

NumpyArray = np.ndarray[Any, Any]
# The valid operations on an Arrow array follow from its type, which mypy does not know: it is checked here first.
ArrowArray = Any
ArrowType = Any
ArrowField = Any

NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
DATE = np.dtype("M8[D]")
LARGEST_INT64 = 2**63 - 1
#: Offsets of a plain Arrow list are 32 bits wide.
LONGEST_LIST_COLUMN = 2**31 - 1
#: torch can hold these, but has hardly any operation for them.
WIDENED = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


def _is(kind: ArrowType, name: str) -> bool:
    """Return whether ``kind`` is one of Arrow's types; older versions of Arrow lack some of them."""
    test: Callable[[ArrowType], bool] | None = getattr(pa.types, f"is_{name}", None)
    return test is not None and test(kind)


def is_list(kind: ArrowType) -> bool:
    """Return whether values are lists with offsets, or of fixed size."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_list_view(kind: ArrowType) -> bool:
    return _is(kind, "list_view") or _is(kind, "large_list_view")


def is_marked(field: ArrowField, mark: tuple[bytes, bytes]) -> bool:
    """Return whether a field has one of the marks of ``sources.base``."""
    key, value = mark
    found: bool = (field.metadata or {}).get(key) == value
    return found


def rows_are_lists(field: ArrowField) -> bool:
    """Return whether a row of the column is a Python list; rows of tensors, and of lists so marked, are arrays."""
    return (is_list(field.type) or _is_list_view(field.type)) and not is_marked(field, ARRAYS)


def is_text(kind: ArrowType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_binary(kind: ArrowType) -> bool:
    return (
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    ) and not pa.types.is_decimal(kind)


def leaf_type(kind: ArrowType) -> ArrowType:
    """Return the type of the values within lists and extensions."""
    while True:
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        elif is_list(kind) or _is_list_view(kind):
            kind = kind.value_type
        else:
            return kind


def _has_numpy_type(kind: ArrowType) -> bool:
    """Return whether numpy can view values of this type without a copy."""
    if pa.types.is_timestamp(kind):
        return (
            kind.tz is None
        )  # numpy has no time zones: with one it stays an Arrow array until numpy is requested
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_duration(kind)


@dataclass(frozen=True)
class _Uniform:
    """An array whose rows all have the same shape: its flat values and their layout."""

    values: ArrowArray
    shape: tuple[int, ...]
    #: Position of each dimension in ``shape``; tensor types may permute them.
    axes: tuple[int, ...]

    def laid_out(self, flat: NumpyArray) -> NumpyArray:
        shaped = flat.reshape(self.shape)
        return shaped if self.axes == tuple(range(len(self.axes))) else shaped.transpose(self.axes)


def uniform(array: ArrowArray) -> _Uniform | None:
    """Return ``array`` as values of one shape; None where lists have different lengths or are null."""
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
    """Return the flat values of an extension type with a shape, that shape, and the order of its dimensions; None for
    any other extension type.

    Arrow's own tensor type is one; those of Ray Data and Hugging Face have an attribute ``shape`` too.
    """
    shape = getattr(array.type, "shape", None)
    if not isinstance(shape, (list, tuple)) or not all(isinstance(size, int) for size in shape):
        return None
    storage = uniform(array.storage)
    if storage is None or int(np.prod(storage.shape[1:])) != int(np.prod(shape)):
        return None
    permutation = getattr(array.type, "permutation", None)
    return storage.values, list(shape), list(permutation or range(len(shape)))


def _common_length(array: ArrowArray) -> int | None:
    """Return the length of every list of ``array``; None where they differ or one is null. 0 where there is no list."""
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
    """Return the offset of each list of ``array`` among all its values, and the end of the last one."""
    if pa.types.is_fixed_size_list(array.type):
        first = int(array.offset)
        return np.arange(first, first + len(array) + 1) * int(array.type.list_size)
    if len(array) == 0:
        return np.zeros(1, np.int64)
    return _numbers(array.offsets, is_bool=False)


def view(array: ArrowArray) -> NumpyArray | ArrowArray:
    """Return ``array`` as numpy, without a copy, where all its values have one type and shape and none is null.

    Otherwise return ``array`` itself. Only bools are copied: Arrow packs eight into a byte. A view belongs to the owner
    of the Arrow memory, and is read-only.
    """
    if not viewable(leaf_type(array.type)):
        return array
    found = uniform(array)
    if found is None or found.values.null_count or not viewable(found.values.type):
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
    """Return values without nulls as numpy, without a copy if possible.

    Arrow's own ``to_numpy`` loads pandas on its first call, which would take a third of a second of the first batch on
    every rank.
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
    """Return whether values of this type, which is not a list, can be in a tensor."""
    return viewable(kind) or pa.types.is_temporal(kind) or pa.types.is_decimal(kind)


def viewable(kind: ArrowType) -> bool:
    return pa.types.is_boolean(kind) or _has_numpy_type(kind)


def plain(array: ArrowArray) -> ArrowArray:
    """Return ``array`` in the plainest type that holds its values: no dictionary, no run-ends, no extension, no view
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
        return True  # only ever passed on as Python values
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


def writable(array: NumpyArray) -> NumpyArray:
    """Return ``array`` if it is writable, otherwise a copy: Arrow's memory and mapped files are not."""
    return array if array.flags.writeable else array.copy()


def object_array(values: list[Any]) -> NumpyArray:
    """Return one object per row, also where numpy would stack them."""
    array = np.empty(len(values), object)
    for index, value in enumerate(values):
        array[index] = value
    return array


@dataclass(frozen=True)
class Named:
    """The identity of a column in errors: its name, and the number of each of its rows."""

    name: str
    numbers: Ints
    #: For a field of a struct: the column, and the fields down to it.
    path: tuple[str, ...] = ()

    def row(self, index: int) -> str:
        return f"row {int(self.numbers[index])}"

    def field(self, name: str) -> Named:
        return Named(f"{self.name}.{name}", self.numbers, (*(self.path or (self.name,)), name))


def arrow_ints(values: Ints) -> ArrowArray:
    """Return integers as an Arrow array over the same memory; ``pa.array`` would load pandas."""
    whole = np.ascontiguousarray(values, np.int64)
    memory: Any = whole  # its stub does not declare the buffer protocol of arrays
    found: ArrowArray = pa.Array.from_buffers(pa.int64(), len(whole), [None, pa.py_buffer(memory)])
    return found
