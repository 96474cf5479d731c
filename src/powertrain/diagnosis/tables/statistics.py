"""Statistics that hold on noisy machines: medians, spreads, intervals, steps and slopes. Pure; numpy alone.

Everything here is deterministic: generators have a fixed seed, so the same records always give the same
findings. Values that are not finite are left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
#: Makes one number of each row of a table.
Statistic = Callable[[Floats], Floats]

#: The spread of a normal distribution in units of its median absolute deviation.
_NORMAL = 1.4826
_SEED = 20210
#: Maximum number of values per bootstrap sample; more would cost time and change nothing.
_DRAWN = 4_000
#: Maximum number of points that Theil-Sen compares pair by pair.
_PAIRED = 300


class Interval(NamedTuple):
    """A confidence interval. NaN on both ends if nothing is known."""

    low: float
    high: float

    def excludes(self, value: float) -> bool:
        return self.low > value or self.high < value


class TrendLine(NamedTuple):
    slope: float
    intercept: float


def finite(values: ArrayLike) -> Floats:
    """Return the finite values as a flat array of floats."""
    flat = np.asarray(values, np.float64).ravel()
    return flat[np.isfinite(flat)]


def median(values: ArrayLike) -> float:
    """0.0 where there are none."""
    kept = finite(values)
    return float(np.median(kept)) if kept.size else 0.0


def quantile(values: ArrayLike, share: float) -> float:
    """0.0 where there are none."""
    kept = finite(values)
    return float(np.quantile(kept, share)) if kept.size else 0.0


def mad(values: ArrayLike) -> float:
    """Median absolute deviation, scaled so that it is the standard deviation of normal noise; 0.0 without values."""
    kept = finite(values)
    return float(np.median(np.abs(kept - np.median(kept)))) * _NORMAL if kept.size else 0.0


def running_median(values: ArrayLike, window: int) -> Floats:
    """Return the median of the ``window`` values around each (an even window counts as the next odd one).

    Windows that reach over an end are those at that end: there the result is flat.
    """
    series = np.asarray(values, np.float64).ravel()
    if not series.size:
        return series
    width = min(window | 1, series.size - (1 - series.size % 2))
    inner = np.median(np.lib.stride_tricks.sliding_window_view(series, width), axis=1)
    half = width // 2
    return np.pad(inner, (half, series.size - inner.size - half), mode="edge")


def window_means(values: ArrayLike, width: int) -> Floats:
    """Return means of consecutive windows of ``width``; an incomplete last window is left out.

    Their median is a mean that single outliers cannot move, and that includes periodic values.
    """
    return row_means(_windows(values, width))


def window_medians(values: ArrayLike, width: int) -> Floats:
    """The same with medians. Neighbours are alike and windows are not: an interval over them is an honest one."""
    return row_medians(_windows(values, width))


def _windows(values: ArrayLike, width: int) -> Floats:
    series = np.asarray(values, np.float64).ravel()
    width = max(1, min(width, series.size))
    whole = series.size // width * width
    return series[:whole].reshape(-1, width)


def sign_test(positive: int, trials: int, chance: float = 0.5) -> float:
    """Exact probability of at least ``positive`` of ``trials`` where each is positive with ``chance``."""
    if positive <= 0 or chance >= 1.0:
        return 1.0
    if positive > trials or chance <= 0.0:
        return 0.0
    counts = np.arange(positive, trials + 1, dtype=np.float64)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1, dtype=np.float64)))])
    chosen = counts.astype(np.int64)
    logs = log_factorial[trials] - log_factorial[chosen] - log_factorial[trials - chosen]
    logs = logs + counts * math.log(chance) + (trials - counts) * math.log1p(-chance)
    return float(min(1.0, np.exp(logs).sum()))


def row_medians(table: Floats) -> Floats:
    return np.asarray(np.median(table, axis=1), np.float64)


def row_means(table: Floats) -> Floats:
    return np.asarray(table.mean(axis=1), np.float64)


def block_length(count: int) -> int:
    """Return the block length of the bootstrap: neighbours are alike, but there must be at least eight blocks."""
    return max(1, min(10, count // 8))


def bootstrap(
    values: ArrayLike,
    statistic: Statistic = row_medians,
    *,
    block: int | None = None,
    repeats: int = 300,
    seed: int = _SEED,
) -> Floats:
    """Return the statistic of ``repeats`` bootstrap samples, drawn in whole blocks of neighbours.

    Of a long series each sample draws a part, so that the result spreads wider, never narrower. Empty if
    there are no values. Draws of two series with different seeds are independent, and may be divided one by one.
    """
    series = finite(values)
    if not series.size:
        return series
    length = min(block or block_length(series.size), series.size)
    blocks = max(1, min(series.size, _DRAWN) // length)
    generator = np.random.Generator(np.random.PCG64(seed))
    starts = generator.integers(0, series.size - length + 1, size=(repeats, blocks, 1))
    drawn = series[(starts + np.arange(length)).reshape(repeats, -1)]
    return statistic(drawn)


def interval(samples: ArrayLike, confidence: float = 0.95) -> Interval:
    """The middle ``confidence`` of them."""
    kept = finite(samples)
    if not kept.size:
        return Interval(math.nan, math.nan)
    edge = (1.0 - confidence) / 2.0
    low, high = np.quantile(kept, [edge, 1.0 - edge])
    return Interval(float(low), float(high))


def median_interval(values: ArrayLike, confidence: float = 0.95, block: int | None = None) -> Interval:
    """Return the confidence interval of the median, from a bootstrap over blocks."""
    return interval(bootstrap(values, row_medians, block=block, repeats=200), confidence)


def theil_sen(x: ArrayLike, y: ArrayLike) -> TrendLine:
    """Return the line whose slope is the median over all pairs of points, which tolerates 29 % of outliers.

    Long series are compared through the medians of blocks. A slope of 0.0 where fewer than two places differ.
    """
    places, values = _block_medians(x, y, _PAIRED)
    slopes = _pair_slopes(places, values)
    if not slopes.size:
        return TrendLine(0.0, median(values))
    slope = float(np.median(slopes))
    return TrendLine(slope, float(np.median(values - slope * places)))


def slope_interval(x: ArrayLike, y: ArrayLike, confidence: float = 0.95, blocks: int = 16) -> Interval:
    """Return Sen's confidence interval of the slope, over the medians of ``blocks`` blocks.

    NaN on both ends where there are fewer than five places.
    """
    places, values = _block_medians(x, y, blocks)
    count = places.size
    slopes = np.sort(_pair_slopes(places, values))
    if count < 5 or not slopes.size:
        return Interval(math.nan, math.nan)
    spread = math.sqrt(count * (count - 1) * (2 * count + 5) / 18.0)
    reach = _normal_quantile((1.0 + confidence) / 2.0) * spread
    low = max(0, math.floor((slopes.size - reach) / 2.0))
    high = min(slopes.size - 1, math.ceil((slopes.size + reach) / 2.0))
    return Interval(float(slopes[low]), float(slopes[high]))


def _block_medians(x: ArrayLike, y: ArrayLike, most: int) -> tuple[Floats, Floats]:
    """Return at most ``most`` points, each the medians of neighbours in the order of ``x``."""
    places, values = np.asarray(x, np.float64).ravel(), np.asarray(y, np.float64).ravel()
    kept = np.isfinite(places) & np.isfinite(values)
    places, values = places[kept], values[kept]
    order = np.argsort(places, kind="stable")
    places, values = places[order], values[order]
    if places.size <= most:
        return places, values
    edges = np.linspace(0, places.size, most + 1).astype(np.int64)
    parts = [slice(int(low), int(high)) for low, high in itertools.pairwise(edges)]
    return (
        np.array([np.median(places[part]) for part in parts]),
        np.array([np.median(values[part]) for part in parts]),
    )


def _pair_slopes(places: Floats, values: Floats) -> Floats:
    first, second = np.triu_indices(places.size, 1)
    run = places[second] - places[first]
    apart = run > 0
    return np.asarray((values[second] - values[first])[apart] / run[apart], np.float64)


def _normal_quantile(share: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(share)
