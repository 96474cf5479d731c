"""Where the seconds of a start went: phases add up, whatever order messages come in, and the right rank is named."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.engine.base import Slot, Started
from powertrain.run import events as ev
from powertrain.run.startup import report, timeline
from powertrain.run.startup.recorder import StartupRecorder, fact_of
from powertrain.run.startup.timeline import AttemptTimes, Leg, RankStart, phases_of
from powertrain.wire.from_worker import FirstStep

moments = st.floats(0, 1e6)
#: Times of another machine's clock, which may be set back or broken.
durations = st.one_of(st.floats(-10, 1e6), st.just(math.nan), st.just(math.inf))
legs = st.builds(
    Leg,
    st.one_of(st.none(), moments),
    st.sampled_from(timeline.PHASES),
    st.dictionaries(st.sampled_from(timeline.PHASES), durations, max_size=4),
)


@given(moments, st.lists(legs, max_size=8), moments)
def test_phases_add_up_to_the_time_between_begin_and_end_and_none_is_negative(
    begun: float, whole: list[Leg], end: float
) -> None:
    phases = phases_of(begun, whole, end)
    at = begun
    for leg in whole:
        at = max(at, end if leg.until is None else leg.until)
        if leg.until is None:
            break
    assert math.fsum(phases.values()) == pytest.approx(at - begun, abs=1e-6)
    assert all(seconds >= 0 for seconds in phases.values())


ranks = st.builds(
    RankStart,
    started=st.none() | moments,
    greeted=st.none() | moments,
    awaited=st.dictionaries(st.sampled_from([timeline.IMPORTS, timeline.SERVER]), durations),
    done=st.none() | moments,
    own=st.dictionaries(st.sampled_from([timeline.FUNCTION, timeline.DATA, timeline.FIRST_STEP]), durations),
    has_stepped=st.booleans(),
)
starts = st.builds(
    AttemptTimes,
    begun=moments,
    ranks=st.lists(ranks, min_size=1, max_size=5),
    opening=st.dictionaries(st.sampled_from([timeline.IMPORTS, timeline.DATASETS]), durations),
    asked=st.none() | moments,
    granted=st.none() | moments,
    trained=st.none() | moments,
)


@given(starts, moments)
def test_a_start_can_be_reported_from_any_records_in_any_order(start: AttemptTimes, now: float) -> None:
    fact = fact_of(start, 3, now)
    for phases in start.by_rank(now):
        assert all(seconds >= 0 for seconds in phases.values())
        assert list(phases) == [name for name in timeline.PHASES if name in phases]
    assert all(seconds >= 0 for seconds in fact.path.values())
    assert fact.ranks == tuple(range(len(start.ranks)))
    assert ev.decode(ev.encode(fact)) == fact
    assert report.line(fact)
    assert len(report.table(fact)) == len(fact.phases) + 2


# --------------------------------------------------------------------------- one start by hand


def own(setup: float = 0.0, data: float = 0.0, step: float = 0.0, function: float = 0.0) -> dict[str, float]:
    return {
        timeline.FUNCTION: function,
        timeline.SET_UP: setup,
        timeline.DATA: data,
        timeline.FIRST_STEP: step,
    }


def start_of(*of_ranks: RankStart, **more: Any) -> AttemptTimes:
    fields: dict[str, Any] = {"begun": 0.0, "asked": 1.0, "granted": 1.5, "trained": 4.0}
    return AttemptTimes(ranks=list(of_ranks), **{**fields, **more})


def test_every_second_of_a_rank_belongs_to_the_phase_in_which_it_went() -> None:
    first = RankStart(
        started=2.5,
        greeted=2.6,
        awaited={timeline.IMPORTS: 0.7, timeline.SERVER: 0.1},
        done=5.25,
        own=own(function=0.1, setup=0.2, data=0.3, step=0.6),
    )
    last_up = RankStart(started=2.5, greeted=3.0, done=5.0)
    start = start_of(first, last_up, opening={timeline.IMPORTS: 0.25, timeline.DATASETS: 0.5})
    assert start.by_rank(99.0)[0] == pytest.approx(
        {
            "imports": 0.95, "datasets": 0.5, "prepare": 0.25, "slots": 0.5, "server": 0.1, "fork": 0.2, "hello": 0.1,
            "other ranks": 0.4, "process group": 1.0, "function": 0.1, "set-up": 0.2, "data": 0.3, "first step": 0.6,
            "other": 0.05,
        }
    )  # fmt: skip


def test_output_that_comes_before_its_process_is_reported_leaves_no_gap() -> None:
    rank = RankStart(started=2.75, greeted=2.5, done=5.0)
    (phases,) = start_of(rank).by_rank(99.0)
    assert (phases["fork"], phases["hello"], sum(phases.values())) == (1.25, 0.0, 5.0)


def test_a_rank_that_never_came_up_has_the_time_until_the_end_in_what_it_had_begun() -> None:
    start = start_of(RankStart(started=2.0, greeted=2.5), RankStart(started=2.0), trained=None)
    fact = fact_of(start, 0, 302.0)
    assert fact.phases["hello"] == (0.5, 300.0)
    assert fact.phases["other ranks"] == (299.5, 0.0)
    assert (fact.unfinished, fact.seconds, fact.path["hello"]) == ((0, 1), 302.0, 300.0)
    assert report.line(fact).startswith("no rank had made a step or a report after 302 s: ")


def test_what_a_rank_measures_never_exceeds_what_the_controller_saw() -> None:
    rank = RankStart(started=2.0, greeted=2.5, done=4.5, own=own(function=100.0, step=7.0))
    (phases,) = start_of(rank).by_rank(99.0)
    assert phases["function"] == 0.5
    assert phases["first step"] == phases["other"] == 0.0


# --------------------------------------------------------------------------- who was waited for


def test_of_ranks_that_end_their_first_step_together_the_one_that_began_it_last_is_named() -> None:
    waits = RankStart(started=2.0, greeted=2.5, done=5.01, own=own(data=0.1, step=0.9), has_stepped=True)
    reads = RankStart(started=2.0, greeted=2.5, done=5.0, own=own(data=0.8, step=0.2), has_stepped=True)
    fact = fact_of(start_of(waits, reads, waits), 0, 9.0)
    assert fact.rank == 1
    assert (fact.path["data"], fact.path["first step"]) == (0.8, 0.2)
    assert sum(fact.path.values()) == pytest.approx(fact.seconds)


def test_a_rank_that_ends_its_first_step_long_after_the_others_is_named() -> None:
    quick = RankStart(started=2.0, greeted=2.5, done=4.5, own=own(data=0.2, step=0.3), has_stepped=True)
    slow = RankStart(started=2.0, greeted=2.5, done=9.0, own=own(step=5.0), has_stepped=True)
    assert fact_of(start_of(slow, quick), 0, 9.0).rank == 0


def test_of_ranks_that_are_alike_none_is_named() -> None:
    one, two = (
        RankStart(started=2.0, greeted=2.5, done=5.0 + late, own=own(data=0.3 + late, step=0.5))
        for late in (0.0, 0.01)
    )
    assert fact_of(start_of(one, two), 0, 9.0).rank == -1
    assert fact_of(start_of(one), 0, 9.0).rank == -1


def test_the_path_takes_of_each_leg_the_rank_that_was_last_in_it() -> None:
    late_up = RankStart(started=3.0, greeted=3.9, done=5.0, own=own(step=0.9), has_stepped=True)
    late_data = RankStart(started=2.0, greeted=2.1, done=5.0, own=own(data=0.9, step=0.1), has_stepped=True)
    path = timeline.critical_path(start_of(late_up, late_data), 9.0)
    assert path == pytest.approx(
        {"prepare": 1.0, "slots": 0.5, "fork": 1.5, "hello": 0.9, "process group": 0.1, "function": 0.0,
         "set-up": 0.0, "data": 0.9, "first step": 0.1, "other": 0.0}
    )  # fmt: skip


# --------------------------------------------------------------------------- many ranks


def test_of_many_ranks_the_spread_is_kept_and_the_slowest_by_name() -> None:
    many = [
        RankStart(started=2.0, greeted=2.5, done=6.0, own=own(data=1.0 + (rank == 777)), has_stepped=True)
        for rank in range(2048)
    ]
    fact = fact_of(start_of(*many), 0, 9.0)
    assert (fact.rank, fact.ranks[0], len(fact.ranks)) == (777, 777, timeline.SLOWEST_KEPT)
    assert fact.spread["data"] == (1.0, 1.0, 2.0)
    assert len(ev.encode(fact)) < 4096
    assert report.table(fact)[0].split() == ["phase", "fastest", "median", "slowest"]


@given(st.integers(1, 200), st.integers(0, 199))
def test_a_fact_has_every_phase_of_the_ranks_it_keeps(count: int, slow: int) -> None:
    by_rank = [{"hello": 0.5, "data": 1.0 + (rank == slow)} for rank in range(count)]
    kept = timeline.columns(by_rank)
    assert all(len(column) == len(kept.ranks) <= timeline.KEPT_RANKS for column in kept.phases.values())
    assert (slow in kept.ranks) == (slow < count)


# --------------------------------------------------------------------------- gathering


class Gathered:
    """A start that is gathered at times of a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.facts: list[ev.StartupMeasured] = []
        self.startup = StartupRecorder(self.facts.append, clock=lambda: self.now)

    def attempt(self, number: int, ranks: int) -> None:
        self.startup.slots_asked()
        self.now += 0.5
        self.startup.attempt_began(number, ranks, "waiting for 1 GPU held by run x")
        for rank in range(ranks):
            self.now += 0.25
            self.startup.started(rank, Started(Slot("s", "h", "a"), 7, 0.125, 0.0625))
            self.startup.greeted(rank)
        self.startup.trained()

    def first_step(self, rank: int, **own: Any) -> None:
        self.startup.first_step(rank, FirstStep(**own))


def test_one_fact_is_written_when_the_last_rank_has_made_its_first_step() -> None:
    gathered = Gathered()
    gathered.startup.launched(98.0, {"imports": 0.5})
    gathered.attempt(0, 2)
    gathered.first_step(1, step=0.5)
    assert gathered.facts == []
    gathered.now += 1.0
    gathered.first_step(0, step=1.0)
    gathered.first_step(0, step=1.0)
    gathered.startup.over()
    (fact,) = gathered.facts
    assert (fact.attempt, fact.seconds, fact.unfinished) == (0, 4.0, ())
    assert (fact.path["imports"], fact.path["prepare"]) == (0.5625, 1.5)
    assert sum(fact.path.values()) == pytest.approx(4.0)


def test_a_restart_has_a_timeline_of_its_own_from_the_end_of_the_attempt_before() -> None:
    gathered = Gathered()
    gathered.attempt(0, 1)
    gathered.first_step(0, step=0.0)
    gathered.now = 500.0
    gathered.startup.over()
    gathered.now = 502.0
    gathered.startup.over()  # it was cleared, and is decided on now: it has been over since then
    gathered.attempt(1, 1)
    gathered.first_step(0, step=0.0)
    fact = gathered.facts[1]
    assert (fact.attempt, fact.seconds, fact.path["clearing"], fact.path["slots"]) == (1, 2.75, 2.0, 0.5)
    assert "prepare" not in fact.path
    assert report.line(fact).startswith(
        "back after 2.8 s: clearing 2.0, imports 0.06, slots 0.50, server 0.06"
    )


def test_an_attempt_that_ends_before_its_first_step_reports_how_far_it_had_come() -> None:
    gathered = Gathered()
    gathered.attempt(0, 2)
    gathered.first_step(0, step=0.0)
    gathered.now += 5.0
    gathered.startup.over()
    (fact,) = gathered.facts
    assert (fact.unfinished, fact.rank) == ((1,), 1)
    assert fact.phases["other"] == (0.0, 5.0)
    assert report.line(fact).startswith("rank 1 had made no step and no report after 6.0 s: ")


# --------------------------------------------------------------------------- in words


def told(path: dict[str, float], **more: Any) -> ev.StartupMeasured:
    return ev.StartupMeasured(
        time=0.0, attempt=0, seconds=sum(path.values()), path=path, world_size=1, **more
    )


def test_phases_that_hardly_took_time_are_reported_together() -> None:
    fact = told(
        {"imports": 3.0, "slots": 0.02, "fork": 0.03, "hello": 0.04, "first step": 0.91, "other": 0.01}
    )
    assert report.line(fact) == "first step after 4.0 s: imports 3.0, first step 0.91, other 0.10"
    assert report.line(told({"fork": 0.0})) == "first step after 0.00 s: other 0.00"


def test_advice_is_given_where_one_phase_has_most_of_a_long_start() -> None:
    assert report.advice(told({"imports": 0.9, "fork": 0.1})) == []
    assert report.advice(told({"first step": 60.0, "fork": 0.1})) == []
    assert report.advice(told({"imports": 8.0}, engine="ray")) == []
    assert report.advice(told({"imports": 8.0}, forks_driver=True, torch_was_loaded=True)) == []
    (imports,) = report.advice(told({"imports": 8.0, "fork": 0.1}, forks_driver=True))
    assert imports.startswith("8.0 s went into imports. Import torch in the script before fit(), ")
    assert "start no threads before it" in imports, "a process with threads is not forked"
    lazy = {"set-up": 1.5, "first step": 0.2, "fork": 0.1}
    assert report.advice(told(lazy, forks_driver=True)) == []
    assert report.advice(told(lazy, imported="transformers", engine="ray")) == []
    assert report.advice(told({"first step": 0.5}, imported="transformers", forks_driver=True)) == []
    (importing,) = report.advice(told(lazy, imported="transformers", forks_driver=True))
    assert importing.startswith("Within set-up every rank loads the package transformers")
    assert "from transformers import" in importing
    (slots,) = report.advice(told({"slots": 30.0}, waited_for="waiting for 1 GPU held by run x"))
    assert slots == "30.0 s went into waiting for slots: waiting for 1 GPU held by run x"
    (function,) = report.advice(told({"function": 8.1}, loaded="transformers", forks_driver=True))
    assert "mostly the package transformers" in function
    assert "start no threads" in function
