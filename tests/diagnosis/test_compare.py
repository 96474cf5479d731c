"""Two runs: better, worse or the same, said only where the distributions bear it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis import synthetic
from tests.support.examples import scaled

from powertrain.diagnosis.compare import (
    EXIT_CODES,
    LEAST_STEPS,
    TOLERANCE,
    Comparison,
    PhaseChange,
    compare,
    render_comparison,
)
from powertrain.diagnosis.tables.steps import StepTable
from powertrain.trace.recording import phases


def slower(seed: int, factor: float, **options: object) -> StepTable:
    return synthetic.scaled(synthetic.run(seed, **options), factor)  # type: ignore[arg-type]


def test_two_runs_of_the_same_program_are_the_same() -> None:
    for seed in range(20):
        found = compare(synthetic.run(seed), synthetic.run(1000 + seed))
        assert found.verdict == "same", (seed, found)
        assert found.low <= found.ratio <= found.high


@pytest.mark.parametrize("seed", range(5))
def test_a_tenth_slower_is_worse_and_a_tenth_faster_better(seed: int) -> None:
    usual, slow = synthetic.run(seed), slower(100 + seed, 1.1)
    worse, better = compare(usual, slow), compare(slow, usual)
    assert (worse.verdict, better.verdict) == ("worse", "better")
    assert worse.ratio == pytest.approx(1.1, rel=0.02)
    assert better.ratio == pytest.approx(1 / 1.1, rel=0.02)
    assert worse.low > 1 + TOLERANCE
    assert worse.confidence > 0.95


def test_a_difference_within_three_percent_is_never_worse() -> None:
    for seed in range(12):
        assert compare(synthetic.run(seed), slower(500 + seed, 1.02)).verdict == "same"


def test_noise_that_could_be_either_is_the_same_without_confidence() -> None:
    generator = np.random.default_rng(0)
    runs = []
    for factor in (1.0, 1.05):
        steps = synthetic.run(1, steps=40)
        noise = np.exp(generator.normal(0, 1.0, (40, 1, 1)))
        runs.append(replace(steps, phases=steps.phases * noise * factor))
    found = compare(runs[0], runs[1])
    assert found.verdict == "same"
    assert found.confidence < 0.95
    assert "not significantly different from" in render_comparison(found)


def test_the_phase_that_changed_most_comes_first_with_its_verdict() -> None:
    found = compare(synthetic.run(0), synthetic.run(1, synthetic.bound(phases.INPUT, 0.01)))
    assert (found.phases[0].phase, found.phases[0].verdict) == ("input", "worse")
    assert found.phases[0].after - found.phases[0].before == pytest.approx(0.01, rel=0.1)
    assert [one.phase for one in found.phases if one.verdict != "same"] == ["input"]
    assert "h2d" not in [one.phase for one in found.phases]


def test_what_comes_every_few_steps_is_seen_though_no_median_moves() -> None:
    found = compare(
        synthetic.run(0, steps=400), synthetic.run(1, synthetic.every(10, phases.REPORT, 0.1), steps=400)
    )
    assert (found.verdict, found.by) == ("worse", "mean")
    assert found.phases[0].phase == "report"
    assert found.ratio > 1.2
    assert "in the mean" in render_comparison(found)


def test_one_long_hiccup_changes_no_verdict() -> None:
    for place in (50, 120, 199):
        steps = synthetic.run(1)
        times = steps.phases.copy()
        times[place, :, phases.OUTSIDE] += 5.0
        assert compare(synthetic.run(0), replace(steps, phases=times)).verdict == "same"


def test_batches_of_other_sizes_are_compared_by_the_sample() -> None:
    steps = synthetic.run(1)
    doubled = replace(synthetic.scaled(steps, 1.5), samples=steps.samples * 2)
    found = compare(synthetic.run(0), doubled)
    assert (found.verdict, found.per) == ("better", "sample")
    assert found.ratio == pytest.approx(0.75, rel=0.03)
    assert "64 samples in the first run and 128" in found.notes[0]


def test_another_number_of_ranks_is_said() -> None:
    found = compare(synthetic.run(0, ranks=2), replace(synthetic.run(1, ranks=3), samples=np.zeros((200, 3))))
    assert found.notes[0] == "The first run has 2 ranks and the second 3."
    assert "Only one of the runs" in found.notes[1]


SWAPPED = {"better": "worse", "worse": "better", "same": "same", "unknown": "unknown"}


def steady(factor: float) -> StepTable:
    """A run whose steps are all alike: its draws lie exactly where its medians do."""
    return synthetic.scaled(synthetic.run(0, noise=synthetic.Noise(jitter=0.0, hiccups=0.0)), factor)


@st.composite
def runs(draw: st.DrawFn) -> StepTable:
    """Faults about as large as the difference that does not count, steady runs exactly beside it, other batches."""
    factor = draw(st.sampled_from([1.0, 1 / (1 + TOLERANCE), 1 + TOLERANCE, 1.05, 1.5, 3.0]))
    if draw(st.booleans()):
        return steady(factor)
    faults = [
        synthetic.bound(draw(st.sampled_from(range(phases.COUNT))), draw(st.floats(0, 0.003))),
        synthetic.every(10, phases.REPORT, draw(st.sampled_from([0.0, 0.01, 0.1]))),
    ]
    steps = synthetic.run(
        draw(st.integers(0, 1000)), *faults, ranks=draw(st.integers(1, 3)), steps=draw(st.integers(30, 150))
    )
    size = draw(st.sampled_from([1.0, 1.0, 1.01, 2.0]))
    return replace(synthetic.scaled(steps, factor), samples=steps.samples * size)


def swapped(change: PhaseChange) -> PhaseChange:
    return PhaseChange(
        change.phase, change.after, change.before, -change.high, -change.low, SWAPPED[change.verdict]
    )


@given(runs(), runs())
@settings(max_examples=scaled(60))
def test_swapped_runs_get_swapped_words_in_all_and_in_every_phase(a: StepTable, b: StepTable) -> None:
    there, back = compare(a, b), compare(b, a)
    assert back.verdict == SWAPPED[there.verdict]
    assert (back.by, back.per, back.confidence) == (there.by, there.per, there.confidence)
    assert back.phases == tuple(swapped(change) for change in there.phases)
    if there.verdict != "unknown":
        assert back.ratio * there.ratio == pytest.approx(1)
        assert (back.low * there.high, back.high * there.low) == pytest.approx((1, 1))


def test_a_phase_that_grew_within_a_run_thrice_as_slow_is_distinguished_from_either_side() -> None:
    # 1.2 ms are 4 % of the faster run's step, and not much more than 1 % of the slower one's
    fast, slow = steady(1.0), steady(3.0)
    times = slow.phases.copy()
    times[:, :, phases.INPUT] = fast.phases[:, :, phases.INPUT] + 0.0012
    slow = replace(slow, phases=times)
    words = [
        {change.phase: change.verdict for change in compare(*pair).phases}["input"]
        for pair in ((fast, slow), (slow, fast))
    ]
    assert words == ["worse", "better"]


@pytest.mark.parametrize("count", [0, 1, LEAST_STEPS - 1])
def test_too_few_steps_are_not_compared(count: int) -> None:
    found = compare(synthetic.run(0), synthetic.run(1, steps=count))
    assert found.verdict == "unknown"
    assert f"needs {LEAST_STEPS}" in found.notes[0]
    assert "cannot be compared" in render_comparison(found, "a", "b")


def test_ci_can_tell_the_verdicts_by_exit_codes_of_their_own() -> None:
    codes = {verdict: Comparison(verdict=verdict).exit_code for verdict in EXIT_CODES}
    assert codes == {"better": 0, "same": 0, "worse": 3, "unknown": 4}


@given(
    st.sampled_from([np.nan, np.inf, 0.0, -1.0]),
    st.sampled_from(["phases", "samples", "start", "device"]),
    st.floats(0, 1),
)
@settings(max_examples=scaled(15))
def test_no_number_makes_it_raise(value: float, column: str, part: float) -> None:
    steps = synthetic.run(0, steps=60)
    values = getattr(steps, column).astype(float).copy()
    values[np.random.default_rng(0).random(values.shape) < part] = value
    broken = replace(steps, **{column: values})
    for found in (compare(steps, broken), compare(broken, steps)):
        assert msgspec.json.decode(msgspec.json.encode(found), type=Comparison) == found


def test_a_long_run_takes_no_long_time_and_misses_no_rhythm() -> None:
    usual, spiky = (
        synthetic.run(seed, *faults, ranks=1, steps=40_000)
        for seed, faults in ((0, ()), (1, (synthetic.every(20, phases.REPORT, 0.1),)))
    )
    found = compare(usual, spiky)
    assert (found.verdict, found.by) == ("worse", "mean")
    assert found.ratio == pytest.approx(1 + 0.005 / usual.total.mean(), rel=0.02)
