"""Rows as Arrow tables of one schema, for files: the first rows fix the types, and later rows are converted.

Within a dataset lists of equal length are arrays, whatever Arrow type they had in the file, and results of functions
have no declared type at all. Files need both fixed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from powertrain.data.plan.plan import Inspected, Plan
from powertrain.data.sources.base import ARRAYS, IMAGES, PYTHON_FLOATS
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.rows.rows import Rows

#: Rows are turned into tables in batches of about this many bytes.
_BATCH_BYTES = 8 * 2**20
_MOST_BATCH_ROWS = 8192


def batch_rows(inspected: Inspected) -> int:
    """Return the number of rows to handle at a time. It follows from the dataset alone, so that every reader of a
    shuffled one gets its rows in the same order."""
    rows = nbytes = together = 0
    for part in inspected.plan.parts:
        for block in part.source.inspect().blocks:
            rows, nbytes = rows + block.rows, nbytes + block.nbytes
        # Rows that a function computes together are in memory together anyway.
        together = max(together, *(operation.batch_size or 0 for operation in part.operations), 0)
    fitting = int(_BATCH_BYTES * rows / nbytes) if nbytes else _MOST_BATCH_ROWS
    return max(1, min(fitting, _MOST_BATCH_ROWS), together)


def table_of(rows: Rows) -> pa.Table:
    """Return one table, whose columns keep the mark of Python floats."""
    from powertrain.data.rows.formats import to_arrow

    table = to_arrow(rows)
    for name in rows.python_floats & set(table.column_names):
        place = table.schema.get_field_index(name)
        field = table.schema.field(place)
        marks: Any = {**(field.metadata or {}), PYTHON_FLOATS[0]: PYTHON_FLOATS[1]}
        table = table.set_column(place, field.with_metadata(marks), table.column(place))
    return table


# --------------------------------------------------------------------------- one schema


def declared_schema(plan: Plan) -> pa.Schema | None:
    """Return the schema of a plan without operations; None where functions determine it.

    Raises :class:`DataError` where sources that were put together have no common one.
    """
    if any(part.operations for part in plan.parts):
        return None
    schema = functools.reduce(widened, [part.source.inspect().schema for part in plan.parts])
    # Encoded images are decoded on the way to the reader.
    return None if any(IMAGES in (field.metadata or {}) for field in schema) else schema


def schema_to_write(plan: Plan, first: pa.Schema) -> pa.Schema:
    """Return the types to write, given the first rows: as declared, or those of the rows, with lists of any length
    for lists of equal length."""
    declared = declared_schema(plan)
    if declared is not None and set(declared.names) == set(first.names):
        return declared
    source = plan.parts[0].source.inspect().schema
    return pa.schema([_field_to_write(field, source) for field in first])


def _field_to_write(field: Any, source: pa.Schema) -> Any:
    if not _is_list(field.type):
        return field
    place = source.get_field_index(field.name)
    stored = source.field(place).type if place >= 0 else None
    if stored is not None and _is_list(stored) and _open_lists(stored) == _open_lists(field.type):
        return field.with_type(stored)
    if _depth(field.type) != 1:
        return field
    opened = _open_lists(field.type)
    return pa.field(field.name, opened, metadata=_marks(field, opened) or None)


def conformed(table: pa.Table, schema: pa.Schema, advice: str) -> pa.Table:
    """Return the table with the columns and types of ``schema``; raises :class:`DataError` where it has others."""
    if table.schema.equals(schema, check_metadata=True):
        return table
    if set(table.column_names) != set(schema.names):
        raise DataError(
            f"Some rows have the columns {sorted(schema.names)} and others {sorted(table.column_names)}. Let every "
            "row have the same columns; a value that is missing can be None."
        )
    columns = []
    for field in schema:
        column = table.column(field.name)
        try:
            columns.append(as_type(column, field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise DataError(
                f"The column {field.name!r} has the type {field.type} in some rows and {column.type} in others, and "
                f"the latter cannot be made to fit ({error}). {advice}"
            ) from error
    return pa.table(columns, schema=schema)


def as_type(column: Any, kind: Any) -> Any:
    """Return the same values in another type; raises Arrow's own errors where they do not fit."""
    if column.type == kind:
        return column
    chunks = [_cast(chunk, kind) for chunk in column.chunks]
    return pa.chunked_array(chunks, type=kind)


def _cast(array: Any, kind: Any) -> Any:
    if _is_list(kind) and _is_list(array.type):
        array = as_lists(array)
        if isinstance(kind, pa.FixedShapeTensorType):
            return pa.ExtensionArray.from_storage(kind, _flat(array, kind))
    return array.cast(kind)


def _flat(array: Any, kind: Any) -> Any:
    """Return nested lists as the storage of a tensor; refuses lists of another shape."""
    for size in kind.shape:
        fixed = array.cast(pa.list_(array.type.value_type, size))
        array = fixed.flatten()
    return pa.FixedSizeListArray.from_arrays(array.cast(kind.value_type), int(np.prod(kind.shape)))


def widened(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return a schema that fits rows of both; raises :class:`DataError` where none does."""
    if one.equals(other, check_metadata=True):
        return one
    if set(one.names) != set(other.names):
        raise DataError(
            f"Some rows have the columns {sorted(one.names)} and others {sorted(other.names)}. Let every row have the "
            "same columns; a value that is missing can be None."
        )
    return pa.schema([_widened_field(field, other.field(field.name)) for field in one])


def _widened_field(one: Any, other: Any) -> Any:
    try:
        kind = _widened_type(one.type, other.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(
            f"The column {one.name!r} has the type {one.type} in some rows and {other.type} in others, and there is "
            "no type for both. Convert it to one type with map() or map_batches() first."
        ) from error
    if pa.types.is_null(one.type):
        return other.with_type(kind)
    if pa.types.is_null(other.type):
        return one.with_type(kind)
    marks = dict(_marks(one, kind).items() & _marks(other, kind).items())
    return pa.field(one.name, kind, metadata=marks or None)


def _marks(field: Any, kind: Any) -> dict[bytes, bytes]:
    """Return the marks of a field converted to the type ``kind``: rows of tensors stay arrays as lists."""
    marks = dict(field.metadata or {})
    if isinstance(field.type, pa.FixedShapeTensorType) and not isinstance(kind, pa.FixedShapeTensorType):
        marks.update([ARRAYS])
    return marks


def _widened_type(one: Any, other: Any) -> Any:
    if one == other:
        return one
    if _is_list(one) and _is_list(other):
        left, right = _open_lists(one), _open_lists(other)
        return pa.list_(_widened_type(left.value_type, right.value_type))
    both = [pa.schema([("column", kind)]) for kind in (one, other)]
    return pa.unify_schemas(both, promote_options="permissive").field(0).type


# --------------------------------------------------------------------------- lists and tensors


def _is_list(kind: Any) -> bool:
    return (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or isinstance(kind, pa.FixedShapeTensorType)
    )


def _depth(kind: Any) -> int:
    """Return the nesting depth of a list type."""
    kind = _open_lists(kind)
    return 1 + _depth(kind.value_type) if _is_list(kind) else 0


def _open_lists(kind: Any) -> Any:
    """Return the type of the same values as lists of any length."""
    if isinstance(kind, pa.FixedShapeTensorType):
        opened = kind.value_type
        for _ in kind.shape:
            opened = pa.list_(opened)
        return opened
    return pa.list_(_open_lists(kind.value_type)) if _is_list(kind) else kind


def as_lists(array: Any) -> Any:
    """Return the same values as lists of any length."""
    kind = array.type
    if not isinstance(kind, pa.FixedShapeTensorType):
        return array.cast(_open_lists(kind))
    values = array.storage.flatten()
    for depth, size in reversed(list(enumerate(kind.shape))):
        lists = len(array) * math.prod(kind.shape[:depth])
        offsets: Any = pa.array(np.arange(lists + 1, dtype=np.int32) * size)
        values = pa.ListArray.from_arrays(offsets, values)
    return values


# --------------------------------------------------------------------------- pieces


def _joined(tables: list[pa.Table]) -> pa.Table:
    """Return all rows in one table, of a type that fits all of them."""
    schema = functools.reduce(widened, [table.schema for table in tables])
    return pa.concat_tables([conformed(table, schema, "") for table in tables])


def pieces_by_bytes(
    tables: Iterable[pa.Table], nbytes: int, *, fewest: int = 0, most: int | None = None
) -> Iterator[pa.Table]:
    """Yield the same rows in tables of about ``nbytes`` each, of ``fewest`` (but for the last) to ``most`` rows."""
    waiting: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        waiting, rows, size = [*waiting, table], rows + table.num_rows, size + table.nbytes
        while rows and ((size >= nbytes and rows >= fewest) or (most is not None and rows >= most)):
            whole = _joined(waiting)
            cut = rows if most is None else min(rows, most)
            yield whole.slice(0, cut)
            waiting, rows = ([whole.slice(cut)] if cut < rows else []), rows - cut
            size = sum(left.nbytes for left in waiting)
    if rows:
        yield _joined(waiting)


def first_rows(tables: Iterable[pa.Table], count: int) -> Iterator[pa.Table]:
    """Yield the first ``count`` rows, without requesting more."""
    left = count
    for table in tables:
        if left <= 0:
            return
        yield table.slice(0, left)
        left -= table.num_rows
        if left <= 0:
            return


def pieces_by_rows(tables: Iterable[pa.Table], sizes: Iterable[int]) -> Iterator[pa.Table]:
    """Yield the same rows in tables of exactly these sizes, which add up to all of them."""
    following = iter(tables)
    whole: Any = None
    for size in sizes:
        waiting = [] if whole is None else [whole]
        rows = sum(table.num_rows for table in waiting)
        while rows < size or not waiting:
            table = next(following)
            waiting.append(table)
            rows += table.num_rows
        together = _joined(waiting)
        yield together.slice(0, size)
        whole = together.slice(size)
