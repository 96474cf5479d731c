"""Aggregations of columns, for :meth:`Dataset.aggregate` and :meth:`GroupedData.aggregate`."""

from __future__ import annotations

from powertrain.data.aggregate.counting import ApproximateTopK, ValueCounter
from powertrain.data.aggregate.functions import AggregateFn, AggregateFnV2
from powertrain.data.aggregate.standard import (
    AbsMax,
    ApproximateQuantile,
    AsList,
    Count,
    CountDistinct,
    Max,
    Mean,
    Min,
    MissingValuePercentage,
    Quantile,
    Std,
    Sum,
    Unique,
    ZeroPercentage,
)

__all__ = [
    "AbsMax",
    "AggregateFn",
    "AggregateFnV2",
    "ApproximateQuantile",
    "ApproximateTopK",
    "AsList",
    "Count",
    "CountDistinct",
    "Max",
    "Mean",
    "Min",
    "MissingValuePercentage",
    "Quantile",
    "Std",
    "Sum",
    "Unique",
    "ValueCounter",
    "ZeroPercentage",
]
