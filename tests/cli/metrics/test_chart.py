"""Curves in characters: every finite value has its place, also extreme ones, and the axes fit."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from powertrain.cli.metrics.chart import chart, finite_range, sparkline

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def dots(lines: list[str]) -> int:
    return sum(
        bin(ord(one) - 0x2800).count("1") for line in lines for one in line if "\u2800" < one <= "\u28ff"
    )


def test_a_sparkline_rises_with_its_values_and_has_gaps() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, math.nan, math.inf, 7], 20) == "▁  █"
    assert sparkline([3.0, 3.0], 20) == "▅▅"
    assert len(sparkline(list(range(1000)), 24)) == 24
    assert sparkline([], 5) == ""


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    lines = chart([1, 2, 3], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0], width=20, height=5)
    assert lines[0].startswith("3 ┤⠉") or lines[0].startswith("3 ┤⠑"), lines
    assert lines[3].startswith("1 ┤")
    assert lines[3][-1] != "⠀"
    assert lines[4].split() == ["1", "3"]


def test_lowest_and_highest_of_a_pixel_are_drawn_as_a_stroke() -> None:
    flat = chart([1, 2], [5.0, 5.0], [5.0, 5.0], [5.0, 5.0], width=20, height=5)
    wide = chart([1, 2], [0.0, 5.0], [9.0, 5.0], [5.0, 5.0], width=20, height=5)
    assert dots(wide) > dots(flat)


def test_nothing_finite_draws_nothing() -> None:
    assert finite_range([math.nan, math.inf]) == (0.0, 0.0)
    assert dots(chart([1, 2], [math.nan] * 2, [math.nan] * 2, [math.nan] * 2, width=20, height=5)) == 0


@given(st.lists(FLOATS, min_size=1, max_size=30), st.integers(1, 60), st.integers(2, 12))
def test_any_values_fit_into_any_chart(values: list[float], width: int, height: int) -> None:
    rows = list(range(5, 5 + len(values)))
    lines = chart(rows, values, values, values, width=width, height=height)
    assert len(lines) == height
    assert (dots(lines) > 0) == any(map(math.isfinite, values))
    drawn = [line.partition("┤")[2] for line in lines[:-1]]
    assert max(map(len, drawn)) <= max(width, 1)
    assert len(sparkline(values, 10)) == min(10, len(values))
