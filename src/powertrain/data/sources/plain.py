"""Arrow data in the few types that the rest of this package handles.

Dictionaries are decoded (each row group has another one, and a file of decoded blocks can hold only one), views and
run ends become plain arrays, and extension types other than tensors become their storage type: which of them are
registered differs from process to process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from powertrain.data.arguments import shown
from powertrain.errors import DataError

_pt = pa.types
#: Ray Data's names of its types of tensors of one shape, and their key in Parquet files.
_RAY_TENSORS = frozenset({"ray.data.arrow_tensor", "ray.data.arrow_tensor_v2"})
_EXTENSION, _EXTENSION_METADATA = b"ARROW:extension:name", b"ARROW:extension:metadata"


def plain_type(given: Any) -> Any:
    """Return the plain type of values of type ``given``; a tensor's stays."""
    if isinstance(given, pa.FixedShapeTensorType):
        return given
    if isinstance(given, pa.BaseExtensionType) and given.extension_name in _RAY_TENSORS:
        return _tensor_type(given.storage_type, list(getattr(given, "shape", ())))
    return _plain_inner(given)


def plain_field_type(field: Any) -> Any:
    """Return the plain type of a column. Tensors written by Ray Data are recognised by the metadata of the field,
    unless Ray is loaded in this process."""
    marks = field.metadata or {}
    if (
        isinstance(field.type, pa.BaseExtensionType)
        or marks.get(_EXTENSION, b"").decode() not in _RAY_TENSORS
    ):
        return plain_type(field.type)
    try:
        shape = json.loads(marks[_EXTENSION_METADATA])
    except (KeyError, ValueError):
        shape = []
    return _tensor_type(field.type, shape)


def _tensor_type(stored: Any, shape: Any) -> Any:
    """Return the type of tensors of this shape, stored as lists; the lists' own where no tensor can be made of them."""
    plain = _plain_inner(stored)
    is_shape = isinstance(shape, list) and shape and all(isinstance(size, int) and size > 0 for size in shape)
    if not is_shape or not (_pt.is_list(plain) or _pt.is_large_list(plain)):
        return plain
    value = plain.value_type
    is_number = _pt.is_integer(value) or _pt.is_floating(value) or _pt.is_boolean(value)
    return pa.fixed_shape_tensor(value, shape) if is_number else plain


def _plain_inner(given: Any) -> Any:
    if isinstance(given, pa.BaseExtensionType):
        return _plain_inner(given.storage_type)
    if _pt.is_dictionary(given) or _pt.is_run_end_encoded(given):
        return _plain_inner(given.value_type)
    if _is_view(given, "is_string_view"):
        return pa.string()
    if _is_view(given, "is_binary_view"):
        return pa.binary()
    if _pt.is_struct(given):
        return pa.struct([_plain_field(given.field(i)) for i in range(given.num_fields)])
    if _pt.is_map(given):
        return pa.map_(_plain_inner(given.key_type), _plain_inner(given.item_type))
    if _pt.is_fixed_size_list(given):
        return pa.list_(_plain_field(given.value_field), given.list_size)
    if _pt.is_large_list(given) or _is_view(given, "is_large_list_view"):
        return pa.large_list(_plain_field(given.value_field))
    if _pt.is_list(given) or _is_view(given, "is_list_view"):
        return pa.list_(_plain_field(given.value_field))
    return given


def _is_view(given: pa.DataType, test: str) -> bool:
    """Return the result of a test that older versions of Arrow lack."""
    known: Callable[[pa.DataType], bool] | None = getattr(_pt, test, None)
    return known is not None and known(given)


def _plain_field(given: Any) -> Any:
    return given.with_type(_plain_inner(given.type))


def plain_schema(given: pa.Schema) -> pa.Schema:
    """Return the schema of the plain form, without the schema's own metadata (pandas', Hugging Face's)."""
    return pa.schema([field.with_type(plain_field_type(field)) for field in given])


def as_type(array: Any, wanted: pa.DataType) -> Any:
    """Return ``array`` with the type ``wanted``, which is its own, its plain form, or (of nulls) any."""
    if array.type.equals(wanted):
        return array
    if isinstance(array, pa.ExtensionArray) and not isinstance(array.type, pa.FixedShapeTensorType):
        return as_type(array.storage, wanted)
    if _pt.is_run_end_encoded(array.type):
        return as_type(pc.call_function("run_end_decode", [array]), wanted)
    if isinstance(wanted, pa.FixedShapeTensorType) and not isinstance(array, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(wanted, as_type(array, wanted.storage_type))
    return array.cast(wanted)


def plain_table(table: pa.Table) -> pa.Table:
    """Return ``table`` in plain form; columns that are plain already are not copied."""
    schema = plain_schema(table.schema)
    if len(set(schema.names)) < len(schema.names):
        twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
        raise DataError(
            f"A table has several columns named {twice[0]!r}, and a row can have only one. Rename or drop the others."
        )
    columns = [
        pa.chunked_array([as_type(chunk, field.type) for chunk in column.chunks], type=field.type)
        for column, field in zip(table.columns, schema, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=schema)


# --------------------------------------------------------------------------- batches


def one_batch(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return the rows of all ``batches``, at least one, in one."""
    if len(batches) == 1:
        return batches[0]
    merged = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return merged[0] if merged else batches[0]


def moderate(batches: Iterable[pa.RecordBatch], *, most: int, each: int) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in one batch if they are up to ``most`` bytes together, else in batches of about ``each``.

    Holds at most ``most`` bytes and one batch of those given.
    """
    held: list[pa.RecordBatch] = []
    size, limit = 0, most
    for batch in batches:
        if batch.num_rows == 0:
            continue
        held.append(batch)
        size += batch.nbytes
        if size > limit:
            yield one_batch(held)
            held, size, limit = [], 0, each
    if held:
        yield one_batch(held)


def with_rows_only(rows: int) -> pa.RecordBatch:
    """Return a batch of so many rows without columns."""
    nothing: Any = pa.array([{}] * rows, pa.struct([]))
    return pa.RecordBatch.from_struct_array(nothing)


# --------------------------------------------------------------------------- columns by name


def checked_columns(columns: Sequence[str], there: Sequence[str], where: str) -> None:
    """Raise :class:`DataError` for a name that is not ``there``, with similar names."""
    for name in columns:
        if name not in there:
            raise DataError(no_such_column(name, there, where))
    if len(set(columns)) < len(columns):
        twice = next(name for name in columns if list(columns).count(name) > 1)
        raise DataError(f"The column {shown(twice)} is selected twice. Name each column once.")


def no_such_column(name: object, there: Sequence[str], where: str) -> str:
    """Return the message for a column that ``where`` does not have."""
    import difflib

    near = difflib.get_close_matches(str(name)[:200], there, n=3)
    meant = f" Did you mean {' or '.join(map(shown, near))}?" if near else ""
    listed = ", ".join(map(shown, there[:30])) + (", ..." if len(there) > 30 else "")
    return f"There is no column {shown(name)} in {where}.{meant} Its columns are: {listed or 'none'}."
