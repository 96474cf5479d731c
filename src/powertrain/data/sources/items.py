"""Python objects as Arrow columns: items, values of items, numpy arrays, tensors.

- Arrays and tensors of one shape and dtype become tensors (``fixed_shape_tensor``); of different shapes, lists, which
  are marked so that a row of them is an array again.
- Python's own floats, also in lists and dictionaries, are marked so that a tensor of them gets torch's default dtype.
- Dictionaries, named tuples, and tuples whose elements differ in kind become structs (of plain tuples with the
  fields "0", "1", and so on); other tuples are lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from powertrain.data.arguments import ODD, column_name, shown
from powertrain.data.rows.nesting import check_nesting
from powertrain.data.sources.base import ARRAYS, PYTHON_FLOATS
from powertrain.errors import DataError

_pt = pa.types


def table_of_items(items: Sequence[Any], unit: str = "item", first: int = 0) -> pa.Table:
    """Return a column for each key of the items, null where it is missing; for other items the column "item".

    ``unit`` and the number of the ``first`` item name an item in errors.
    """
    where = _Where("item", unit, first)
    mappings = {kind: issubclass(kind, Mapping) for kind in set(map(type, items))}
    if not (mappings and all(mappings.values())):
        if any(mappings.values()):
            odd = next(i for i, item in enumerate(items) if not isinstance(item, Mapping))
            raise DataError(
                f"{unit.capitalize()} {first + odd} is a {type(items[odd]).__name__}, and others are dicts with their "
                "columns. Make all of them dicts, or none."
            )
        return table_of_columns({"item": list(items)}, unit, first)
    names = dict.fromkeys(chain.from_iterable(items))
    if not names:
        raise DataError(
            f"All {len(items)} items are dicts without a key, and rows need at least one column. Give them one, "
            "such as {'id': 0}."
        )
    for name in names:
        if not isinstance(name, str):
            raise DataError(
                f"The key {shown(name)} of an item ({where}) is a {type(name).__name__}. Use strings as keys."
            )
        column_name("The items", name)
    return table_of_columns({name: [item.get(name) for item in items] for name in names}, unit, first)


def table_of_columns(columns: Mapping[str, Sequence[Any]], unit: str = "item", first: int = 0) -> pa.Table:
    """Return a table of these values, marked where they are Python floats."""
    fields, arrays = [], []
    for name, values in columns.items():
        array = array_of(values, _Where(name, unit, first))
        is_python = _holds_float64(array.type) and _has_python_floats(values)
        marks = dict([PYTHON_FLOATS] if is_python else [])
        if _is_list(array.type) and holds_arrays(values):
            marks.update([ARRAYS])
        fields.append(pa.field(name, array.type, metadata=marks or None))
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def holds_arrays(values: Iterable[Any]) -> bool:
    """Return whether the first value that is not null is an array, a tensor or an image, or a list of such."""
    example = next((value for value in values if value is not None), None)
    return _is_array(example) or (isinstance(example, (list, tuple)) and any(map(_is_array, example)))


class _Where:
    """The names of values in errors."""

    def __init__(self, column: str, unit: str, first: int) -> None:
        self.column, self.unit, self.first = column, unit, first

    def __str__(self) -> str:
        return f"column {self.column!r}"

    def part(self, name: str) -> _Where:
        return _Where(f"{self.column}.{name}", self.unit, self.first)

    def number(self, place: int) -> str:
        return f"{self.unit} {self.first + place}"


# --------------------------------------------------------------------------- values to arrays


def array_of(values: Sequence[Any], where: _Where, *, inside: bool = False) -> Any:
    """Return the values as an Arrow array. ``inside`` a struct tensors are nested lists of fixed size.

    Raises :class:`DataError` where Arrow has no type that all of them fit.
    """
    if not inside:  # nested values were checked together with their container
        check_nesting(values, str(where))
    example = next((value for value in values if value is not None), None)
    if _is_array(example):
        return _array_of_arrays([_as_numpy(value) for value in values], where, inside)
    if isinstance(example, Mapping):
        keys = dict.fromkeys(chain.from_iterable(v for v in values if isinstance(v, Mapping)))
        return _struct_of(values, list(keys), where)
    if isinstance(example, tuple) and _is_record(example):
        return _struct_of_tuples(values, example, where)
    if isinstance(example, (list, tuple)) and any(map(_is_array, example)):
        return _array_of_arrays([_stacked(value, where) for value in values], where, inside)
    try:
        return pa.array(values, from_pandas=False)
    except ODD as error:
        raise DataError(_too_large(values, where) or _why_no_type(values, where, error)) from error


def _is_array(value: Any) -> bool:
    """Return True for numpy arrays, torch tensors and Pillow images."""
    return isinstance(value, np.ndarray) or _is_tensor(value) or _is_image(value)


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def _is_image(value: Any) -> bool:
    return any(base.__module__ == "PIL.Image" and base.__name__ == "Image" for base in type(value).__mro__)


def _as_numpy(value: Any) -> Any:
    """Return an array for a tensor, an image, an array or a number; None stays None."""
    if value is None:
        return None
    if _is_image(value):
        from powertrain.data.rows.pixels_of import pixels_of

        return pixels_of(value)
    if _is_tensor(value):
        value = value.detach().cpu()
        return value.float().numpy() if "bfloat16" in str(value.dtype) else value.numpy()
    return np.asarray(value)


def _stacked(value: Any, where: _Where) -> Any:
    """Return a list of arrays of one shape as one array."""
    if value is None:
        return None
    try:
        return np.stack([_as_numpy(each) for each in value])
    except (ValueError, TypeError) as error:
        raise DataError(
            f"A value of {where} is a list of arrays that do not stack: {error}. Make them of one shape, or put them "
            "under keys of their own."
        ) from error


def _array_of_arrays(arrays: list[Any], where: _Where, inside: bool) -> Any:
    there = [array for array in arrays if array is not None]
    dtypes = {array.dtype for array in there}
    dimensions = {array.ndim for array in there}
    if len(dtypes) > 1 or len(dimensions) > 1:
        raise DataError(
            f"The arrays of {where} differ: dtypes {sorted(map(str, dtypes))}, numbers of dimensions "
            f"{sorted(dimensions)}. Give all of them one dtype and one number of dimensions."
        )
    if dimensions == {0}:
        return array_of([None if array is None else array[()] for array in arrays], where)
    shapes = {array.shape for array in there}
    if (
        len(there) == len(arrays)
        and len(shapes) == 1
        and 0 not in there[0].shape
        and there[0].dtype.kind in "biuf"
    ):
        stacked = np.stack(there)
        return nested_lists(stacked) if inside else tensor_array(stacked)
    return _ragged(arrays, dimensions.pop(), there[0].dtype, where)


def _ragged(arrays: list[Any], dimensions: int, dtype: Any, where: _Where) -> Any:
    """Return lists of different lengths, nested as deep as the arrays have dimensions."""
    if dimensions == 1:
        flat = [array for array in arrays if array is not None]
        values = array_of_numpy(np.concatenate(flat) if flat else np.empty(0, dtype), str(where))
    else:
        values = _ragged(
            [row for array in arrays if array is not None for row in array], dimensions - 1, dtype, where
        )
    lengths = np.array([0 if array is None else len(array) for array in arrays], np.int64)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]))
    missing = pa.array([array is None for array in arrays], pa.bool_())
    if lengths.sum() < 2**31:
        return pa.ListArray.from_arrays(offsets.cast(pa.int32()), values, mask=missing)
    return pa.LargeListArray.from_arrays(offsets, values, mask=missing)


def _is_record(value: tuple[Any, ...]) -> bool:
    """Return True for tuples of different things: (image, label)."""
    if hasattr(value, "_fields"):
        return True
    return any(map(_is_array, value)) or len({_kind(each) for each in value if each is not None}) > 1


def _kind(value: Any) -> object:
    """Return the kind of a value: one for all Python numbers, otherwise its type."""
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value)


def _struct_of_tuples(values: Sequence[Any], example: tuple[Any, ...], where: _Where) -> Any:
    names = list(getattr(example, "_fields", map(str, range(len(example)))))
    for place, value in enumerate(values):
        if value is not None and (not isinstance(value, (tuple, list)) or len(value) != len(names)):
            raise DataError(
                f"The values of {where} differ: most are tuples of {len(names)}, and that of {where.number(place)} is "
                f"{shown(value)}. Give all of them the same form."
            )
    return _struct_of([None if v is None else dict(zip(names, v, strict=True)) for v in values], names, where)


def _struct_of(values: Sequence[Any], names: Sequence[Any], where: _Where) -> Any:
    for place, value in enumerate(values):
        if value is not None and not isinstance(value, Mapping):
            raise DataError(
                f"The values of {where} differ: some are dicts, and that of {where.number(place)} is a "
                f"{type(value).__name__}. Give all of them the same form."
            )
    if not names:
        return pa.array(values, pa.struct([]))
    parts = [
        array_of([None if v is None else v.get(name) for v in values], where.part(str(name)), inside=True)
        for name in names
    ]
    missing = pa.array([value is None for value in values])
    fields = [pa.field(str(name), part.type) for name, part in zip(names, parts, strict=True)]
    return pa.StructArray.from_arrays(parts, fields=fields, mask=missing)


def _why_no_type(values: Sequence[Any], where: _Where, error: BaseException) -> str:
    kinds: dict[str, int] = {}
    for place, value in enumerate(values):
        if value is not None:
            kinds.setdefault(type(value).__name__, place)
    shown = ", ".join(f"{kind} ({where.number(place)})" for kind, place in list(kinds.items())[:5])
    try:
        reason = str(error).partition("\n")[0].rstrip(".")[:300]
    except ODD:
        reason = type(error).__name__
    return (
        f"The values of {where} have no common type that a column can have: {reason}. There are: "
        f"{shown}. Give all of them one type: numbers, text, bytes, lists, dicts or arrays."
    )


def _too_large(values: Sequence[Any], where: _Where) -> str | None:
    """Return the advice for an integer that does not fit; None where all of them do."""
    for place, value in enumerate(values):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            return (
                f"The value {shown(value)} of {where} in {where.number(place)} does not fit into 64 bits with a sign, "
                "which whole numbers of a column have (from -2**63 to 2**63 - 1). Give it as numpy.uint64 where all "
                "values fit there, as a float or as text."
            )
    return None


def _has_python_floats(values: Sequence[Any]) -> bool:
    """Return whether the first float among the values, also nested ones, is Python's and not numpy's."""
    return next(
        (type(leaf) is float for leaf in _leaves(values) if isinstance(leaf, (float, np.floating))), False
    )


def _leaves(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _leaves(value)
        elif isinstance(value, Mapping):
            yield from _leaves(value.values())
        elif _is_array(value):
            continue  # an array has a dtype of its own
        else:
            yield value


def _is_list(given: pa.DataType) -> bool:
    return _pt.is_list(given) or _pt.is_large_list(given) or _pt.is_fixed_size_list(given)


def _holds_float64(given: pa.DataType) -> bool:
    return given.equals(pa.float64()) or any(
        _holds_float64(given.field(place).type) for place in range(given.num_fields)
    )


# --------------------------------------------------------------------------- numpy arrays


def table_of_arrays(columns: Mapping[str, Any]) -> pa.Table:
    """Return a column for each array, whose first dimension is the rows."""
    fields, arrays = [], []
    for name, values in columns.items():
        values = np.asarray(values)
        array = column_of_numpy(values, name)
        had_arrays = _is_list(array.type) and (values.ndim > 1 or holds_arrays(values))
        fields.append(pa.field(name, array.type, metadata=dict([ARRAYS]) if had_arrays else None))
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def column_of_numpy(values: Any, name: str) -> Any:
    """Return a numpy array whose first dimension is the rows, as a column of its own memory."""
    values = np.asarray(values)
    if values.ndim == 0:
        raise DataError(f"The array of {name!r} is a single value. Its first dimension must be the rows.")
    if values.dtype.kind == "O":
        return array_of(list(values), _Where(name, "row", 0))
    if values.ndim == 1 or 0 in values.shape[1:] or values.dtype.kind not in "biuf":
        if values.ndim > 1:
            return pa.array(values.tolist(), _nested_type(values, name))
        return array_of_numpy(values.copy(), f"column {name!r}")
    return tensor_array(values.copy())


def array_of_numpy(values: Any, where: str) -> Any:
    """Return a one-dimensional numpy array as a column."""
    try:
        return pa.array(np.ascontiguousarray(values))
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise DataError(
            f"The array of {where} has the dtype {values.dtype}, which a column cannot have: {error}. Convert it to "
            "numbers, text, bytes or times first."
        ) from error


def _nested_type(values: Any, name: str) -> pa.DataType:
    given: pa.DataType = array_of_numpy(values.reshape(-1)[:0], f"column {name!r}").type
    for _ in range(values.ndim - 1):
        given = pa.list_(given)
    return given


def tensor_array(values: Any) -> Any:
    """Return an array of at least two dimensions as a column of tensors."""
    storage = _fixed_lists(
        values, values.size // len(values) if len(values) else int(np.prod(values.shape[1:]))
    )
    return pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(storage.type.value_type, values.shape[1:]), storage
    )


def nested_lists(values: Any) -> Any:
    """Return the same as nested lists of fixed size, which may be inside of structs."""
    array = _fixed_lists(values, values.shape[-1])
    for size in reversed(values.shape[1:-1]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _fixed_lists(values: Any, size: int) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), size)
