"""Filters written as text, and expressions that mean the same in filters and in columns."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain import data
from powertrain.data import expressions
from powertrain.data.expressions import col, lit, pyarrow_udf, random, udf
from powertrain.errors import DataError

TABLE = pa.table({"x": [1, 2, 3, None], "name": ["a", "b", "c", "a"], "y": [0.5, -1.0, 2.0, 3.0]})


def kept(text: str) -> list[int]:
    numbered = TABLE.append_column("row", pa.array(range(4)))
    found: list[Any] = numbered.filter(expressions.parse(text)).column("row").to_pylist()
    return found


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("x > 1", [1, 2]),
        ("x / 2 == 1", [1]),
        ("x / 2 == 0.5", [0]),
        ("6 / x == y", [2]),
        ("1 < x <= 2", [1]),
        ("x == 1 or name == 'c'", [0, 2]),
        ("x >= 1 and not name == 'a'", [1, 2]),
        ("name in ['a', 'c']", [0, 2, 3]),
        ("name not in ('a',)", [1, 2]),
        ("x is None", [3]),
        ("x is not None", [0, 1, 2]),
        ("y < -0.5", [1]),
        ("x + 1 == 3", [1]),
        ("x * 2 - 1 > y", [0, 1, 2]),
    ],
)
def test_text_keeps_the_rows_that_python_would(text: str, rows: list[int]) -> None:
    assert kept(text) == rows


@pytest.mark.parametrize(
    "text", ["x >", "print(x)", "x is 3", "[v for v in x]", "", "x = 3", "name in other"]
)
def test_what_is_no_condition_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(DataError, match="cannot be understood") as refused:
        expressions.parse(text)
    assert repr(text) in str(refused.value)


def test_columns_and_constants_make_arrow_expressions() -> None:
    made: Any = (expressions.col("x") == expressions.lit(3)) & (expressions.col("y") > 1)
    assert made.to_pyarrow().equals((pc.field("x") == pc.scalar(3)) & (pc.field("y") > 1))


# --------------------------------------------------------------------------- one meaning everywhere


NUMBERS = pa.table(
    {"i": [7, -7, 2**53 + 1], "zero": [0.0, 0.0, 1.0], "t": ["a", "b", "c"], "s": ["x", "y", "z"]}
)


def both_ways(condition: Any) -> list[list[int]]:
    """The rows that a filter keeps, and those whose column of the same expression is true."""
    rows = data.from_arrow(NUMBERS)
    kept = [row["i"] for row in rows.filter(expr=condition).take_all()]
    column = [row["i"] for row in rows.with_column("c", condition).take_all() if row["c"]]
    return [kept, column]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (1 / col("zero") > 5, [7, -7]),
        (col("t") + lit("!") == "b!", [-7]),
        (col("t").str.upper() + col("s") == "Cz", [2**53 + 1]),
        (col("zero") // 2 == 0, [7, -7, 2**53 + 1]),
        (col("i") % 2 == 1, [7, -7, 2**53 + 1]),
        (col("i") // 2 == -4, [-7]),
        ((col("zero") + 7) % 2.5 == 2.0, [7, -7]),
        (col("t").str.len() % 0.3 < 0.2, [7, -7, 2**53 + 1]),
        ((1 // col("zero")).is_null(), [7, -7]),
    ],
)
def test_a_filter_means_what_a_column_means(condition: Any, expected: list[int]) -> None:
    assert both_ways(condition) == [expected, expected]


def test_an_overflow_is_an_error_in_filters_and_in_columns() -> None:
    rows = data.from_arrow(pa.table({"i": [2**62]}))
    for made in (lambda: rows.filter(expr=col("i") * 4 > 0), lambda: rows.with_column("c", col("i") * 4)):
        with pytest.raises(DataError, match="overflow"):
            made().take_all()


@given(st.integers(-(2**62), 2**62), st.integers(-(2**31), 2**31))
def test_whole_numbers_are_divided_as_in_python(left: int, right: int) -> None:
    table = pa.table({"a": [left, 1], "b": [right, 0]})
    rows = (
        data.from_arrow(table).with_columns({"q": col("a") // col("b"), "r": col("a") % col("b")}).take_all()
    )
    expected = (None, None) if right == 0 else divmod(left, right)
    assert [(row["q"], row["r"]) for row in rows] == [expected, (None, None)]
    if right:
        is_same = (col("a") // col("b") == expected[0]) & (col("a") % col("b") == expected[1])
        kept = data.from_arrow(table).filter(expr=is_same)
        assert kept.count() == 1


def test_expressions_that_print_alike_are_not_the_same() -> None:
    def one(values: Any) -> Any:
        return values

    other, another = list(range(30)), list(range(30))
    another[15] = 99
    made = [pyarrow_udf()(one)(col("x")), udf()(lambda values: values)(col("x"))]
    assert made[0].structurally_equals(made[0])
    assert not made[0].structurally_equals(made[1])
    assert col("x").is_in(other).structurally_equals(col("x").is_in(list(other)))
    assert not col("x").is_in(other).structurally_equals(col("x").is_in(another))
    assert not random(seed=1).structurally_equals(random(seed=2))
    assert random(seed=1).structurally_equals(random(seed=1))
    assert not lit(1).structurally_equals(lit(True))
    assert (col("x") + 1).structurally_equals(col("x") + 1)
    assert col("x").cast("int8").structurally_equals(col("x").cast("int8"))
    assert not col("x").structurally_equals("x")
