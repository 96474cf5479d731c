"""Statistics on which findings rest: right on known series, and never surprised by what they are given."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.diagnosis.tables import statistics

numbers = st.floats(-1e6, 1e6)
series = st.lists(numbers, max_size=60)
anything = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=40)


def noise(seed: int, count: int, spread: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, spread, count)


@given(series, st.integers(1, 80))
def test_a_running_median_is_as_long_as_its_series_and_stays_within_it(
    values: list[float], window: int
) -> None:
    smooth = statistics.running_median(values, window)
    assert len(smooth) == len(values)
    if values:
        assert min(values) <= smooth.min()
        assert smooth.max() <= max(values)


def test_a_running_median_is_the_median_of_the_neighbours() -> None:
    assert statistics.running_median([1, 9, 2, 3, 4], 3).tolist() == [2, 2, 3, 3, 3]


def test_the_spread_of_normal_noise_is_its_standard_deviation_whatever_a_few_values_do() -> None:
    values = noise(1, 5000, 2.0)
    values[:500] = 1e9
    assert statistics.mad(values) == pytest.approx(2.0, rel=0.2)


@given(anything)
def test_nothing_raises_whatever_the_values_are(values: list[float]) -> None:
    assert math.isfinite(statistics.median([value for value in values if abs(value) < 1e300]))
    small = [value if abs(value) < 1e100 or not math.isfinite(value) else 0.0 for value in values]
    statistics.mad(small)
    statistics.quantile(small, 0.95)
    statistics.theil_sen(range(len(small)), small)
    statistics.slope_interval(range(len(small)), small)
    statistics.median_interval(small)


def test_the_sign_test_is_the_exact_tail_of_the_binomial_distribution() -> None:
    assert statistics.sign_test(8, 10) == pytest.approx((45 + 10 + 1) / 1024)
    assert statistics.sign_test(3, 3, 0.1) == pytest.approx(1e-3)
    assert statistics.sign_test(0, 10) == 1.0
    assert statistics.sign_test(11, 10) == 0.0


@given(st.integers(0, 40), st.integers(0, 40), st.floats(0.0, 1.0))
def test_a_tail_is_a_probability_and_falls_with_the_count(positive: int, trials: int, chance: float) -> None:
    tail = statistics.sign_test(positive, trials, chance)
    assert 0.0 <= tail <= 1.0
    assert statistics.sign_test(positive + 1, trials, chance) <= tail + 1e-12


def test_an_interval_of_the_median_holds_it_about_as_often_as_it_says() -> None:
    held = sum(not statistics.median_interval(noise(seed, 200)).excludes(0.0) for seed in range(100))
    assert held >= 88


def test_the_same_values_always_give_the_same_interval() -> None:
    values = noise(3, 300)
    assert statistics.median_interval(values) == statistics.median_interval(values)


def test_a_bootstrap_of_a_long_series_stays_small() -> None:
    draws = statistics.bootstrap(noise(4, 100_000), repeats=50)
    assert draws.shape == (50,)
    assert statistics.interval(draws).excludes(0.2)


def test_windows_show_what_comes_every_few_values_and_not_what_comes_once() -> None:
    bursts = np.tile([0.0, 0.0, 3.0], 40)
    bursts[50] = 1e6
    assert statistics.median(statistics.window_means(bursts, 12)) == pytest.approx(1.0)


@given(series, st.integers(1, 30))
def test_windows_are_whole_and_follow_each_other(values: list[float], width: int) -> None:
    means, medians = statistics.window_means(values, width), statistics.window_medians(values, width)
    assert len(means) == len(medians) == (len(values) // min(width, len(values)) if values else 0)
    assert medians.tolist() == [
        pytest.approx(np.median(values[start * min(width, len(values)) :][: min(width, len(values))]))
        for start in range(len(medians))
    ]


@given(st.floats(-100, 100), st.floats(-100, 100), st.integers(2, 50))
def test_a_line_is_found_exactly(slope: float, intercept: float, count: int) -> None:
    x = np.arange(count)
    line = statistics.theil_sen(x, slope * x + intercept)
    assert line.slope == pytest.approx(slope, abs=1e-6)
    assert line.intercept == pytest.approx(intercept, abs=1e-4)


def test_a_slope_is_found_among_outliers_and_its_interval_holds_it() -> None:
    x = np.arange(1000.0)
    y = 0.5 * x + noise(6, 1000, 20.0)
    y[::7] += 1e4
    assert statistics.theil_sen(x, y).slope == pytest.approx(0.5, rel=0.05)
    found = statistics.slope_interval(x, y)
    assert found.low <= 0.5 <= found.high
    assert found.excludes(0.0)


def test_noise_has_no_slope() -> None:
    assert not any(
        statistics.slope_interval(range(200), noise(seed, 200), confidence=0.999).excludes(0.0)
        for seed in range(100)
    )
