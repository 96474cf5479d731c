"""Joins: the rows of pandas, in the order of the left dataset and then of the right one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

from powertrain import data
from powertrain.errors import DataError

KEYS = st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=1, max_size=15)
KINDS = [
    "inner",
    "left_outer",
    "right_outer",
    "full_outer",
    "left_semi",
    "right_semi",
    "left_anti",
    "right_anti",
]


def expected_rows(kind: str, left: list[int | None], right: list[int | None]) -> list[tuple[Any, Any, Any]]:
    """(key, row of the left, row of the right), None for none."""
    pairs = [(i, j) for i, a in enumerate(left) for j, b in enumerate(right) if a is not None and a == b]
    lone_left = [i for i in range(len(left)) if i not in {i for i, _ in pairs}]
    lone_right = [j for j in range(len(right)) if j not in {j for _, j in pairs}]
    if kind == "left_semi":
        return [(left[i], i, None) for i in range(len(left)) if i not in lone_left]
    if kind == "left_anti":
        return [(left[i], i, None) for i in lone_left]
    if kind == "right_semi":
        return [(right[j], None, j) for j in range(len(right)) if j not in lone_right]
    if kind == "right_anti":
        return [(right[j], None, j) for j in lone_right]
    found: list[tuple[Any, Any, Any]] = [(left[i], i, j) for i, j in pairs]
    if kind in ("left_outer", "full_outer"):
        found = sorted(
            [*found, *((left[i], i, None) for i in lone_left)], key=lambda row: (row[1], row[2] or 0)
        )
    if kind in ("right_outer", "full_outer"):
        found += [(right[j], None, j) for j in lone_right]
    return found


@settings(deadline=None, max_examples=scaled(15))
@given(left=KEYS, right=KEYS, kind=st.sampled_from(KINDS))
def test_rows_of_every_kind_of_join(left: list[int | None], right: list[int | None], kind: str) -> None:
    import pyarrow as pa

    one = data.from_arrow(pa.table({"k": pa.array(left, pa.int64()), "a": range(len(left))}))
    other = data.from_arrow(pa.table({"k": pa.array(right, pa.int64()), "b": range(len(right))}))
    found = one.join(other, kind, 4, on=("k",)).take_all()
    assert [(row["k"], row.get("a"), row.get("b")) for row in found] == expected_rows(kind, left, right)


def test_names_of_keys_and_of_columns_that_both_have() -> None:
    one = data.from_items([{"id": 1, "x": 10}, {"id": 2, "x": 20}])
    other = data.from_items([{"key": 2, "x": 200}, {"key": 3, "x": 300}])
    options: dict[str, Any] = {"on": "id", "right_on": "key", "right_suffix": "_r"}
    assert one.join(other, "inner", **options).take_all() == [{"id": 2, "x": 20, "x_r": 200}]
    assert one.join(other, "full_outer", left_suffix="_l", **options).take_all() == [
        {"id": 1, "x_l": 10, "x_r": None},
        {"id": 2, "x_l": 20, "x_r": 200},
        {"id": 3, "x_l": None, "x_r": 300},
    ]
    assert one.join(other, "right_outer", **options).take_all()[1] == {"x": None, "key": 3, "x_r": 300}
    assert one.join(other, "right_anti", on="id", right_on="key").take_all() == [{"key": 3, "x": 300}]


def test_tensors_of_both_sides_are_gathered() -> None:
    one = data.from_numpy({"k": np.array([1, 2, 3]), "a": np.arange(6.0).reshape(3, 2)})
    other = data.from_numpy({"k": np.array([3, 2, 9]), "b": np.arange(12.0).reshape(3, 2, 2)})
    found = one.join(other, "inner", on="k").take_all()
    assert [(row["k"], row["a"].tolist(), row["b"].tolist()) for row in found] == [
        (2, [2.0, 3.0], [[4.0, 5.0], [6.0, 7.0]]),
        (3, [4.0, 5.0], [[0.0, 1.0], [2.0, 3.0]]),
    ]
    outer = one.join(other, "left_outer", on="k").take_all()
    assert outer[0]["b"] is None
    assert [row["k"] for row in outer] == [1, 2, 3]


def test_a_dataset_can_be_joined_with_itself_and_with_results() -> None:
    sales = data.from_items([{"city": city, "n": n} for city, n in zip("abab", range(4), strict=True)])
    totals = sales.groupby("city").sum("n")
    found = sales.join(totals, "left_outer", on="city").take_all()
    assert [row["sum(n)"] for row in found] == [2, 4, 2, 4]
    twice = sales.join(sales, "inner", on="n", right_suffix="_2")
    assert [row["city_2"] for row in twice.take_all()] == list("abab")


def test_wrong_arguments_are_errors_that_name_them() -> None:
    one, other = data.from_items([{"k": 1, "x": 1}]), data.from_items([{"k": "a", "x": 1}])
    with pytest.raises(DataError, match="have the types int64 and string"):
        one.join(other, "inner", on="k", right_suffix="_r").count()
    with pytest.raises(DataError, match=r"both datasets have the columns \['x'\]"):
        one.join(one, "inner", on="k").count()
    with pytest.raises(DataError, match=r"several columns named \['x'\]"):
        one.join(one, "inner", on="k", left_suffix="").count()
    with pytest.raises(DataError, match="There is no column 'id'"):
        one.join(one, "inner").count()
    with pytest.raises(DataError, match="join_type='outer' is unknown"):
        one.join(one, "outer", on="k")
    with pytest.raises(DataError, match="different numbers of columns"):
        one.join(one, "inner", on=("k", "x"), right_on="k")
    with pytest.raises(DataError, match="takes a dataset, and got a list"):
        one.join([], "inner", on="k")
