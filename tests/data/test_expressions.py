"""Filters written as text."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from powertrain.data import expressions
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
