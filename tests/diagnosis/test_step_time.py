"""What a run is bound by is named, with its size and its cure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis import synthetic
from tests.diagnosis.synthetic import HEAVY, QUIET, Fault, bound, by_turns, every, first_batch
from tests.support.examples import scaled

from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.report import diagnose
from powertrain.diagnosis.rules import step_time, stragglers
from powertrain.diagnosis.tables.steps import Floats, StepTable
from powertrain.trace.recording import phases

FAULT = 0.030
#: What is injected, and the kind and phase that must lead.
FAULTS: dict[str, tuple[Fault, str, str]] = {
    "slow input": (bound(phases.INPUT, FAULT), "input_bound", "input"),
    "slow transfer": (bound(phases.H2D, FAULT), "transfer_bound", "h2d"),
    "slow exchange": (bound(phases.COLLECTIVE, FAULT), "collective_bound", "collective"),
    "time between steps": (bound(phases.OUTSIDE, FAULT), "outside_bound", "outside"),
    "heavy loss": (bound(phases.INSIDE, FAULT), "compute_bound", "inside"),
    "reports in every step": (bound(phases.REPORT, FAULT), "checkpoint_bound", "report"),
    "slow checkpoints": (every(20, phases.REPORT, 0.3), "checkpoint_bound", "report"),
    "slow first batch": (first_batch(1.0), "slow_first_batch", "input"),
    "spike in input each epoch": (every(25, phases.INPUT, FAULT), "periodic_spike", "input"),
    "large spike in input each epoch": (every(20, phases.INPUT, 0.3), "periodic_spike", "input"),
    "spike between steps each epoch": (every(50, phases.OUTSIDE, FAULT), "periodic_spike", "outside"),
    "small slow input": (bound(phases.INPUT, 0.007), "input_bound", "input"),
}


def everything(steps: StepTable) -> list[Finding]:
    return [*step_time.find(steps), *stragglers.find(steps)]


def wrong(findings: list[Finding]) -> list[Finding]:
    """Those that say that something should be changed."""
    return [finding for finding in findings if finding.severity != "info"]


def runs(count: int, *faults: Fault, **options: object) -> Iterator[StepTable]:
    """``count`` of them, on two and three ranks by turns."""
    for seed in range(count):
        yield synthetic.run(seed, *faults, ranks=2 + seed % 2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_alone_and_in_its_phase(name: str) -> None:
    fault, kind, phase = FAULTS[name]
    for steps in runs(200, fault):
        found = wrong(step_time.find(steps))
        assert [(one.kind, one.phase, one.ranks) for one in found] == [(kind, phase, ())]
        assert found[0].action
        assert msgspec.json.decode(msgspec.json.encode(found[0]), type=Finding) == found[0]
        assert 0.0 < found[0].cost < 1.0


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_named_on_a_machine_that_interrupts_much(name: str) -> None:
    fault, kind, phase = FAULTS[name]
    for steps in runs(10, fault, noise=HEAVY):
        assert [(one.kind, one.phase) for one in wrong(everything(steps))] == [(kind, phase)]


def test_a_healthy_run_says_which_phase_is_the_largest() -> None:
    (found,) = step_time.find(synthetic.run(1))
    assert (found.kind, found.severity, found.phase) == ("compute_bound", "info", "backward")


def test_too_small_a_share_is_no_bound() -> None:
    for steps in runs(40, bound(phases.INPUT, 0.003)):
        assert wrong(everything(steps)) == []


def test_advice_for_loading_in_the_loop_says_how_many_workers_would_hide_it() -> None:
    (found,) = wrong(step_time.find(synthetic.run(3, bound(phases.INPUT, 0.070), noise=QUIET)))
    # 70 ms to make a batch that is needed every 29 ms: three at once, and one to spare.
    assert found.evidence["workers"] == 4
    assert "num_workers=4" in found.action
    assert found.evidence["fetch"] == pytest.approx(0.070, rel=0.1)
    assert found.evidence["rest"] == pytest.approx(0.029, rel=0.1)
    assert "make it cheaper" not in found.action


def test_more_workers_than_cores_are_advised_with_a_word_about_it() -> None:
    steps = synthetic.run(3, bound(phases.INPUT, 0.070), noise=QUIET)
    (found,) = wrong(step_time.find(steps, cores=1.0))
    assert "This machine has one core for each rank" in found.action
    assert "make it cheaper instead" in found.action


def test_advice_for_loading_elsewhere_of_unknown_cost_says_how_many_times_the_workers() -> None:
    steps = synthetic.run(3, bound(phases.INPUT, 0.0285), noise=QUIET)
    (found,) = wrong(step_time.find(replace(steps, fetch=np.zeros_like(steps.fetch))))
    assert found.evidence["workers_factor"] == pytest.approx(2.0, rel=0.1)
    assert "2.0 times as many workers" in found.action


def test_advice_for_batches_that_vary_says_how_many_to_load_ahead() -> None:
    steps = synthetic.run(3, every(4, phases.INPUT, 0.066), noise=QUIET)
    # One batch ahead hides a step's worth of the long one; three of them ahead would hide it all.
    fetch = np.full_like(steps.fetch, 0.005)
    fetch[3::4] = 0.095
    (found,) = wrong(step_time.find(replace(steps, fetch=fetch)))
    assert found.kind == "input_bound"
    assert found.evidence["prefetch"] == 5
    assert "Load 5 batches ahead" in found.action


@pytest.mark.parametrize("period", [2, 3, 4])
def test_bursts_of_a_loader_with_few_workers_are_a_bound_and_no_spike(period: int) -> None:
    for steps in runs(20, every(period, phases.INPUT, 0.06)):
        assert [one.kind for one in wrong(everything(steps))] == ["input_bound"]


@pytest.mark.parametrize("fetch", [0.24, 0.0], ids=["made by three processes", "nobody knows how"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_bursts_that_come_in_another_step_on_each_rank_are_a_bound_too(ranks: int, fetch: float) -> None:
    def unaligned(times: Floats, generator: np.random.Generator) -> None:
        for rank in range(ranks):
            times[rank::3, rank, phases.INPUT] += 0.15

    for seed in range(20):
        steps = synthetic.run(seed, unaligned, ranks=ranks)
        steps.fetch[:] = fetch
        report = diagnose(steps)
        assert (report.findings[0].kind, report.findings[0].phase) == ("input_bound", "input")
        assert not any(one.kind == "alternating_straggler" for one in report.findings)


def test_batches_that_are_made_in_the_loop_and_are_slow_by_turns_are_late_by_turns() -> None:
    for seed in range(20):
        report = diagnose(synthetic.run(seed, by_turns(phases.INPUT, FAULT), ranks=3))
        assert (report.findings[0].kind, report.findings[0].phase) == ("alternating_straggler", "input")


def test_copies_from_memory_that_is_not_pinned_are_named() -> None:
    steps = synthetic.run(2, bound(phases.H2D, FAULT))
    (plain,) = wrong(step_time.find(steps))
    steps.flags[:] |= phases.PAGEABLE
    (pageable,) = wrong(step_time.find(steps))
    assert (plain.evidence["pageable"], pageable.evidence["pageable"]) == (False, True)
    assert "pin_memory=True" in pageable.action
    assert "pin_memory" not in plain.action


def test_a_spike_has_its_period_its_size_and_its_share() -> None:
    (found,) = wrong(step_time.find(synthetic.run(5, every(25, phases.OUTSIDE, 0.1), noise=QUIET)))
    assert found.evidence["period"] == 25
    assert found.evidence["time"] == pytest.approx(0.1, rel=0.1)
    assert found.cost == pytest.approx(0.1 / (0.1 + 25 * 0.0293), rel=0.15)


def test_two_periods_are_two_findings() -> None:
    for steps in runs(20, every(20, phases.INPUT, 0.1), every(30, phases.OUTSIDE, 0.05)):
        found = wrong(everything(steps))
        assert [(one.kind, one.phase, one.evidence["period"]) for one in found] == [
            ("periodic_spike", "input", 20),
            ("periodic_spike", "outside", 30),
        ]


def test_two_phases_that_grow_in_the_same_steps_are_one_finding() -> None:
    for steps in runs(20, every(20, phases.OUTSIDE, 0.1), every(20, phases.INPUT, 0.04)):
        assert [one.phase for one in wrong(everything(steps))] == ["outside"]


def test_a_wait_that_the_steps_after_it_make_up_for_is_no_spike() -> None:
    found = wrong(everything(synthetic.run(0, every(20, phases.OUTSIDE, 0.03))))
    assert "periodic_spike" in [one.kind for one in found]
    assert wrong(everything(synthetic.run(0, synthetic.waits(20, phases.OUTSIDE, 0.03)))) == []


def test_spikes_of_a_loop_whose_steps_differ_are_found_although_many_steps_are_shorter() -> None:
    def batches_of_two_sizes(times: Floats, generator: np.random.Generator) -> None:
        times[generator.random(len(times)) < 0.4] *= 0.9

    steps = synthetic.run(0, batches_of_two_sizes, every(50, phases.OUTSIDE, 0.06))
    assert "periodic_spike" in [one.kind for one in wrong(everything(steps))]


def test_long_steps_at_unequal_distances_are_no_periodic_spike() -> None:
    for seed in range(40):
        steps = synthetic.run(seed)
        rows = np.random.default_rng(seed).choice(np.arange(20, 200), 6, replace=False)
        steps.phases[rows, :, phases.OUTSIDE] += 0.2
        assert wrong(everything(steps)) == []


def test_steps_that_stand_for_many_say_nothing_about_periods() -> None:
    steps = synthetic.run(1, every(10, phases.OUTSIDE, 0.1))
    thinned = replace(steps, weight=np.full(len(steps), 5.0), numbers=steps.numbers * 5)
    assert [one.kind for one in wrong(everything(steps))] == ["periodic_spike"]
    assert [one.kind for one in wrong(everything(thinned))] == ["outside_bound"]


def test_a_spike_of_one_rank_names_it_and_not_those_that_wait() -> None:
    for steps in runs(30, every(25, phases.OUTSIDE, 0.05, rank=1)):
        assert [(one.kind, one.phase, one.ranks) for one in wrong(everything(steps))] == [
            ("periodic_spike", "outside", (1,))
        ]


def test_a_slow_first_batch_of_one_rank_names_it() -> None:
    for steps in runs(30, first_batch(1.0, rank=1)):
        (found,) = wrong(everything(steps))
        assert (found.kind, found.ranks, found.hosts) == ("slow_first_batch", (1,), ("host-a",))
        assert "rank 1 on host-a" in found.summary


def test_one_rank_that_saves_for_all_is_named_with_advice_on_how_often_to_save() -> None:
    for steps in runs(30, every(10, phases.REPORT, 0.1, rank=0)):
        (found,) = wrong(everything(steps))
        assert (found.kind, found.ranks, found.evidence["every"]) == ("checkpoint_bound", (0,), 10)
        assert 60 <= found.evidence["every_wanted"] <= 80
        assert f"every {found.evidence['every_wanted']} steps" in found.action


def test_one_long_checkpoint_is_not_what_a_run_is_bound_by() -> None:
    steps = synthetic.run(1)
    steps.phases[100, :, phases.REPORT] += 5.0
    assert wrong(everything(steps)) == []


def test_ranks_that_wait_in_report_for_a_late_one_are_its_echo() -> None:
    """With ``report(barrier=True)`` behind the optimizer the others wait there, not at the exchange."""
    steps = synthetic.run(4, noise=QUIET)
    steps.phases[:, 1, phases.OPTIMIZER] += FAULT
    steps.phases[:, 0, phases.REPORT] += FAULT
    assert [(one.kind, one.ranks) for one in wrong(everything(steps))] == [("optimizer_straggler", (1,))]


def test_a_phase_that_was_not_seen_is_said_and_nothing_is_concluded_from_it() -> None:
    found = everything(synthetic.run(1, synthetic.without(phases.FORWARD)))
    assert [(one.kind, one.phase) for one in found] == [("incomplete", "forward")]


def test_the_users_line_is_reported_where_it_is_known() -> None:
    (found,) = wrong(
        step_time.find(synthetic.run(1, bound(phases.OUTSIDE, FAULT)), {"outside": "train.py:31 in log"})
    )
    assert "train.py:31 in log" in found.summary
    assert found.evidence["line"] == "train.py:31 in log"


@pytest.mark.parametrize("count", range(20))
@pytest.mark.parametrize("ranks", [1, 3])
def test_short_runs_are_incomplete_and_nothing_else(count: int, ranks: int) -> None:
    steps = synthetic.run(count, first_batch(1.0), bound(phases.INPUT, FAULT), ranks=ranks, steps=count)
    assert [one.kind for one in everything(steps)] == ["incomplete"]


@settings(max_examples=scaled(25))
@given(
    st.sampled_from([fault for fault, _, _ in FAULTS.values()]),
    st.integers(0, 10_000),
    st.floats(1.0, 20.0),
)
def test_a_machine_that_is_slower_throughout_has_the_same_findings(
    fault: Fault, seed: int, factor: float
) -> None:
    steps = synthetic.run(seed, fault)
    # Long enough a first batch is slow by the clock, whatever a step takes.
    before, after = (
        {(one.kind, one.phase) for one in step_time.find(run) if one.kind != "slow_first_batch"}
        for run in (steps, synthetic.scaled(steps, factor))
    )
    assert before == after


@settings(max_examples=scaled(40))
@given(
    st.integers(0, 60),
    st.integers(0, 3),
    st.sampled_from([0.0, float("nan"), float("inf"), -1.0, 1e30]),
    st.integers(0, 10_000),
)
def test_whatever_was_recorded_nothing_raises(count: int, ranks: int, bad: float, seed: int) -> None:
    steps = synthetic.run(seed, ranks=max(1, ranks), steps=count)
    if not ranks:
        steps = synthetic.permuted(replace(steps, ranks=()), [])
    generator = np.random.default_rng(seed)
    for table in (steps.phases, steps.device, steps.fetch):
        table[generator.random(table.shape) < 0.3] = bad
    steps.flags[:] = generator.integers(0, 8, steps.flags.shape)
    for finding in everything(steps):
        assert finding.summary


def test_zeros_alone_are_no_run() -> None:
    steps = synthetic.run(1)
    steps.phases[:] = 0.0
    assert [one.kind for one in everything(steps)] == ["incomplete"]
