"""The steps of every rank over time: in each pixel the share of each phase. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powertrain.trace.recording import phases
from powertrain.views.compact import packed

Floats = NDArray[np.float64]
Records = NDArray[np.void]
#: The usual order of phases within a step.
ORDER = (
    phases.OUTSIDE,
    phases.REPORT,
    phases.INPUT,
    phases.H2D,
    phases.FORWARD,
    phases.INSIDE,
    phases.BACKWARD,
    phases.COLLECTIVE,
    phases.OPTIMIZER,
)
#: Up to so many rows each phase has its share of a pixel; of more only the longest phase is sent.
_ROWS_WITH_SHARES = 24
#: A pixel without a longest phase: no step was recorded in it.
NOTHING = 255
_WAITS = (phases.COLLECTIVE, phases.REPORT)
#: Seconds from the median time to the first or last one that is shown at first: a year.
LONGEST_S = 366 * 86400.0


@dataclass(frozen=True)
class Window:
    """A time range in pixels, in Unix seconds."""

    begin: float
    end: float
    columns: int

    @property
    def edges(self) -> Floats:
        return np.linspace(self.begin, self.end, self.columns + 1)


def full_window(steps: Mapping[int, Mapping[int, Records]], columns: int) -> Window | None:
    """Return the window with all steps; None without any."""
    parts = [_settled(part) for ranks in steps.values() for part in ranks.values()]
    parts = [part for part in parts if len(part)]
    if not parts:
        return None
    # A clock that was set while the run went on must not leave all steps in one pixel.
    middle = middle_of(np.concatenate([part["start"] for part in parts]))
    near = [found for part in parts if len(found := _near(part, middle))]
    begin = min(float(part["start"][0]) for part in near)
    end = max(float(part["start"][-1] + _seconds(part[-1:])[0]) for part in near)
    return Window(begin, min(max(end, begin + 1e-3), begin + 2 * LONGEST_S), columns)


def _near(part: Records, middle: float) -> Records:
    """Return the records, which are in the order of time, that began within :data:`LONGEST_S` of a moment."""
    if max(abs(part["start"][0] - middle), abs(part["start"][-1] - middle)) < LONGEST_S:
        return part
    return part[np.abs(part["start"] - middle) < LONGEST_S]


def _settled(part: Records) -> Records:
    """Return the records with a time near the others, whose begins never go back: a clock may have been set."""
    begins = np.ascontiguousarray(part["start"])
    # As in every run whose clock was not set. A time that is not known is no more than any other.
    if (
        len(part)
        and begins[0] > 0
        and begins[-1] - begins[0] < LONGEST_S
        and (begins[1:] >= begins[:-1]).all()
    ):
        return part
    is_known = np.isfinite(part["start"]) & (part["start"] > 0)
    if is_known.any():
        is_known &= np.abs(part["start"] - middle_of(part["start"][is_known])) < LONGEST_S
    if not is_known.all():
        part = part[is_known]
    begins = np.maximum.accumulate(part["start"])
    if len(part) and not np.array_equal(begins, part["start"]):
        part = part.copy()
        part["start"] = begins
    return part


def middle_of(times: NDArray[Any]) -> float:
    """Return the median, which is one of the times."""
    return float(np.sort(times)[len(times) // 2])


def _seconds(part: Records) -> Floats:
    """Return the duration of each step; phases that are not known count as 0."""
    return np.asarray(_times(part).sum(axis=1), np.float64)


def _times(part: Records) -> Floats:
    """Return (steps, phases): seconds, without negative and unknown ones."""
    times = np.fmax(part["phases"], np.float64(0.0), dtype=np.float64)
    times[times == np.inf] = 0.0
    return np.asarray(times, np.float64)


def timeline(
    steps: Mapping[int, Mapping[int, Records]], window: Window, *, most_rows: int, is_thinned: bool = False
) -> dict[str, Any]:
    """Return the phases of ranks in pixels.

    Args:
        steps: Records by attempt and rank, each in the order of time.
        window: The time range, and the number of pixels.
        most_rows: Maximum number of rows. Of more ranks neighbours share a row, which shows the one with most work.
        is_thinned: Whether steps are missing, so that shares are those of the recorded time.
    """
    by_rank = _by_rank(steps)
    groups = _groups(sorted(by_rank), max(1, most_rows))
    work = {rank: _work(parts) for rank, parts in by_rank.items()} if len(groups) < len(by_rank) else {}
    shown = [max(group, key=lambda rank: work.get(rank, 0.0)) for group in groups]
    edges = window.edges
    shares = np.stack([_shares(by_rank[rank], edges, is_thinned) for rank in shown]) if shown else None
    kind, cells = _cells(shares) if shares is not None else ("shares", "")
    return {
        "begin": window.begin,
        "end": window.end,
        "columns": window.columns,
        "phases": [phases.NAMES[phase] for phase in ORDER],
        "rows": [
            {"rank": rank, "first": group[0], "last": group[-1]}
            for rank, group in zip(shown, groups, strict=True)
        ],
        "kind": kind,
        "cells": cells,
        "ranks": len(by_rank),
        "is_thinned": is_thinned,
        "steps": _step_times([by_rank[rank] for rank in shown], window),
    }


def _by_rank(steps: Mapping[int, Mapping[int, Records]]) -> dict[int, list[Records]]:
    """Return the records of each rank over all attempts, oldest first."""
    found: dict[int, list[Records]] = {}
    for attempt in sorted(steps):
        for rank, part in steps[attempt].items():
            if len(known := _settled(part)):
                found.setdefault(rank, []).append(known)
    return found


def _groups(ranks: Sequence[int], most: int) -> list[list[int]]:
    size = -(-len(ranks) // most) if ranks else 1
    return [list(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def _work(parts: Sequence[Records]) -> float:
    """Return the mean seconds of a step that a rank does not wait for others: the largest is the straggler's."""
    times = np.concatenate([_times(part) for part in parts])
    own = times.sum(axis=1) - times[:, list(_WAITS)].sum(axis=1)
    return float(own.mean()) if len(own) else 0.0


def _shares(parts: Sequence[Records], edges: Floats, is_thinned: bool) -> Floats:
    """Return (columns, phases): the share of each pixel that a rank spends in each phase."""
    spent = np.zeros((len(edges) - 1, phases.COUNT))
    for part in parts:
        near = part[_overlapping(part, edges)]
        if len(near):
            spent += _spent(near, edges)
    width = edges[1] - edges[0]
    if is_thinned:
        recorded = spent.sum(axis=1, keepdims=True)
        shares = np.where(recorded > 0.01 * width, spent / np.where(recorded > 0, recorded, 1.0), 0.0)
        return np.asarray(shares, np.float64)
    return np.asarray(np.clip(spent / width, 0.0, 1.0), np.float64)


def _overlapping(part: Records, edges: Floats) -> slice:
    start = part["start"]
    first = int(np.searchsorted(start, edges[0], "right")) - 1
    return slice(max(0, first), int(np.searchsorted(start, edges[-1], "right")))


def _spent(part: Records, edges: Floats) -> Floats:
    """Return (columns, phases): seconds of these steps in each pixel.

    The time that has been spent in a phase grows only while the rank is in it: it is a line between the begin and the
    end of each, and its values at the edges of pixels are interpolated.
    """
    times = _times(part)[:, list(ORDER)]
    ends = np.cumsum(times, axis=1) + np.asarray(part["start"], np.float64)[:, None]
    spent = np.empty((len(edges) - 1, phases.COUNT))
    for place in range(phases.COUNT):
        moments = np.stack([ends[:, place] - times[:, place], ends[:, place]], axis=1).ravel()
        total = np.cumsum(times[:, place])
        reached = np.stack([total - times[:, place], total], axis=1).ravel()
        spent[:, place] = np.diff(np.interp(edges, np.maximum.accumulate(moments), reached))
    return spent


def _cells(shares: Floats) -> tuple[str, str]:
    if len(shares) <= _ROWS_WITH_SHARES:
        return "shares", packed(np.round(shares * 255).astype(np.uint8))
    longest = shares.argmax(axis=2).astype(np.uint8)
    longest[shares.sum(axis=2) < 0.01] = NOTHING
    return "longest", packed(longest)


def _step_times(ranks: Sequence[Sequence[Records]], window: Window) -> list[dict[str, Any]]:
    """Return the number of steps in the window, their median and longest duration and their phases, for each row."""
    found = []
    for parts in ranks:
        near = [part[_overlapping(part, window.edges)] for part in parts]
        times = np.concatenate([_times(part) for part in near])[:, list(ORDER)]
        seconds = times.sum(axis=1)
        total = float(seconds.sum())
        found.append(
            {
                "count": len(seconds),
                "median": round(float(np.median(seconds)), 6) if len(seconds) else None,
                "longest": round(float(seconds.max()), 6) if len(seconds) else None,
                "shares": [round(share, 4) for share in (times.sum(axis=0) / (total or 1.0)).tolist()],
            }
        )
    return found
