"""Validation of decoded columns of a metrics segment.

Bytes that match their hash were written by some segment writer, but possibly not this one. Bytes without a hash may be
damaged, so Arrow validates each value of them before any other use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from powertrain.run.metrics.arrays import numpy_of
from powertrain.run.metrics.points import OWN_COLUMNS, is_json, own_type, values_of
from powertrain.run.metrics.summary import PLACE
from powertrain.storage.sealed import DamagedError

if TYPE_CHECKING:
    import pyarrow as pa

_PLACE_PARTS = ("batch", "attempt", "rank", "first", "last")
_VALUE_PARTS = ("low", "high", "last", "count")


def check_schema(schema: pa.Schema) -> None:
    """Raise :class:`DamagedError` for columns that the points of a run cannot have."""
    import pyarrow as pa

    if len({*schema.names}) != len(schema):
        raise DamagedError("two of its columns have the same name")
    for name in OWN_COLUMNS:
        if name not in schema.names or schema.field(name).type != own_type(name):
            raise DamagedError(f"its column {name!r} is missing or of another type")
    kinds = {pa.float64(), pa.int64(), pa.bool_(), pa.string()}
    for field in schema:
        if field.name not in OWN_COLUMNS and field.type not in kinds:
            raise DamagedError(f"its column {field.name!r} is of another type than metrics are")


def check_batch(batch: pa.RecordBatch, is_hashed: bool) -> None:
    """Raise :class:`DamagedError` for a decoded batch with values that the points of a run cannot have."""
    try:
        batch.validate(full=True)
    except (ValueError, TypeError) as error:
        raise DamagedError(f"a batch does not hold together: {error}") from error
    for name in {*OWN_COLUMNS} & {*batch.schema.names}:
        if batch.column(name).null_count:
            raise DamagedError(f"its column {name!r} has missing values")
    if not is_hashed:
        for name in {"attempt", "rank", "row"} & {*batch.schema.names}:
            _check_not_negative(name, batch.column(name))
        for field, column in zip(batch.schema, batch.columns, strict=True):
            if is_json(field):
                values_of(column, field)


def check_summary(table: pa.Table, columns: Sequence[str], batches: int) -> None:
    """Raise :class:`DamagedError` for a summary that cannot belong to a segment with this many batches.

    ``columns`` are the requested ones.

    ``columns`` are the requested ones.
    """
    import pyarrow as pa

    if PLACE in columns and PLACE not in table.column_names:
        raise DamagedError("its summary has no places")
    for field in table.schema:
        wanted = _PLACE_PARTS if field.name == PLACE else _VALUE_PARTS
        found = [part.name for part in field.type] if pa.types.is_struct(field.type) else []
        if found != [*wanted]:
            raise DamagedError(f"the column {field.name!r} of its summary is of another form")
        if not all(pa.types.is_integer(part.type) or pa.types.is_float64(part.type) for part in field.type):
            raise DamagedError(f"the column {field.name!r} of its summary is of another type")
    try:
        table.validate()  # for numbers, its only content, as good as the full and slower check
    except (ValueError, TypeError) as error:
        raise DamagedError(f"its summary does not hold together: {error}") from error
    if PLACE in table.column_names and table.num_rows:
        places: Any = table.column(PLACE).combine_chunks()
        if places.null_count or any(part.null_count for part in places.flatten()):
            raise DamagedError("its summary has missing places")
        for name in ("attempt", "rank", "first", "last"):
            _check_not_negative(name, places.field(name))
        numbers = numpy_of(places.field("batch"))
        if numbers.min() < 0 or numbers.max() >= batches:
            raise DamagedError("its summary is of batches that it does not have")


def _check_not_negative(name: str, column: pa.Array[Any]) -> None:
    numbers = numpy_of(column)
    if len(numbers) and numbers.min() < 0:
        raise DamagedError(f"a point has {int(numbers.min())} as its {name}")
