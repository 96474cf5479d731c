"""Who holds the others up is named, with the phase; those that wait for it are not."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.diagnosis import synthetic
from tests.diagnosis.synthetic import HEAVY, QUIET, by_turns, late, slow_host
from tests.support.examples import scaled

from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.rules import step_time, stragglers
from powertrain.diagnosis.tables.steps import StepTable
from powertrain.trace.recording import phases

FAULT = 0.030
PHASES = sorted(stragglers.KINDS)
NAMES = [phases.NAMES[phase] for phase in PHASES]


def wrong(steps: StepTable) -> list[Finding]:
    """All that says that something should be changed, of stragglers and of the run as a whole."""
    found = [*step_time.find(steps), *stragglers.find(steps)]
    return [finding for finding in found if finding.severity != "info"]


@pytest.mark.parametrize("phase", PHASES, ids=NAMES)
def test_a_late_rank_is_named_with_its_phase(phase: int) -> None:
    for seed in range(200):
        ranks, rank = 2 + seed % 2, seed % (2 + seed % 2)
        (found,) = stragglers.find(synthetic.run(seed, late(rank, phase, FAULT), ranks=ranks))
        assert (found.kind, found.phase, found.ranks) == (
            stragglers.KINDS[phase],
            phases.NAMES[phase],
            (rank,),
        )
        assert found.hosts == ("host-a",)
        assert msgspec.json.decode(msgspec.json.encode(found), type=Finding) == found
        assert f"ank {rank} on host-a" in found.summary
        assert found.evidence["low"] <= FAULT * 1.05
        assert found.evidence["high"] >= FAULT * 0.95
        assert found.cost == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("phase", PHASES, ids=NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_wait_of_the_others_is_reported_under_its_cause_and_not_beside_it(phase: int, ranks: int) -> None:
    for seed in range(5):
        (found,) = wrong(synthetic.run(seed, late(1, phase, FAULT), ranks=ranks, noise=HEAVY))
        assert (found.kind, found.ranks) == (stragglers.KINDS[phase], (1,))
        (echo,) = found.echoes
        assert (echo.phase, echo.ranks) == ("collective", tuple(rank for rank in range(ranks) if rank != 1))


@pytest.mark.parametrize("phase", PHASES, ids=NAMES)
def test_a_rank_that_is_a_sixth_of_a_step_late_is_found_and_one_that_is_a_twentieth_is_not(
    phase: int,
) -> None:
    for seed in range(20):
        (found,) = wrong(synthetic.run(seed, late(1, phase, 0.0055)))
        assert (found.kind, found.ranks) == (stragglers.KINDS[phase], (1,))
        assert wrong(synthetic.run(seed, late(1, phase, 0.0015))) == []


@pytest.mark.parametrize("phase", PHASES, ids=NAMES)
def test_ranks_late_by_turns_are_distinguished_from_one_that_always_is(phase: int) -> None:
    for seed in range(40):
        ranks = 2 + seed % 2
        (found,) = wrong(synthetic.run(seed, by_turns(phase, FAULT), ranks=ranks))
        assert (found.kind, found.phase) == ("alternating_straggler", phases.NAMES[phase])
        assert found.ranks == tuple(range(ranks))


def test_turns_that_are_taken_strictly_are_found_too() -> None:
    for rows in (200, 201):
        steps = synthetic.run(7, ranks=2, steps=rows, noise=QUIET)
        for rank in range(2):
            steps.phases[rank::2, rank, phases.FORWARD] += FAULT
        (found,) = stragglers.find(steps)
        assert (found.kind, found.phase) == ("alternating_straggler", "forward")


def test_a_rank_late_in_somewhat_more_than_half_of_the_steps_is_that_rank_not_turns() -> None:
    def inject(times, generator):  # type: ignore[no-untyped-def]
        rows = generator.random(len(times)) < 0.75
        times[rows, 1, phases.FORWARD] += FAULT

    for seed in range(20):
        (found,) = wrong(synthetic.run(seed, inject, ranks=3))
        assert (found.kind, found.ranks) == ("forward_straggler", (1,))
        assert 0.6 < found.evidence["late_in"] < 0.9


def test_all_ranks_of_one_host_that_are_late_are_a_slow_node() -> None:
    for seed in range(20):
        steps = synthetic.run(
            seed, slow_host([1, 2], 1.5), ranks=3, hosts=["host-a", "host-b", "host-b"], noise=HEAVY
        )
        (found,) = wrong(steps)
        assert (found.kind, found.ranks, found.hosts) == ("slow_node", (1, 2), ("host-b",))
        assert "host-b" in found.summary
        assert "host-b" in found.action


def test_ranks_of_one_host_that_all_read_slowly_are_a_slow_node_too() -> None:
    faults = [late(rank, phases.INPUT, FAULT) for rank in (2, 3)]
    (found,) = wrong(synthetic.run(1, *faults, ranks=4, hosts=["host-a", "host-a", "host-b", "host-b"]))
    assert (found.kind, found.phase, found.ranks) == ("slow_node", "input", (2, 3))


def test_one_rank_alone_on_its_host_is_a_slow_node_only_where_it_is_slow_all_over() -> None:
    hosts = ["host-a", "host-b"]
    for seed in range(20):
        (everywhere,) = wrong(synthetic.run(seed, slow_host([1], 1.5), hosts=hosts))
        (one_phase,) = wrong(synthetic.run(seed, late(1, phases.FORWARD, FAULT), hosts=hosts))
        assert (everywhere.kind, everywhere.hosts) == ("slow_node", ("host-b",))
        assert (one_phase.kind, one_phase.hosts) == ("forward_straggler", ("host-b",))


def test_a_rank_that_computes_slowly_on_a_shared_host_is_no_slow_node() -> None:
    (found,) = wrong(synthetic.run(1, slow_host([1], 1.5), ranks=3))
    assert (found.kind, found.ranks) == ("backward_straggler", (1,))
    assert set(found.evidence["by_phase"]) == {"forward", "backward", "optimizer"}


def test_two_ranks_late_in_different_phases_are_two_findings_and_the_later_leads() -> None:
    faults = [late(1, phases.INPUT, 0.035), late(2, phases.FORWARD, 0.025)]
    first, second = stragglers.find(synthetic.run(3, *faults, ranks=4))
    assert (first.kind, first.ranks) == ("input_straggler", (1,))
    assert (second.kind, second.ranks, second.severity) == ("forward_straggler", (2,), "info")
    assert "rank 1" in second.summary


def test_two_ranks_as_late_as_each_other_are_not_both_hidden_behind_the_other() -> None:
    faults = [late(1, phases.INPUT, FAULT), late(2, phases.FORWARD, FAULT)]
    for seed in range(10):
        found = stragglers.find(synthetic.run(seed, *faults, ranks=4))
        assert {one.ranks for one in found} == {(1,), (2,)}
        assert found[0].severity == "critical"
        assert found[0].cost == pytest.approx(0.5, abs=0.1)
        assert "with all late ranks cured a step would take" in found[0].action


def test_a_late_rank_among_many_that_are_interrupted_often_is_found() -> None:
    for seed in range(20):
        (found,) = wrong(synthetic.run(seed, late(5, phases.FORWARD, 0.006), ranks=8, noise=HEAVY))
        assert (found.kind, found.ranks) == ("forward_straggler", (5,))


def test_ranks_that_never_meet_are_compared_by_what_they_do() -> None:
    steps = synthetic.run(5, late(1, phases.FORWARD, FAULT), ranks=3)
    steps.phases[:, :, phases.COLLECTIVE] = 0.0
    (found,) = stragglers.find(steps)
    assert (found.kind, found.ranks, found.echoes) == ("forward_straggler", (1,), ())


def test_a_late_rank_is_found_by_the_time_on_its_device() -> None:
    steps = synthetic.run(2, late(1, phases.BACKWARD, FAULT), ranks=3)
    steps.device[:, :, phases.ON_DEVICE] = steps.phases[:, :, phases.ON_DEVICE]
    total = steps.phases.sum(axis=2)
    steps.phases[:] = 0.0
    # The threads launch and then wait for their devices where they read the loss.
    steps.phases[:, :, phases.FORWARD] = 0.002
    steps.phases[:, :, phases.INSIDE] = total - 0.002
    steps.flags[:] = phases.TIMED_ON_DEVICE
    (found,) = wrong(steps)
    assert (found.kind, found.ranks) == ("backward_straggler", (1,))


def test_one_rank_holds_nothing_up() -> None:
    assert stragglers.find(synthetic.run(1, late(0, phases.FORWARD, FAULT), ranks=1)) == []


@settings(max_examples=scaled(40))
@given(
    st.sampled_from(PHASES),
    st.permutations(range(4)),
    st.integers(0, 10_000),
    st.sampled_from(["one", "two", "turns", "host", "none"]),
)
def test_ranks_in_another_order_are_named_in_that_order(
    phase: int, order: list[int], seed: int, what: str
) -> None:
    faults = {
        "one": [late(1, phase, FAULT)],
        "two": [late(1, phase, FAULT), late(3, phases.INPUT, FAULT * 0.8)],
        "turns": [by_turns(phase, FAULT)],
        "host": [slow_host([2, 3], 1.4)],
        "none": [],
    }[what]
    steps = synthetic.run(seed, *faults, ranks=4, hosts=["host-a", "host-a", "host-b", "host-b"])
    place_of = {place: rank for rank, place in enumerate(order)}

    def named(findings: list[Finding], rename: dict[int, int]) -> list[tuple[object, ...]]:
        return sorted(
            (one.kind, one.phase, sorted(rename[rank] for rank in one.ranks), one.hosts, round(one.cost, 9))
            for one in findings
        )

    same = {rank: rank for rank in range(4)}
    before, after = stragglers.find(steps), stragglers.find(synthetic.permuted(steps, order))
    assert named(before, place_of) == named(after, same)
    assert bool(before) == (what != "none")
