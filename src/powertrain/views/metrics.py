"""Metrics of a run as curves in pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from powertrain.run.lifecycle import RunState
from powertrain.run.metrics import curves
from powertrain.run.metrics.curves import Curve
from powertrain.storage import Storage
from powertrain.views.compact import compact

#: The most lines of one chart: more cannot be told apart.
MOST_LINES = 8


def chosen_ranks(world_size: int) -> list[int]:
    """Return the ranks that stand for all of a run: all, or :data:`MOST_LINES` evenly spread ones."""
    if world_size <= MOST_LINES:
        return list(range(max(1, world_size)))
    return sorted({round(i * (world_size - 1) / (MOST_LINES - 1)) for i in range(MOST_LINES)})


def metric_lines(
    storage: Storage,
    state: RunState,
    names: Sequence[str],
    *,
    ranks: Sequence[int],
    pixels: int,
    rows: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Return the curves of these metrics, and the times of the rows.

    Args:
        storage: The run's directory.
        state: The state of the run, which tells abandoned points.
        names: Names of metrics.
        ranks: The ranks whose points are wanted, one at least.
        pixels: Maximum number of pixels of each curve.
        rows: The first and the last row; None for all.
    """
    wanted = [(name, rank) for name in names for rank in ranks]
    with_times = [*wanted, ("timestamp", ranks[0])]
    *found, times = curves.curves(storage, state, with_times, pixels=pixels, rows=rows)
    lines = [_line(name, rank, curve) for (name, rank), curve in zip(wanted, found, strict=True)]
    return {
        "lines": [line for line in lines if line["rows"]],
        # The time of a pixel's first row is its lowest.
        "times": {"rows": times.rows.tolist(), "at": np.round(times.low, 2).tolist()},
    }


def _line(name: str, rank: int, curve: Curve) -> dict[str, Any]:
    line: dict[str, Any] = {
        "name": name,
        "rank": rank,
        "points": curve.points,
        "rows": curve.rows.tolist(),
        "last": compact(curve.last),
    }
    if not (np.array_equal(curve.low, curve.last, True) and np.array_equal(curve.high, curve.last, True)):
        line |= {"low": compact(curve.low), "high": compact(curve.high)}
    return line


def spark(storage: Storage, state: RunState, name: str, *, pixels: int = 80) -> dict[str, Any] | None:
    """Return a metric of rank 0 as a small curve; None if it has no points."""
    curve = curves.curve(storage, state, name, pixels=pixels)
    if not len(curve.rows):
        return None
    return {
        "name": name,
        "rows": curve.rows.tolist(),
        "last": compact(curve.last),
        "value": compact(curve.last[-1:])[0],
    }
