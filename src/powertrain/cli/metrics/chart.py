"""Curves in characters: a line of blocks, or a chart of Braille dots with its axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from powertrain.terminal.text import number

_BLOCKS = "▁▂▃▄▅▆▇█"
#: Dots of a Braille character, by column and row, as bits; a character has two columns of four dots.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_BRAILLE = 0x2800
_DOTS_WIDE, _DOTS_HIGH = 2, 4


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the course of values in at most ``width`` characters; a space where a value is not finite."""
    if len(values) > width:
        values = [values[round(index * (len(values) - 1) / (width - 1))] for index in range(width)]
    low, high = finite_range(values)
    return "".join(
        _BLOCKS[round(_part(value, low, high) * (len(_BLOCKS) - 1))] if math.isfinite(value) else " "
        for value in values
    )


def finite_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and highest finite value; (0, 0) where there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def _part(value: float, low: float, high: float) -> float:
    """Return where a value lies between two others, from 0 to 1; 0.5 where they are equal."""
    # Halves, because the difference of the largest numbers is infinite.
    return (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5


def chart(
    rows: Sequence[int],
    low: Sequence[float],
    high: Sequence[float],
    last: Sequence[float],
    *,
    width: int,
    height: int,
) -> list[str]:
    """Return a chart as lines: the highest and lowest value at the left, the first and last row below.

    Args:
        rows: The row of each pixel.
        low: The lowest value of each pixel.
        high: The highest one.
        last: The last one, which the line goes through.
        width: Characters of a line, with the axis.
        height: Lines, with the axis.
    """
    bottom, top = finite_range([*low, *high])
    labels = (number(top), number(bottom))
    margin = max(map(len, labels))
    columns, lines = max(1, width - margin - 2), max(1, height - 1)
    grid = [[0] * columns for _ in range(lines)]
    wide, tall = columns * _DOTS_WIDE, lines * _DOTS_HIGH

    def down(value: float) -> int:
        return round((1 - _part(value, bottom, top)) * (tall - 1))

    before: tuple[int, int] | None = None
    for row, least, most, value in zip(rows, low, high, last, strict=True):
        if not math.isfinite(value):
            before = None
            continue
        x, y = round(_part(row, rows[0], rows[-1]) * (wide - 1)) if len(rows) > 1 else 0, down(value)
        if math.isfinite(least) and math.isfinite(most):
            _draw(grid, (x, down(most)), (x, down(least)))
        _draw(grid, before or (x, y), (x, y))
        before = x, y
    drawn = ["".join(chr(_BRAILLE + bits) for bits in line) for line in grid]
    sides = [labels[0].rjust(margin), *[" " * margin] * (lines - 2), labels[1].rjust(margin)][:lines]
    ends = f"{rows[0]}{str(rows[-1]).rjust(columns - len(str(rows[0])))}" if len(rows) > 1 else str(rows[0])
    return [
        *(f"{side} ┤{line}".rstrip("\u2800") for side, line in zip(sides, drawn, strict=True)),
        f"{'':>{margin}}  {ends}",
    ]


def _draw(grid: list[list[int]], start: tuple[int, int], end: tuple[int, int]) -> None:
    """Draw a straight line of dots."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
    for step in range(steps + 1):
        part = step / steps if steps else 0.0
        x, y = (round(a + (b - a) * part) for a, b in zip(start, end, strict=True))
        grid[y // _DOTS_HIGH][x // _DOTS_WIDE] |= _DOTS[x % _DOTS_WIDE][y % _DOTS_HIGH]
