"""Steps that take much longer at equal distances: an epoch's end, an evaluation, a checkpoint. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from powertrain.diagnosis.tables import statistics
from powertrain.diagnosis.tables.steady import SteadySteps
from powertrain.diagnosis.tables.steps import Floats
from powertrain.trace.recording import phases

Rows = NDArray[np.int64]

#: Thresholds of a spike, in usual steps; the higher ones find large spikes among many small hiccups.
_LEVELS = (0.3, 0.8, 2.0, 6.0)
#: From this height three of them are enough, below it takes four.
_CLEAR = 0.8
_USUAL_WINDOW = 31
#: Share of the places at one distance where there must be a spike.
_COVERED = 0.8
#: Share of all spikes' time that those at one distance must explain.
_EXPLAINED = 0.5
#: Maximum relative deviation of most spikes from their usual size.
_ALIKE = 0.4
#: Maximum probability of such a pattern by chance.
_CHANCE = 1e-4
#: Fewer of them are not a rhythm, and fewer steps have no room for them.
_FEWEST_SPIKES = 3
_FEWEST = 9
#: Distances tried, the most frequent first.
_TRIED = 60


@dataclass(frozen=True)
class Periodic:
    """Spikes every ``period`` steps."""

    period: int
    #: Rows of the steady steps that have one.
    rows: Rows
    phase: int
    #: Columns of the ranks on which that phase grows; all of them where it is the run's matter.
    columns: tuple[int, ...]
    #: Seconds that one takes beyond a usual step, and its share of all time.
    excess: float
    cost: float


def find(steady: SteadySteps) -> list[Periodic]:
    """Spikes at equal distances, the costliest first; of phases that grow in the same steps the costliest alone."""
    first = _first_of_unbroken(steady)
    critical = steady.critical[first:]
    if not steady.enough or len(critical) < _FEWEST:
        return []
    step = statistics.median(critical)
    held_up = critical - statistics.running_median(critical, _USUAL_WINDOW)
    found = []
    for phase in range(phases.COUNT):
        series = steady.longest(phase)[first:]
        if np.count_nonzero(series > statistics.median(series) + _LEVELS[0] * step) >= _FEWEST_SPIKES:
            spikes = _costliest(series, held_up, step)
            placed = _placed(steady, phase, spikes, first) if spikes is not None else None
            found += [placed] if placed is not None else []
    kept: list[Periodic] = []
    for one in sorted(found, key=lambda one: -one.cost):
        if not any(
            np.isin(one.rows, other.rows).mean() > 0.5 and one.period == other.period for other in kept
        ):
            kept.append(one)
    return kept


@dataclass(frozen=True)
class _Spikes:
    period: int
    rows: Rows
    excess: Floats


def _costliest(series: Floats, held_up: Floats, step: float) -> _Spikes | None:
    """Return the spikes of one phase's ``series`` that also lengthen the step by most of their excess.

    A spike whose time the steps after it make up for costs nothing: a host that waits for a GPU it was ahead of, say.
    """
    excess = series - statistics.running_median(series, _USUAL_WINDOW)
    noise = statistics.mad(excess)
    best: _Spikes | None = None
    for level in _LEVELS:
        rows = _spikes(excess, max(level * step, 4.0 * noise))
        found = _equal_distances(
            rows, excess, least=_FEWEST_SPIKES if level >= _CLEAR else _FEWEST_SPIKES + 1
        )
        if found is None:
            continue
        lost = held_up[found.rows] - _made_up_for(held_up, found.rows)
        if statistics.median(lost) < 0.5 * statistics.median(found.excess):
            continue
        if best is None or found.excess.sum() > best.excess.sum():
            best = found
    return best


def _made_up_for(held_up: Floats, rows: Rows) -> Floats:
    """Return the seconds by which the unbroken run of shorter steps right after each spike is shorter than usual."""
    made_up = np.zeros(len(rows))
    for number, row in enumerate(rows):
        after = held_up[row + 1 :]
        end = int(np.argmax(after >= 0.0)) if (after >= 0.0).any() else len(after)
        made_up[number] = -after[:end].sum()
    return made_up


def _first_of_unbroken(steady: SteadySteps) -> int:
    """The first row from which on no step is missing or stands for several."""
    if len(steady.numbers) < 2:
        return 0
    broken = np.diff(steady.numbers) != 1
    weight = steady.steps.weight[steady.begins :]
    if len(weight) == len(steady.numbers):
        broken |= weight[:-1] != 1
    places = np.flatnonzero(broken)
    return int(places[-1]) + 1 if places.size else 0


def _spikes(excess: Floats, bound: float) -> Rows:
    """Return the start of each spike; neighbours are one spike."""
    rows = np.flatnonzero(excess > bound)
    if len(rows) * 3 > len(excess):
        return rows[:0]
    keep = np.ones(len(rows), dtype=bool)
    keep[1:] = np.diff(rows) > 1
    return rows[keep]


def _equal_distances(rows: Rows, excess: Floats, least: int) -> _Spikes | None:
    """Those of the spikes at ``rows`` that the distance explains which explains the most."""
    count = len(excess)
    if len(rows) < least:
        return None
    whole = float(excess[rows].sum())
    best: _Spikes | None = None
    for period in _distances(rows, count // least + 1):
        place = int(np.argmax(np.bincount(rows % period, weights=excess[rows], minlength=period)))
        hits = rows[rows % period == place]
        slots = len(range(place, count, period))
        if len(hits) < max(least, _COVERED * slots):
            continue
        explained = float(excess[hits].sum())
        if explained < _EXPLAINED * whole or _by_chance(len(hits), slots, len(rows), count) > _CHANCE:
            continue
        if best is None or explained > best.excess.sum():
            best = _Spikes(period, hits, excess[hits])
    return best


def _distances(rows: Rows, longest: int) -> list[int]:
    seen: Counter[int] = Counter()
    for apart in (1, 2, 3):
        seen.update((rows[apart:] - rows[:-apart]).tolist())
    return [period for period, _ in seen.most_common(_TRIED) if 3 <= period <= longest]


def _by_chance(hits: int, slots: int, spikes: int, count: int) -> float:
    """Return the probability that spikes at random places fill as many places at one of all distances."""
    elsewhere = (spikes - hits + 0.5) / max(1, count - slots)
    tries = (count / max(3, hits)) ** 2 / 2.0
    return statistics.sign_test(hits, slots, elsewhere) * tries


def _placed(steady: SteadySteps, phase: int, spikes: _Spikes, first: int) -> Periodic | None:
    """Return the spike with the ranks on which the phase grows; None if ranks or sizes vary, as with hiccups.

    Rows count from ``first``.
    """
    rows = spikes.rows + first
    times = steady.between[:, :, phase]
    grown = times[rows] - np.median(times, axis=0)
    longer = grown >= 0.5 * grown.max(axis=1, keepdims=True)
    columns = longer.mean(axis=0) >= 0.5
    size = float(np.median(spikes.excess))
    alike = (longer == columns).all(axis=1) & (np.abs(spikes.excess - size) <= _ALIKE * size)
    if alike.mean() < _COVERED or not columns.any():
        return None
    return Periodic(
        period=spikes.period,
        rows=rows,
        phase=phase,
        columns=tuple(int(column) for column in np.flatnonzero(columns)),
        excess=size,
        cost=float(spikes.excess.sum() / steady.critical[first:].sum()),
    )
