"""What happens to trials follows from the journal alone: a restart changes no decision and repeats none."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.tune import schedulers as s
from powertrain.tune import space as sp
from powertrain.tune import trial as tr
from powertrain.tune.search.basic_variant import BasicVariantGenerator
from powertrain.tune.search.optuna import OptunaSearch
from powertrain.tune.stopper import as_stopper
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.sweep.journal.state import SweepState, json_form, replay
from powertrain.tune.sweep.judge import Judge

SPACE = {"lr": sp.loguniform(1e-4, 1e-1), "depth": sp.choice([1, 2, 3])}
MAKERS: dict[str, Callable[[], s.TrialScheduler]] = {
    "fifo": s.FIFOScheduler,
    "asha": lambda: s.ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3),
    "hyperband": lambda: s.HyperBandScheduler(max_t=9, reduction_factor=3),
    "median": lambda: s.MedianStoppingRule(grace_period=2, min_samples_required=2),
    "pbt": lambda: s.PopulationBasedTraining(
        time_attr="training_iteration", perturbation_interval=2, hyperparam_mutations={"lr": sp.uniform(0, 1)}
    ),
    "pbt together": lambda: s.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"lr": sp.uniform(0, 1)},
        synch=True,
    ),
}

#: Why a paused trial continues that has only waited for a place.
TURN = "its turn"


def make_judge(scheduler: str, samples: int, search: str = "random") -> Judge:
    searcher = OptunaSearch(seed=1) if search == "optuna" else BasicVariantGenerator(random_state=3)
    searcher.set_search_properties("loss", "min", SPACE)
    searcher.set_num_samples(samples)
    rule = MAKERS[scheduler]()
    rule.set_search_properties("loss", "min")
    stopper = as_stopper({"training_iteration": 12})
    return Judge(searcher, rule, stopper, SweepState(), lambda trial: f"t{trial.number}", no_pickles, "ab")


def no_pickles(name: str, config: Mapping[str, Any]) -> str:
    raise AssertionError(f"{config} of {name} is all JSON")


class Play:
    """Plays a sweep without processes: trials report in an order that a seed gives."""

    def __init__(self, judge: Judge, samples: int, events: list[ev.SweepEvent] | None = None) -> None:
        self.judge, self.samples, self.events = judge, samples, list(events or [])
        self.judge.replay(self.events)
        self.keep(self.judge.complete_decisions(float(len(self.events))))

    def steps(self, rng: random.Random, at_most: int) -> None:
        for _ in range(at_most):
            if not self.step(rng):
                return

    def step(self, rng: random.Random) -> bool:
        """Start, report or end one trial; False when nothing is left to do."""
        state, now = self.judge.state, float(len(self.events))
        for trial_id in list(state.stops):
            self.keep(self.judge.end(state.trials[trial_id], tr.TERMINATED, "finished", "", 0.0, now))
        if not state.is_search_over and len(state.trials) >= self.samples:
            self.keep(self.judge.end_search(now))
        elif (
            not state.is_search_over and rng.random() < 0.4 and (facts := self.judge.suggest(now)) is not None
        ):
            self.keep(facts)
        for trial in state.unended.values():
            if trial.status == tr.PENDING:
                started = ev.TrialStarted(time=now, trial=trial.trial_id)
                state.apply(started)
                self.keep([started])
        running = [trial for trial in state.unended.values() if trial.status == tr.RUNNING]
        paused = [trial.trial_id for trial in state.unended.values() if trial.status == tr.PAUSED]
        if paused and self.judge.scheduler.takes_turns and (not running or rng.random() < 0.3):
            chosen = self.judge.scheduler.choose(paused)
            turn = ev.TrialDecided(time=now, trial=chosen or "", action="continue", reason=TURN)
            state.apply(turn)
            self.keep([turn])
            return True
        if not running:
            assert not (state.is_search_over and state.unended), "trials wait for ever"
            return not state.is_search_over
        trial = rng.choice(running)
        if rng.random() < 0.03:
            status = rng.choice([tr.TERMINATED, tr.ERROR])
            self.keep(self.judge.end(trial, status, "finished", "by itself", 1.0, now))
        else:
            row = trial.iteration + 1
            loss = rng.random() / row
            is_saved = rng.random() < 0.7
            self.keep(self.judge.report(trial, row, {"loss": loss}, float(row), now, is_saved))
        return True

    def keep(self, facts: list[ev.SweepEvent]) -> None:
        self.events += facts


def shape(state: SweepState) -> Any:
    trials = {
        trial.trial_id: (trial.config, trial.status, trial.iteration, trial.last_result, trial.metrics)
        for trial in state.trials.values()
    }
    return trials, state.stops, state.exploits, state.is_search_over


@pytest.mark.parametrize("scheduler", MAKERS)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(0, 150))
def test_a_restart_at_any_fact_changes_no_decision(scheduler: str, seed: int, samples: int, cut: int) -> None:
    straight = Play(make_judge(scheduler, samples), samples)
    rng = random.Random(seed)
    straight.steps(rng, cut)
    before = list(straight.events)
    after = random.Random()
    after.setstate(rng.getstate())
    straight.steps(rng, 400)

    restarted = Play(make_judge(scheduler, samples), samples, before)
    assert restarted.judge.changed_decisions == 0
    restarted.steps(after, 400)
    assert restarted.events == straight.events
    assert shape(restarted.judge.state) == shape(straight.judge.state)


def is_of_scheduler(fact: ev.SweepEvent) -> bool:
    """Whether a fact follows from another one: not the turn of a paused trial, for which a place has become free."""
    return isinstance(fact, ev.TrialDecided) and fact.reason != TURN


@pytest.mark.parametrize("scheduler", MAKERS)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(0, 150))
def test_decisions_that_a_killed_driver_did_not_write_down_are_made_up_for(
    scheduler: str, seed: int, samples: int, cut: int
) -> None:
    straight = Play(make_judge(scheduler, samples), samples)
    straight.steps(random.Random(seed), 400)
    facts = straight.events
    while cut < len(facts) and not is_of_scheduler(facts[cut]):
        cut += 1
    following = cut
    while following < len(facts) and is_of_scheduler(facts[following]):
        following += 1
    killed = Play(make_judge(scheduler, samples), samples, facts[:cut])
    expected = make_judge(scheduler, samples)
    expected.replay(facts[:following])
    assert shape(killed.judge.state) == shape(expected.state)
    assert [type(fact).__name__ for fact in killed.events[cut:]] == ["TrialDecided"] * (following - cut)
    again = make_judge(scheduler, samples)
    again.replay(killed.events)
    assert again.changed_decisions == 0
    assert again.complete_decisions(0.0) == []


@given(st.integers(0, 1000), st.integers(10, 80))
def test_a_restart_continues_the_search_of_optuna(seed: int, cut: int) -> None:
    straight = Play(make_judge("asha", 6, "optuna"), 6)
    rng = random.Random(seed)
    straight.steps(rng, cut)
    before, after = list(straight.events), random.Random()
    after.setstate(rng.getstate())
    straight.steps(rng, 200)
    restarted = Play(make_judge("asha", 6, "optuna"), 6, before)
    restarted.steps(after, 200)
    assert restarted.events == straight.events


@pytest.mark.parametrize("scheduler", MAKERS)
def test_facts_survive_the_journal(scheduler: str) -> None:
    play = Play(make_judge(scheduler, 8), 8)
    play.steps(random.Random(5), 400)
    read = [ev.decode_event(ev.encode_event(event)) for event in play.events]
    assert read == play.events
    assert shape(replay(read)) == shape(play.judge.state)


def test_a_report_that_was_made_before_decides_nothing() -> None:
    judge = make_judge("asha", 2)
    for _ in range(2):
        judge.suggest(0.0)
    first, second = judge.state.trials.values()
    for trial in (first, second):
        judge.state.apply(ev.TrialStarted(time=0.0, trial=trial.trial_id))
    judge.report(first, 1, {"loss": 0.1}, 1.0, 1.0)
    assert [type(fact).__name__ for fact in judge.report(second, 1, {"loss": 0.2}, 1.0, 1.0)] == [
        "TrialReported",
        "TrialDecided",
    ]
    assert judge.report(second, 1, {"loss": 0.0}, 9.0, 2.0) == []
    assert second.last_result["loss"] == 0.2


def test_infinite_and_missing_values_survive_the_journal() -> None:
    judge = make_judge("fifo", 1)
    judge.suggest(0.0)
    (trial,) = judge.state.trials.values()
    facts = judge.report(trial, 1, {"loss": float("inf"), "nested": {"nan": float("nan")}}, 1.0, 1.0)
    (read,) = [ev.decode_event(ev.encode_event(fact)) for fact in facts]
    again = make_judge("fifo", 1)
    again.suggest(0.0)
    again.state.apply(read)
    (same,) = again.state.trials.values()
    assert same.last_result["loss"] == float("inf")
    assert same.last_result["nested"]["nan"] != same.last_result["nested"]["nan"]


@pytest.mark.parametrize(
    ("value", "is_exact"),
    [
        ({"a": [1, 2.5, None, True, "x"]}, True),
        ({"a": (1, 2)}, False),
        ({1: 2}, False),
        ({"a": float("inf")}, False),
        ({"a": 2**60}, False),
        ({"a": random.Random}, False),
    ],
)
def test_only_configurations_that_json_gives_back_as_they_are_count_as_exact(
    value: Any, is_exact: bool
) -> None:
    import msgspec

    form, exact = json_form(value)
    assert exact is is_exact
    assert not exact or msgspec.json.decode(msgspec.json.encode(form)) == value
