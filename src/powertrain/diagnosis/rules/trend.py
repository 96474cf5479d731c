"""Detect steady growth, as opposed to noise, one jump, or growth up to a limit.

The series is cut into blocks of which only the medians count. Growth is steady when nearly every block lies above the
one before it, when no few rises make up the whole, when it continues to the end, and when the rises are large against
their own scatter. The last condition also rejects a random walk, which climbs for long stretches without a cause.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from powertrain.diagnosis.tables import statistics
from powertrain.diagnosis.tables.steps import Floats

#: Minimum number of values.
LEAST_VALUES = 30
_MOST_BLOCKS = 16
_LEAST_IN_BLOCK = 3
#: Share of rises that must be positive.
_RISING = 0.8
#: The median rise, and the mean of the last third, as parts of the mean rise.
_TYPICAL = 0.5
_LATE = 0.6
#: Mean rise in standard errors. Of 15 rises of a random walk one series in ten thousand reaches it; fewer rises must
#: reach more, for the same odds.
_CERTAIN = 5.0
_CERTAIN_RISES = 15


@dataclass(frozen=True)
class Trend:
    """The growth of a series per unit of its axis."""

    slope: float
    #: Its 95 % confidence interval, from the blocks.
    low: float
    high: float
    #: Before and after: the medians of the first and the last block.
    first: float
    last: float

    @property
    def growth(self) -> float:
        return self.last - self.first


def steady_growth(against: Floats, values: Floats) -> Trend | None:
    """Return the growth of ``values`` over ``against`` (ascending, of the same length); None if there is no steady one.

    Non-finite values are skipped. Growth in only the second half of the series is found too.
    """
    known = np.isfinite(against) & np.isfinite(values)
    x, y = against[known], values[known]
    for begin in (0, len(x) // 2):
        if len(x) - begin >= LEAST_VALUES and (trend := _trend(x[begin:], y[begin:])):
            return trend
    return None


def _trend(x: Floats, y: Floats) -> Trend | None:
    count = min(_MOST_BLOCKS, len(x) // _LEAST_IN_BLOCK)
    left_over = len(x) % count
    places, levels = (np.median(series[left_over:].reshape(count, -1), axis=1) for series in (x, y))
    if places[-1] <= places[0] or not _keeps_rising(np.diff(levels)):
        return None
    interval = statistics.slope_interval(places, levels, blocks=count)
    if not interval.low > 0:
        return None
    slope = statistics.theil_sen(places, levels).slope
    return Trend(slope, interval.low, interval.high, float(levels[0]), float(levels[-1]))


def _keeps_rising(rises: Floats) -> bool:
    mean = float(rises.mean())
    if mean <= 0 or np.mean(rises > 0) < _RISING:
        return False
    late = rises[-max(1, len(rises) // 3) :]
    if np.median(rises) < _TYPICAL * mean or late.mean() < _LATE * mean:
        return False
    # mean / (scatter / sqrt(n)) >= certain * sqrt(15 / n), without a division by a scatter of 0
    return bool(mean * len(rises) >= _CERTAIN * np.sqrt(_CERTAIN_RISES) * rises.std(ddof=1))
