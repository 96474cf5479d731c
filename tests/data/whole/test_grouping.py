"""Groups and aggregates: the numbers of pandas, in the order of the keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

from powertrain import data
from powertrain.data.aggregate import (
    AbsMax,
    AggregateFn,
    AggregateFnV2,
    ApproximateQuantile,
    ApproximateTopK,
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
    ValueCounter,
    ZeroPercentage,
)
from powertrain.errors import DataError

ROWS = st.lists(
    st.tuples(
        st.one_of(st.none(), st.integers(0, 4)),
        st.one_of(st.none(), st.just(math.nan), st.floats(-1e6, 1e6, width=32)),
    ),
    min_size=1,
    max_size=40,
)


def dataset_of(rows: list[tuple[int | None, float | None]]) -> data.Dataset:
    table = pa.table(
        {"k": pa.array([k for k, _ in rows], pa.int64()), "x": pa.array([x for _, x in rows], pa.float64())}
    )
    return data.from_arrow(table)


def same(found: Any, expected: Any) -> bool:
    if expected is None or (isinstance(expected, float) and math.isnan(expected)):
        return found is None
    return found == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=scaled(20))
@given(rows=ROWS, ddof=st.integers(0, 2))
def test_aggregates_of_groups_are_those_of_pandas(
    rows: list[tuple[int | None, float | None]], ddof: int
) -> None:
    aggregations = [
        Count(), Count("x", ignore_nulls=True, alias_name="known"), Sum("x"), Min("x"), Max("x"), Mean("x"),
        Std("x", ddof=ddof), Quantile("x", q=0.3), AbsMax("x"),
    ]  # fmt: skip
    found = dataset_of(rows).groupby("k").aggregate(*aggregations).take_all()
    frame = pd.DataFrame(rows, columns=["k", "x"]).astype({"k": "Int64", "x": float})
    groups = frame.groupby("k", dropna=False)["x"]
    keys: list[Any] = sorted(groups.groups, key=lambda key: (key is pd.NA, 0 if key is pd.NA else key))
    assert [row["k"] for row in found] == [None if pd.isna(key) else key for key in keys]
    for row, key in zip(found, keys, strict=True):
        values = frame["x"][frame["k"].isna() if pd.isna(key) else (frame["k"] == key).fillna(False)]
        known = values.dropna()
        assert row["count()"] == len(values)
        assert row["known"] == len(known)
        assert same(row["sum(x)"], known.sum() if len(known) else None)
        assert same(row["min(x)"], known.min())
        assert same(row["max(x)"], known.max())
        assert same(row["mean(x)"], known.mean())
        assert same(row["abs_max(x)"], known.abs().max())
        assert same(row["quantile(x)"], known.quantile(0.3))
        spread = (
            math.sqrt(((known - known.mean()) ** 2).sum() / (len(known) - ddof))
            if len(known) > ddof
            else None
        )
        assert row["std(x)"] == (None if spread is None else pytest.approx(spread, rel=1e-6, abs=1e-4))


def test_a_null_makes_the_result_null_where_it_is_not_to_be_ignored() -> None:
    dataset = data.from_items([{"k": 1, "x": 1.0}, {"k": 1, "x": None}, {"k": 2, "x": 3.0}])
    for method in ("sum", "min", "max", "mean"):
        found = getattr(dataset.groupby("k"), method)("x", ignore_nulls=False).take_all()
        assert [row[f"{method}(x)"] for row in found] == [None, 3.0]
    assert dataset.aggregate(Sum("x", ignore_nulls=False)) == {"sum(x)": None}
    assert dataset.groupby("k").std("x", ddof=0).take_all() == [
        {"k": 1, "std(x)": 0.0},
        {"k": 2, "std(x)": 0.0},
    ]


def test_lists_values_and_shares_of_groups() -> None:
    rows = [("a", 0.0, "x"), ("b", 2.0, None), ("a", 3.0, "y"), ("a", None, "x"), ("b", 0.0, "z")]
    dataset = data.from_items([{"k": k, "n": n, "s": s} for k, n, s in rows])
    found = dataset.groupby("k").aggregate(
        AsList("n"),
        AsList("n", ignore_nulls=True, alias_name="known"),
        Unique("s"),
        Unique("s", ignore_nulls=True, alias_name="words"),
        CountDistinct("s"),
        CountDistinct("s", ignore_nulls=False, alias_name="with null"),
        MissingValuePercentage("n"),
        ZeroPercentage("n"),
        ZeroPercentage("n", ignore_nulls=False, alias_name="of all"),
        ApproximateQuantile("n", quantiles=[0.0, 1.0]),
        ValueCounter("s"),
        ApproximateTopK("s", 1),
    )
    first, second = found.take_all()
    assert first.pop("missing_pct(n)") == first.pop("of all") == pytest.approx(100 / 3)
    assert first == {
        "k": "a",
        "list(n)": [0.0, 3.0, None],
        "known": [0.0, 3.0],
        "unique(s)": ["x", "y"],
        "words": ["x", "y"],
        "count_distinct(s)": 2,
        "with null": 2,
        "zero_pct(n)": 50.0,
        "approx_quantile(n)": [0.0, 3.0],
        "value_counter(s)": {"values": ["x", "y"], "counts": [2, 1]},
        "approx_topk(s)": [{"s": "x", "count": 2}],
    }
    assert second["unique(s)"] == ["z", None]
    assert second["words"] == ["z"]
    assert (second["count_distinct(s)"], second["with null"]) == (1, 2)
    lists = data.from_items([{"v": [1, 2]}, {"v": [2, 3]}])
    assert lists.aggregate(Unique("v", encode_lists=True)) == {"unique(v)": [1, 2, 3]}
    assert lists.aggregate(ApproximateTopK("v", 1, encode_lists=True)) == {
        "approx_topk(v)": [{"v": 2, "count": 2}]
    }


def test_several_keys_whole_numbers_and_booleans() -> None:
    frame = pd.DataFrame(
        {
            "a": [1, 1, 2, 2, 1],
            "b": list("xyxyx"),
            "n": [2**62, 1, 2, 3, 2**61],
            "t": [True, False] * 2 + [True],
        }
    )
    found = data.from_pandas(frame).groupby(["a", "b"]).sum(["n", "t"]).to_pandas()
    expected = frame.groupby(["a", "b"], as_index=False).agg({"n": "sum", "t": "sum"})
    assert found.to_numpy().tolist() == expected.to_numpy().tolist()
    assert data.from_pandas(frame[["a", "n"]]).groupby("a").max().columns() == ["a", "max(n)"]
    assert data.from_pandas(frame).groupby(None).count().take_all() == [{"count()": 5}]


def test_functions_of_the_user_aggregate_rows_blocks_and_classes() -> None:
    class Product(AggregateFnV2[int, str]):
        def __init__(self, on: str) -> None:
            super().__init__(f"product({on})", lambda: 1, on=on, ignore_nulls=True)

        def aggregate_block(self, block: Any) -> int:
            return math.prod(block.column(str(self.get_target_column())).to_pylist())

        def combine(self, current_accumulator: int, new: int) -> int:
            return current_accumulator * new

        def finalize(self, accumulator: int) -> str:
            return str(accumulator)

    longest = AggregateFn(
        init=lambda key: 0, accumulate_row=lambda most, row: max(most, row["n"]), merge=max, name="most"
    )
    total = AggregateFn(
        init=lambda key: (key, 0),
        accumulate_block=lambda sum_, table: (sum_[0], sum_[1] + sum(table.column("n").to_pylist())),
        merge=lambda one, other: (one[0], one[1] + other[1]),
        name="total",
        finalize=lambda sum_: f"{sum_[0]}: {sum_[1]}",
    )
    dataset = data.from_items([{"k": number % 2, "n": number} for number in range(1, 6)])
    aggregations = (longest, Sum("n"), total, Product("n"))
    assert dataset.aggregate(*aggregations) == {
        "most": 5,
        "sum(n)": 15,
        "total": "None: 15",
        "product(n)": "120",
    }
    assert dataset.groupby("k").aggregate(*aggregations).take_all() == [
        {"k": 0, "most": 4, "sum(n)": 6, "total": "0: 6", "product(n)": "8"},
        {"k": 1, "most": 5, "sum(n)": 9, "total": "1: 9", "product(n)": "15"},
    ]


@pytest.mark.parametrize("concurrency", [None, 2])
def test_a_function_gets_whole_groups_in_the_order_of_their_keys(concurrency: int | None) -> None:
    generator = np.random.default_rng(1)
    frame = pd.DataFrame({"k": generator.integers(0, 50, 2000), "x": generator.random(2000)})

    def centred(rows: pd.DataFrame) -> pd.DataFrame:
        return rows.assign(x=rows["x"] - rows["x"].mean(), size=len(rows))

    found = (
        data.from_pandas(frame)
        .groupby("k")
        .map_groups(centred, batch_format="pandas", concurrency=concurrency)
    )
    expected = frame.assign(
        x=frame["x"] - frame.groupby("k")["x"].transform("mean"),
        size=frame.groupby("k")["x"].transform("size"),
    ).sort_values("k", kind="stable")
    rows = found.to_pandas()
    assert rows["k"].tolist() == expected["k"].tolist()
    assert rows["size"].tolist() == expected["size"].tolist()
    np.testing.assert_allclose(rows["x"], expected["x"])
    assert found.count() == 2000


def test_groups_larger_than_a_block_stay_whole() -> None:
    dataset = data.range(600_000).map_batches(lambda batch: {"k": batch["id"] // 300_000, "id": batch["id"]})
    found = dataset.groupby("k").map_groups(
        lambda rows: {"k": rows["k"][:1], "rows": np.array([len(rows["id"])])}
    )
    assert found.take_all() == [{"k": 0, "rows": 300_000}, {"k": 1, "rows": 300_000}]


def test_a_class_is_made_once_and_one_group_is_all_rows() -> None:
    class Numbering:
        def __init__(self, first: int) -> None:
            self.next = first

        def __call__(self, rows: dict[str, Any], step: int) -> Any:
            self.next += step
            yield {"number": np.array([self.next]), "rows": np.array([len(rows["x"])])}

    dataset = data.from_items([{"x": number % 3} for number in range(9)])
    found = dataset.groupby("x").map_groups(Numbering, fn_constructor_args=[10], fn_args=[5])
    assert [row["number"] for row in found.take_all()] == [15, 20, 25]
    whole = dataset.groupby(None).map_groups(lambda rows: {"rows": np.array([len(rows["x"])])})
    assert whole.take_all() == [{"rows": 9}]


def test_a_column_is_added_to_sorted_groups() -> None:
    from powertrain.data.expressions import col

    dataset = data.from_items([{"k": 2, "x": 1}, {"k": 1, "x": 2}])
    assert dataset.groupby("k").with_column("y", col("x") * 2).take_all() == [
        {"k": 1, "x": 2, "y": 4},
        {"k": 2, "x": 1, "y": 2},
    ]


def test_wrong_arguments_are_errors_that_name_them() -> None:
    dataset = data.from_items([{"k": 1, "s": "a", "t": np.zeros((2, 2))}])
    with pytest.raises(DataError, match="There is no column 'y' in groupby"):
        dataset.groupby("y").count().count()
    with pytest.raises(DataError, match=r"mean\(s\) cannot be computed: the column 's' has the type string"):
        dataset.groupby("k").mean("s").count()
    with pytest.raises(DataError, match=r"count\(t\) cannot be computed"):
        dataset.aggregate(Count("t"))
    with pytest.raises(DataError, match="takes aggregations, and got 'x'"):
        dataset.aggregate("x")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="was given no aggregation"):
        dataset.groupby("k").aggregate()
    with pytest.raises(DataError, match=r"Several results would be named \['count\(\)'\]"):
        dataset.aggregate(Count(), Count())
    with pytest.raises(DataError, match=r"Sum\(\) needs the name of a column"):
        dataset.aggregate(Sum())
    with pytest.raises(DataError, match="q=2 must be a number from 0 to 1"):
        Quantile("k", q=2)
    with pytest.raises(DataError, match="takes one of accumulate_row and accumulate_block"):
        AggregateFn(init=lambda key: 0, merge=max, name="x")
    with pytest.raises(DataError, match=r"map_groups.*failed"):
        dataset.groupby("k").map_groups(lambda rows: 1 / 0).count()
    with pytest.raises(DataError, match="no column to aggregate beside the keys"):
        dataset.select_columns(["k"]).groupby("k").sum()


def test_a_sum_that_64_bits_cannot_hold_is_an_error_and_not_another_number() -> None:
    dataset = data.from_items([{"k": 1, "x": 2**62}] * 4)
    with pytest.raises(DataError, match=r"groupby\(\).aggregate\(\) failed in DuckDB"):
        dataset.groupby("k").sum("x").count()
