"""Summaries of stretches of rows of a batch, so that a view need not read the points themselves. Pure.

A stretch is the part of a batch that belongs to one attempt, one rank and :data:`STRETCH_ROWS` neighbouring rows. A
summary has one line per stretch: its position, and for each numeric metric the smallest, the largest, the last value
and their number; for the time likewise. Solo reports have no row and so no stretch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from powertrain.run.metrics.arrays import array_of_numpy, numpy_of, validity_of
from powertrain.run.metrics.points import MISSING, MORE, OWN_COLUMNS, is_json, values_of

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    Array = NDArray[Any]

#: Stretches begin at multiples of this.
STRETCH_ROWS = 64
#: The column of a summary with the position of a stretch. No metric has this name.
PLACE = "\\stretch"


class Numbers(NamedTuple):
    """A column as floats, with a mask of its numbers: NaN is one, missing values and other types are not."""

    values: NDArray[np.float64]
    present: NDArray[np.bool_]


def numbers_of(column: pa.Array[Any], field: pa.Field[Any]) -> Numbers | None:
    """Return the numbers of a metric's column; None if its type has none. Booleans and text are not numbers."""
    import numpy as np
    import pyarrow as pa

    if field.type == pa.float64() or field.type == pa.int64():
        present = validity_of(column)
        return Numbers(np.where(present, numpy_of(column), np.nan), present)
    return numbers_among(values_of(column, field)) if is_json(field) else None


def numbers_at(column: pa.Array[Any], field: pa.Field[Any], positions: NDArray[Any]) -> Numbers | None:
    """Return the numbers of a metric's column at these positions; None if its type has none."""
    if is_json(field):  # its text is decoded only where it is needed
        return numbers_of(column.take(array_of_numpy(positions)), field)
    found = numbers_of(column, field)
    return None if found is None else Numbers(found.values[positions], found.present[positions])


def numbers_among(values: list[Any]) -> Numbers:
    """Return the numbers among the values."""
    import numpy as np

    kinds = {int, float}
    present = np.fromiter((type(value) in kinds for value in values), bool, len(values))
    floats = (value if type(value) in kinds else np.nan for value in values)
    return Numbers(np.fromiter(floats, np.float64, len(values)), present)


def numbers_in_more(column: pa.Array[Any], field: pa.Field[Any], name: str) -> Numbers:
    """Return the numbers of a metric that has no column of its own, from the column :data:`MORE`."""
    beyond = values_of(column, field)
    return numbers_among([MISSING if point is MISSING else point.get(name, MISSING) for point in beyond])


def has_numbers(column: pa.Array[Any], field: pa.Field[Any], solo: NDArray[np.bool_]) -> bool:
    """Return whether a report with a row has a number in this column."""
    numbers = numbers_of(column, field)
    return numbers is not None and bool((numbers.present & ~solo).any())


def is_metric(name: str) -> bool:
    """Return whether a column is a metric, other than the overflow column."""
    return name not in OWN_COLUMNS and name != MORE


def summary_of(batch: pa.RecordBatch, number: int) -> pa.Table:
    """Return the stretches of a batch, the ``number``-th of its segment, sorted by attempt, rank and row."""
    import numpy as np
    import pyarrow as pa

    attempt, rank, row, solo = (numpy_of(batch.column(name)) for name in ("attempt", "rank", "row", "solo"))
    order = np.lexsort((row, rank, attempt))
    order = order[~solo[order]]
    attempt, rank, row = attempt[order], rank[order], row[order]
    starts = _starts(attempt, rank, row // STRETCH_ROWS)
    ends = np.append(starts[1:], len(order)) - 1 if len(starts) else starts
    place = {
        "batch": np.full(len(starts), number, np.int32),
        "attempt": attempt[starts],
        "rank": rank[starts],
        "first": row[starts],
        "last": row[ends],
    }
    columns = {PLACE: _struct(place)}
    for name in ("at", *filter(is_metric, batch.schema.names)):
        numbers = numbers_of(batch.column(name), batch.schema.field(name))
        if numbers is not None and numbers.present[order].any():
            columns[name] = _struct(_reduced(numbers.values[order], numbers.present[order], starts))
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def _starts(*keys: Array) -> NDArray[np.int64]:
    """Return the positions where one of the keys differs from its predecessor."""
    import numpy as np

    changes = np.zeros(len(keys[0]), bool)
    changes[:1] = True
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(changes)


def _reduced(values: Array, present: Array, starts: Array) -> dict[str, Array]:
    """Return the smallest and largest (ignoring NaN), the last present value, and the count of each stretch."""
    import numpy as np

    newest = np.maximum.reduceat(np.where(present, np.arange(len(values)), -1), starts)
    values = np.where(present, values, np.nan)
    return {
        "low": np.fmin.reduceat(values, starts),
        "high": np.fmax.reduceat(values, starts),
        "last": np.where(newest >= 0, values[newest], np.nan),
        "count": np.add.reduceat(present, starts, dtype=np.int32),
    }


def _struct(parts: dict[str, Array]) -> pa.StructArray:
    import pyarrow as pa

    return pa.StructArray.from_arrays(list(map(array_of_numpy, parts.values())), names=list(parts))
