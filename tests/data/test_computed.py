"""Columns and filters computed by expressions: the values, their order, and what is refused."""

from __future__ import annotations

import datetime
import math
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from powertrain import data
from powertrain.data.aggregate import AsList, Sum
from powertrain.data.datatype import DataType
from powertrain.data.expressions import (
    col,
    download,
    lit,
    monotonically_increasing_id,
    pyarrow_udf,
    random,
    star,
    udf,
    uuid,
)
from powertrain.errors import DataError

ROWS = data.from_items(
    [
        {"x": 1, "y": 0.5, "name": " Ann ", "tokens": [3, 1], "when": datetime.datetime(2024, 1, 2, 3)},
        {"x": 2, "y": -1.5, "name": "bob", "tokens": [2], "when": datetime.datetime(2025, 6, 7, 8)},
        {"x": None, "y": 4.0, "name": None, "tokens": [], "when": None},
    ]
)


def values(expression: Any) -> list[Any]:
    return [row["v"] for row in ROWS.with_column("v", expression).take_all()]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (col("x") + 1, [2, 3, None]),
        (10 - col("x"), [9, 8, None]),
        (col("x") * col("y"), [0.5, -3.0, None]),
        (col("x") / 2, [0.5, 1.0, None]),
        (1 / col("x"), [1.0, 0.5, None]),
        (col("x") // 2, [0, 1, None]),
        (7 % col("x"), [0.0, 1.0, None]),
        (-col("y"), [-0.5, 1.5, -4.0]),
        (col("y").abs().floor(), [0.0, 1.0, 4.0]),
        (col("y").round(), [0.0, -2.0, 4.0]),
        (col("x").power(2), [1, 4, None]),
        (col("x").exp().ln().round(), [1.0, 2.0, None]),
        ((col("x") > 1) & (col("y") < 0), [False, True, False]),
        ((col("x") == 1) | col("x").is_null(), [True, False, True]),
        (~(col("x") >= 2), [True, False, None]),
        (col("x").is_in([2, 5]), [False, True, False]),
        (col("name").is_not_null(), [True, True, False]),
        (col("x").cast("float32"), [1.0, 2.0, None]),
        (col("y").cast(DataType.int64(), safe=False), [0, -1, 4]),
        (lit("z"), ["z"] * 3),
        (col("name").str.strip().str.upper(), ["ANN", "BOB", None]),
        (col("name").str.len(), [5, 3, None]),
        (col("name").str.contains("o"), [False, True, None]),
        (col("name").str.replace("b", "B"), [" Ann ", "BoB", None]),
        (col("name").str.pad(6, "*"), [" Ann *", "bob***", None]),
        (col("name") + lit("!"), [" Ann !", "bob!", None]),
        (col("tokens").list.len(), [2, 1, 0]),
        (col("tokens").list[0], [3, 2, None]),
        (col("tokens").list.sort(), [[1, 3], [2], []]),
        (col("when").dt.year(), [2024, 2025, None]),
        (col("when").dt.strftime("%m/%d"), ["01/02", "06/07", None]),
        (monotonically_increasing_id(), [0, 1, 2]),
    ],
)
def test_expressions_compute_what_they_say(expression: Any, expected: list[Any]) -> None:
    found = [value.tolist() if isinstance(value, np.ndarray) else value for value in values(expression)]
    assert found == expected


def test_structs_and_maps_have_their_parts() -> None:
    points = data.from_arrow(
        pa.table({"p": [{"a": 1, "b": 2}], "m": pa.array([[("k", 5)]], pa.map_(pa.string(), pa.int64()))})
    )
    made = points.with_columns(
        {
            "a": col("p").struct["a"],
            "b": col("p").struct[1],
            "k": col("m").map.keys(),
            "v": col("m").map.values(),
        }
    )
    assert made.select_columns(["a", "b", "k", "v"]).take_all() == [{"a": 1, "b": 2, "k": ["k"], "v": [5]}]


def test_columns_are_added_replaced_and_selected() -> None:
    made = ROWS.with_columns({"a": col("x") + 1, "b": lit(1)}).with_column("x", col("a") * 2)
    assert made.columns() == ["x", "y", "name", "tokens", "when", "a", "b"]
    assert [row["x"] for row in made.take_all()] == [4, 6, None]
    chosen = ROWS.select_columns([col("y"), (col("x") * 2).alias("twice"), "name"])
    assert chosen.columns() == ["y", "twice", "name"]
    assert ROWS.select_columns([star(), lit(0).alias("zero")]).columns()[-1] == "zero"
    assert made.select_columns(["a"]).count() == 3  # and nothing is computed for the count
    added = data.range(3).add_column("double", lambda frame: frame["id"] * 2)
    assert added.take_all() == [{"id": n, "double": 2 * n} for n in range(3)]
    for form in ("numpy", "pyarrow"):
        again = added.add_column("double", lambda batch: batch["id"], batch_format=form)
        assert again.take(1) == [{"id": 0, "double": 0}]
        assert again.count() == 3


def test_a_filter_by_an_expression_is_counted_beforehand_and_has_the_same_position() -> None:
    by_expr = data.range(100).filter(col("id") % 1 == 0).filter(expr=(col("id") > 10) & (col("id") < 20))
    assert by_expr.plan.inspected().is_exact
    assert by_expr.count() == 9
    arrow = data.range(100).filter(pc.field("id") > 5).plan.inspected().fingerprint
    assert data.range(100).filter(col("id") > 5).plan.inspected().fingerprint == arrow
    kept = data.range(1000).filter(random(seed=1) < 0.5).count()
    assert 350 < kept < 650


def test_functions_of_arrays_are_expressions() -> None:
    @udf(return_dtype=DataType.int64())
    def plus(left: Any, right: Any) -> Any:
        return pc.add(left, right)

    @pyarrow_udf(return_dtype="string")
    class Prefixed:
        def __init__(self, prefix: str) -> None:
            self.prefix = prefix

        def __call__(self, ids: Any) -> Any:
            return [f"{self.prefix}{value}" for value in ids.to_pylist()]

    @udf()
    def drawn(ids: Any, rng: np.random.Generator) -> Any:
        return rng.normal(size=len(ids))

    numbers = data.range(5)
    made = numbers.with_column("two", plus(col("id"), col("id"))).with_column(
        "name", Prefixed("n")(col("id"))
    )
    assert made.take(2) == [{"id": 0, "two": 0, "name": "n0"}, {"id": 1, "two": 2, "name": "n1"}]
    assert numbers.filter(plus(col("id"), 1) > 3).count() == 2
    noisy = numbers.random_shuffle(seed=3).with_column("n", drawn(col("id")))
    assert noisy.take_all() == noisy.take_all()
    copied = pickle.loads(cloudpickle.dumps(made))
    assert copied.take_all() == made.take_all()


def test_errors_of_functions_name_the_function_and_the_row() -> None:
    @udf("int64")
    def broken(values: Any) -> Any:
        raise ZeroDivisionError("no")

    @udf("int64")
    def short(values: Any) -> Any:
        return [1]

    with pytest.raises(
        DataError, match=r"with_column\('v'\) failed on .*begins with .*ZeroDivisionError: no"
    ):
        data.range(3).with_column("v", broken(col("id"))).take_all()
    with pytest.raises(DataError, match="returned 1 values for 3 rows"):
        data.range(3).with_column("v", short(col("id"))).take_all()
    with pytest.raises(DataError, match=r"no column 'idd'.*Did you mean 'id'"):
        data.range(3).with_column("v", col("idd") + 1).take_all()
    with pytest.raises(DataError, match="cannot compute"):
        ROWS.with_column("v", col("name") * 2).take_all()


def test_values_of_rows_are_the_same_at_any_batch_size() -> None:
    made = (
        data.range(500).with_columns({"r": random(), "u": uuid(), "s": random(seed=5)}).random_shuffle(seed=1)
    )
    by_size = [
        {
            row: value
            for batch in made.iter_batches(batch_size=size, seed=1)
            for row, value in zip(batch["id"], batch["r"], strict=True)
        }
        for size in (500, 7)
    ]
    assert by_size[0] == by_size[1]
    rows = made.take_all()
    assert 0.4 < sum(row["r"] for row in rows) / 500 < 0.6
    assert len({row["u"] for row in rows}) == 500
    assert all(row["r"] != row["s"] for row in rows)
    doubled = data.range(3).flat_map(lambda row: [row, row]).with_column("n", monotonically_increasing_id())
    assert len({row["n"] for row in doubled.take_all()}) == 6


def test_files_are_downloaded(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"one")
    paths = data.from_items([{"uri": str(tmp_path / "a.bin")}, {"uri": None}])
    assert [row["b"] for row in paths.with_column("b", download("uri")).take_all()] == [b"one", None]
    missing = data.from_items([{"uri": str(tmp_path / "b.bin")}]).with_column("b", download("uri"))
    with pytest.raises(
        DataError, match=r"item 0.*b\.bin.*cannot be read: .*leave the row out before with filter\(\)"
    ):
        missing.take_all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: bool(col("x") > 1), "no truth value"),
        (lambda: col(""), "Give the name of a column"),
        (lambda: col("x").alias(3), "alias"),  # type: ignore[arg-type]
        (lambda: col("x").is_in(3), "takes a list of values"),
        (lambda: col("x").cast("colour"), "no Arrow type"),
        (lambda: col("x").str.shout(), r"no function \.str\.shout"),
        (lambda: col("x").str.pad(3, side="top"), "side='top'"),
        (lambda: col("x").str.contains(), "cannot be used"),
        (lambda: ROWS.with_column("v", 3), "Give an expression"),  # type: ignore[arg-type]
        (lambda: ROWS.with_column(3, lit(1)), "as a name"),  # type: ignore[arg-type]
        (lambda: ROWS.with_columns({}), "no expression"),
        (lambda: ROWS.select_columns([col("x") + 1]), "without a name"),
        (lambda: ROWS.select_columns([col("x"), "x"]), "selected twice"),
        (lambda: ROWS.add_column("v", 3), "add_column needs a function"),  # type: ignore[arg-type]
        (lambda: ROWS.add_column("", len), "as a name"),
        (lambda: udf()(3), "Decorate a function"),
        (lambda: DataType.complex128, "no counterpart"),
        (lambda: udf("int64")(abs)(col("x")).to_pyarrow(), "calls a function"),
        (lambda: ROWS.with_column("v", star()).take_all(), "select_columns"),
    ],
)
def test_what_is_no_expression_is_refused(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


# --------------------------------------------------------------------------- aggregates


def test_aggregates_are_those_of_numpy() -> None:
    values = np.random.default_rng(1).normal(1e6, 1, 20_000)
    numbers = data.from_numpy({"v": values, "n": np.arange(20_000)})
    assert numbers.mean("v") == pytest.approx(values.mean(), rel=1e-12)
    assert numbers.std("v") == pytest.approx(values.std(ddof=1), rel=1e-9)
    assert numbers.std("v", ddof=0) == pytest.approx(values.std(), rel=1e-9)
    assert (numbers.min("v"), numbers.max("v")) == (values.min(), values.max())
    assert numbers.sum(["n"]) == 199990000, "the result of one column, as in Ray Data"
    assert numbers.sum() == {"sum(v)": pytest.approx(values.sum()), "sum(n)": 199990000}
    large = data.from_items([{"v": 2**62}] * 5 + [{"v": -1}])
    assert large.sum("v") == 5 * 2**62 - 1


def test_nulls_are_left_out_or_make_the_result_none() -> None:
    assert (ROWS.sum("x"), ROWS.mean("x"), ROWS.sum("x", ignore_nulls=False)) == (3, 1.5, None)
    nan = data.from_items([{"v": 1.0}, {"v": math.nan}])
    assert (nan.mean("v"), nan.mean("v", ignore_nulls=False)) == (1.0, None)
    assert (ROWS.min("name"), ROWS.max("when")) == (" Ann ", datetime.datetime(2025, 6, 7, 8))
    assert data.range(0).sum("id") is None
    with pytest.raises(DataError, match="has the type string"):
        ROWS.mean("name")


def test_unique_values_come_in_the_order_of_their_first_rows() -> None:
    items = data.from_items([{"v": v} for v in ["b", "a", None, "b", "a"]])
    assert items.unique("v") == ["b", "a", None]
    assert items.unique("v", ignore_nulls=True) == ["b", "a"]
    assert data.range(10).map(lambda row: {"v": row["id"] % 3}).unique("v") == [0, 1, 2]
    assert len(data.from_items([{"v": math.nan}] * 3).unique("v")) == 1


def test_a_summary_describes_every_column() -> None:
    summary = ROWS.select_columns(["x", "name"]).summary()
    found = summary.get_column_stats("x").set_index("statistic")["value"].to_dict()
    assert (found["count"], found["mean"], found["min"], found["max"]) == (3, 1.5, 1, 2)
    assert found["missing_pct"] == pytest.approx(100 / 3)
    assert list(summary.to_pandas().columns) == ["statistic", "x", "name"]
    assert "missing_pct" in repr(summary)
    with pytest.raises(DataError, match="no column 'z'"):
        summary.get_column_stats("z")
    assert found["approx_quantile[0]"] in (1, 2)
    names = summary.get_column_stats("name").set_index("statistic")["value"].to_dict()
    assert names["approx_topk[0]"]["count"] >= 1


def test_aggregations_of_a_summary_are_chosen_by_type() -> None:
    rows = data.from_items([{"x": value, "y": float(value)} for value in (1, 2, 6)])
    summary = rows.summary(
        override_dtype_agg_mapping={DataType.int64(): lambda name: [Sum(name), AsList(name)]}
    )
    chosen = summary.get_column_stats("x").set_index("statistic")["value"].to_dict()
    assert chosen == {"sum": 9, "list[0]": 1, "list[1]": 2, "list[2]": 6}
    other = summary.get_column_stats("y").set_index("statistic")["value"].to_dict()
    assert (other["mean"], other["approx_quantile[0]"]) == (3.0, 2.0)
    with pytest.raises(DataError, match="is not a dict"):
        rows.summary(override_dtype_agg_mapping=5)
    with pytest.raises(DataError, match="has the entry 'int64'"):
        rows.summary(override_dtype_agg_mapping={"int64": lambda name: []})


def test_a_summary_without_duckdb_has_no_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    summary = data.from_items([{"x": 1}, {"x": 2}]).summary()
    assert "approx_quantile[0]" not in summary.get_column_stats("x")["statistic"].tolist()
