"""A rank that has returned while others wait for it is judged at once; a collective that timed out names its cause."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.run.test_watchdog import IN_ALL_REDUCE, IN_LOCK, Run, at
from tests.support.examples import scaled

from powertrain.run.health import failures
from powertrain.run.health.hang_report import explain
from powertrain.run.health.waits import RankState, find_doomed
from powertrain.run.health.watchdog import Act, HangNotice
from powertrain.wire.from_worker import Beat
from powertrain.wire.values import ErrorReport, Where


def run_in_which_rank_1_returned(step: float = 0.2, **more: Any) -> tuple[Run, float]:
    """Ranks 0 and 2 are in an all_reduce that rank 1 did not begin before it returned."""
    run = Run(3, **more)
    run.go(100 * step, step=step)
    for rank in (0, 2):
        run.set(rank, where=IN_ALL_REDUCE, collectives=run.ranks[rank].collectives + 1)
    run.set(1, phase="end")
    run.dog.on_rank_ended(1, run.now)
    return run, run.now


@pytest.mark.parametrize("step", [0.2, 10.0])
@pytest.mark.parametrize("timeout", [None, 3600.0])
def test_a_wait_for_a_returned_rank_is_acted_on_in_ten_seconds(step: float, timeout: float | None) -> None:
    run, returned = run_in_which_rank_1_returned(step, timeout=timeout)
    run.go(15, moving=())
    noticed, _ = run.only(HangNotice)
    acted, act = run.only(Act)
    assert noticed - returned == pytest.approx(5.0, abs=1.2)
    assert acted - returned == pytest.approx(10.0, abs=1.2)
    assert noticed < acted
    assert (act.ranks, act.waiting) == ((1,), (0, 2))


def test_the_users_own_shorter_timeout_still_counts() -> None:
    run, returned = run_in_which_rank_1_returned(timeout=2.0)
    run.go(4, moving=())
    assert run.only(Act)[0] - returned == pytest.approx(2.5, abs=1.0)


def test_a_wait_for_a_returned_rank_before_the_first_step_is_acted_on_as_soon() -> None:
    run = Run(2)
    run.go(60, moving=())  # both set up for a minute
    run.seen.clear()
    run.set(0, where=IN_ALL_REDUCE, collectives=1)
    run.set(1, phase="end")
    run.dog.on_rank_ended(1, run.now)
    returned = run.now
    run.go(15, moving=())
    assert run.only(Act)[0] - returned == pytest.approx(10.0, abs=1.5)


@pytest.mark.parametrize(
    "waiting",
    [
        {"where": at(60), "collectives": 501},
        {"where": at(41, "collective", "recv"), "collectives": 501},
        {"where": IN_ALL_REDUCE, "collectives": 100},
    ],
    ids=["computes", "receives from one rank", "is in a collective of another group"],
)
def test_what_may_still_end_is_not_acted_on_before_two_minutes(waiting: dict[str, Any]) -> None:
    run = Run(3)
    run.go(20)
    assert run.ranks[0].collectives == 100
    run.set(0, **waiting)
    run.set(1, phase="end")
    run.dog.on_rank_ended(1, run.now)
    run.go(60, moving=(2,))
    assert not run.all(Act)


def test_a_count_from_before_the_end_of_the_function_proves_nothing() -> None:
    run = Run(2)
    run.go(20)
    run.set(0, where=IN_ALL_REDUCE, collectives=101)
    run.set(1, beats=False)
    run.dog.on_rank_ended(1, run.now)
    run.go(60, moving=())
    assert run.all(HangNotice)
    assert not run.all(Act)


def test_a_collective_that_timed_out_is_blamed_on_the_rank_that_never_came() -> None:
    run = Run(3)
    run.go(20)
    for rank in (0, 2):
        run.set(rank, where=IN_ALL_REDUCE, collectives=101)
    run.set(1, where=IN_LOCK)
    run.go(2, moving=())
    act = run.dog.behind_timeout(0, run.now)
    assert act is not None
    assert (act.ranks, act.waiting) == ((1,), (0, 2))
    verdict = explain(act.states, {}, act.seconds)
    assert verdict.frames == {1: IN_LOCK.frame}
    assert "Rank 1 has not entered the all_reduce that ranks 0 and 2 wait in" in verdict.message


def test_a_collective_that_timed_out_on_all_ranks_is_blamed_on_no_rank() -> None:
    run = Run(2)
    run.go(20)
    run.set(0, 1, where=IN_ALL_REDUCE, collectives=101)
    run.go(2, moving=())
    assert run.dog.behind_timeout(0, run.now) is None


@pytest.mark.parametrize(
    ("message", "is_timeout"),
    [
        ("[unbound_buffer.cc:78] Timed out waiting 8000ms for recv operation to complete", True),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6)", True),
        ("Timed out waiting for the licence server", False),
    ],
)
def test_timeouts_of_collectives_are_distinguished_from_others(message: str, is_timeout: bool) -> None:
    report = ErrorReport(type="RuntimeError", message=message, traceback="")
    assert failures.is_collective_timeout(report) is is_timeout


def state(rank: int, over: bool, phase: str, collectives: int, where: Where | None) -> RankState:
    beat = Beat(reports=1, steps=1, batches=1, idle=0.0, phase=phase, collectives=collectives, where=where)
    return RankState(rank, beat, 0.0, 0.0, over=over, collectives=collectives)


PLACES = st.sampled_from([None, at(10), IN_ALL_REDUCE, at(41, "collective", "recv"), at(20, "loader")])
STATES = st.lists(
    st.tuples(st.booleans(), st.sampled_from(["training", "end"]), st.integers(-1, 5), PLACES),
    min_size=1,
    max_size=6,
).map(lambda rows: [state(rank, *row) for rank, row in enumerate(rows)])


@settings(max_examples=scaled(200))
@given(STATES)
def test_a_rank_is_doomed_only_in_a_collective_that_a_returned_rank_did_not_begin(
    states: list[RankState],
) -> None:
    returned = [s.collectives for s in states if s.over and s.beat and s.beat.phase == "end"]
    known = [count for count in returned if count >= 0]
    for rank in find_doomed(states):
        doomed = states[rank]
        assert not doomed.over
        assert doomed.inside == "collective"
        assert doomed.collectives > min(known)


@settings(max_examples=scaled(100))
@given(STATES, st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_are_looked_at_makes_no_difference(
    states: list[RankState], random: Any
) -> None:
    shuffled = list(states)
    random.shuffle(shuffled)
    assert find_doomed(shuffled) == find_doomed(states)
