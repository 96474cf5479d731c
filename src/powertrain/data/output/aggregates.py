"""Aggregates of columns, computed in one pass over the rows and in constant memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from powertrain.errors import DataError

_pt = pa.types


class ColumnAggregate:
    """Count, nulls, sum, extremes, mean and spread of one column; NaN counts as null, as in Ray Data."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = self.nulls = self.zeros = 0
        self.total: Any = None
        self.least: Any = None
        self.most: Any = None
        self.mean = self._spread = 0.0
        self.kind: pa.DataType | None = None

    def add(self, values: Any) -> None:
        """Add the next values, an Arrow array."""
        self.kind = values.type
        known = values.drop_null()
        if _pt.is_floating(known.type):
            known = known.filter(pc.invert(pc.is_nan(known)))
        self.nulls += len(values) - len(known)
        if not len(known):
            return
        if _pt.is_boolean(known.type):
            known = known.cast(pa.int8())
        if is_number(known.type):
            self._add_numbers(known)
        if not _pt.is_nested(known.type) and not isinstance(known.type, pa.BaseExtensionType):
            found = pc.min_max(known)
            least, most = found["min"].as_py(), found["max"].as_py()
            self.least = least if self.least is None else min(self.least, least)
            self.most = most if self.most is None else max(self.most, most)
        self.count += len(known)

    def _add_numbers(self, known: Any) -> None:
        # Each piece is far below the limit of 64 bits; Python's whole numbers have none.
        piece = pc.sum(known).as_py() if not _pt.is_integer(known.type) else _whole_sum(known)
        self.total = piece if self.total is None else self.total + piece
        self.zeros += int(pc.sum(pc.equal(known, pa.scalar(0, known.type))).as_py() or 0)
        numbers = known.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        # Means and spreads of pieces are merged as Chan, Golub and LeVeque do, which loses no digits.
        mean, spread = float(numbers.mean()), float(((numbers - numbers.mean()) ** 2).sum())
        count = self.count + len(numbers)
        apart = mean - self.mean
        self._spread += spread + apart**2 * self.count * len(numbers) / count
        self.mean += apart * len(numbers) / count

    def std(self, ddof: int) -> float | None:
        """Return the standard deviation; None for too few values."""
        return math.sqrt(self._spread / (self.count - ddof)) if self.count > ddof else None


def _whole_sum(known: Any) -> int:
    values = known.cast(pa.int64(), safe=False) if not _pt.is_uint64(known.type) else known
    numbers = values.to_numpy(zero_copy_only=False)
    # The halves of 64 bits are added apart: neither sum can overflow.
    high, low = numbers >> 32, numbers & 0xFFFFFFFF
    return (int(high.sum()) << 32) + int(low.sum(dtype=np.uint64))


def is_number(kind: pa.DataType) -> bool:
    """Return whether sums and means of this type exist."""
    return _pt.is_integer(kind) or _pt.is_floating(kind) or _pt.is_decimal(kind)


def aggregate_columns(tables: Iterable[pa.Table], columns: Sequence[str]) -> dict[str, ColumnAggregate]:
    """Return the aggregates of some columns of all tables."""
    found = {name: ColumnAggregate(name) for name in columns}
    for table in tables:
        for name, aggregate in found.items():
            for chunk in table.column(name).chunks:
                aggregate.add(chunk)
    return found


def check_numbers(method: str, aggregate: ColumnAggregate) -> None:
    """Raise :class:`DataError` for a column without numbers."""
    kind = aggregate.kind
    if kind is not None and not is_number(kind) and not _pt.is_boolean(kind) and not _pt.is_null(kind):
        raise DataError(
            f"{method}({aggregate.name!r}) cannot be computed: the column has the type {kind}. Name one of numbers."
        )


def unique_values(tables: Iterable[pa.Table], column: str, ignore_nulls: bool) -> list[Any]:
    """Return the different values of a column, in the order of their first rows."""
    seen: dict[Any, None] = {}
    for table in tables:
        for chunk in table.column(column).chunks:
            try:
                different = pc.unique(chunk)
            except pa.ArrowNotImplementedError as error:
                raise DataError(
                    f"unique({column!r}) cannot compare values of the type {chunk.type}. Name a column of numbers, "
                    "text or times."
                ) from error
            seen.update(dict.fromkeys(different.to_pylist()))
    found = list(seen)
    nans = [value for value in found if isinstance(value, float) and math.isnan(value)]
    if len(nans) > 1:  # each piece has its own, and they do not equal each other
        found = [value for value in found if not (isinstance(value, float) and math.isnan(value))] + nans[:1]
    return [value for value in found if value is not None] if ignore_nulls else found
