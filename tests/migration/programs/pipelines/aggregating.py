"""Aggregates of whole columns: single ones, several at once, missing values."""

import ray.data
from ray.data.aggregate import (
    AbsMax,
    AsList,
    Count,
    CountDistinct,
    Max,
    Mean,
    Min,
    Quantile,
    Std,
    Sum,
    Unique,
)

numbers = ray.data.range(100)
assert numbers.sum("id") == 4950
assert numbers.min("id") == 0
assert numbers.max(["id"]) == 99
assert numbers.mean("id") == 49.5
assert abs(numbers.std("id") - 29.011491975882016) < 1e-9

rows = ray.data.from_items(
    [{"x": 1, "y": -4.0, "s": "a"}, {"x": 3, "y": 2.0, "s": "b"}, {"x": None, "y": 6.0, "s": "a"}]
)
assert rows.sum(["x", "y"]) == {"sum(x)": 4, "sum(y)": 4.0}
assert rows.aggregate(
    Count(), Sum("x"), Mean("x"), Min("y"), Max("y"), AbsMax("y"), Std("y", ddof=0), Quantile("y", q=0.5)
) == {
    "count()": 3, "sum(x)": 4, "mean(x)": 2.0, "min(y)": -4.0, "max(y)": 6.0, "abs_max(y)": 6.0,
    "std(y)": rows.aggregate(Std("y", ddof=0, alias_name="again"))["again"], "quantile(y)": 2.0,
}  # fmt: skip
assert rows.aggregate(Sum("x", ignore_nulls=False)) == {"sum(x)": None}
assert rows.aggregate(Count("x", ignore_nulls=True, alias_name="known")) == {"known": 2}
found = rows.aggregate(Unique("s"), CountDistinct("s"), AsList("y"))
assert sorted(found["unique(s)"]) == ["a", "b"]
assert found["count_distinct(s)"] == 2
assert sorted(found["list(y)"]) == [-4.0, 2.0, 6.0]
assert sorted(rows.unique("s")) == ["a", "b"]
