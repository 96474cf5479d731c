"""Schedulers decide from the reports alone: the same reports give the same decisions, and those of the papers."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.errors import ConfigError
from powertrain.tune import schedulers as s
from powertrain.tune import space as sp
from powertrain.tune.schedulers.pbt import explore

CURVES = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=30), min_size=1, max_size=12)


def report(iteration: int, value: float) -> dict[str, Any]:
    return {"training_iteration": iteration, "time_total_s": float(iteration), "loss": value}


def ready(scheduler: s.TrialScheduler, mode: str = "min") -> s.TrialScheduler:
    scheduler.set_search_properties("loss", mode)
    return scheduler


def play(
    make: Callable[[], s.TrialScheduler], curves: list[list[float]], seed: int
) -> tuple[list[Any], dict[str, int]]:
    """Report the curves in a random interleaving; returns all decisions and how far each trial came."""
    scheduler, rng = make(), random.Random(seed)
    for number in range(len(curves)):
        scheduler.on_trial_add(str(number), {"lr": 0.1})
    made: list[Any] = list(scheduler.on_trials_complete())
    came, running, paused = (
        dict.fromkeys(map(str, range(len(curves))), 0),
        set(map(str, range(len(curves)))),
        set(),
    )
    while running:
        trial = rng.choice(sorted(running))
        if came[trial] == len(curves[int(trial)]):
            running.discard(trial)
            decisions = scheduler.on_trial_end(trial)
        else:
            came[trial] += 1
            decisions = scheduler.on_trial_result(
                trial, report(came[trial], curves[int(trial)][came[trial] - 1])
            )
        made += decisions
        pending = list(decisions)
        while pending:
            decision = pending.pop(0)
            if decision.action is s.Action.STOP:
                running.discard(decision.trial)
                paused.discard(decision.trial)
                pending += scheduler.on_trial_end(decision.trial)
            elif decision.action is s.Action.PAUSE:
                running.discard(decision.trial)
                paused.add(decision.trial)
            elif decision.trial in paused:
                paused.discard(decision.trial)
                running.add(decision.trial)
    assert not paused, "trials wait for ever"
    return made, came


MAKERS: dict[str, Callable[[], s.TrialScheduler]] = {
    "fifo": s.FIFOScheduler,
    "asha": lambda: ready(s.ASHAScheduler(max_t=20, grace_period=2, reduction_factor=3)),
    "asha brackets": lambda: ready(s.ASHAScheduler(max_t=20, reduction_factor=2, brackets=3)),
    "hyperband": lambda: ready(s.HyperBandScheduler(max_t=9, reduction_factor=3)),
    "median": lambda: ready(s.MedianStoppingRule(grace_period=3, min_samples_required=2)),
    "median soft": lambda: ready(
        s.MedianStoppingRule(grace_period=3, min_samples_required=2, hard_stop=False)
    ),
    "pbt": lambda: ready(
        s.PopulationBasedTraining(
            perturbation_interval=3, hyperparam_mutations={"lr": sp.loguniform(1e-4, 1)}
        )
    ),
    "pbt together": lambda: ready(
        s.PopulationBasedTraining(
            perturbation_interval=3, hyperparam_mutations={"lr": [0.1, 0.2]}, synch=True
        )
    ),
}


@pytest.mark.parametrize("name", MAKERS)
@given(curves=CURVES, seed=st.integers(0, 1000))
def test_the_same_reports_give_the_same_decisions_and_no_trial_waits_for_ever(
    name: str, curves: list[list[float]], seed: int
) -> None:
    assert play(MAKERS[name], curves, seed) == play(MAKERS[name], curves, seed)


def asha_of_the_paper(
    history: list[tuple[str, int, float]], eta: int, least: int, most: int
) -> dict[int, bool]:
    """Which entries of a history stop their trial, by the rule of the paper: rung k is at least * eta ** k; a trial
    at a rung is promoted if it is in the top floor(n / eta) of the n that are there, and one always is."""
    rungs: dict[int, dict[str, float]] = {}
    stops = {}
    for place, (trial, iteration, loss) in enumerate(history):
        stops[place] = iteration >= most
        level = math.log(iteration / least, eta) if iteration >= least else -1.0
        if level < 0 or abs(level - round(level)) > 1e-9 or iteration >= most:
            continue
        rung = rungs.setdefault(round(level), {})
        rung[trial] = loss
        promoted = sorted(rung.values())[: max(1, len(rung) // eta)]
        stops[place] = loss > promoted[-1]
    return stops


@given(curves=CURVES, seed=st.integers(0, 1000), eta=st.sampled_from([2, 3, 4]))
def test_asha_stops_those_that_the_paper_stops(curves: list[list[float]], seed: int, eta: int) -> None:
    scheduler = ready(s.ASHAScheduler(max_t=16, grace_period=1, reduction_factor=eta))
    rng, came = random.Random(seed), [0] * len(curves)
    for number in range(len(curves)):
        scheduler.on_trial_add(str(number), {})
    running, history, stopped = list(range(len(curves))), [], []
    while running:
        number = rng.choice(running)
        came[number] += 1
        loss = curves[number][came[number] - 1]
        history.append((str(number), came[number], loss))
        decisions = scheduler.on_trial_result(str(number), report(came[number], loss))
        stopped.append(bool(decisions))
        if decisions or came[number] == len(curves[number]):
            running.remove(number)
    assert stopped == list(asha_of_the_paper(history, eta, 1, 16).values())


def test_asha_judges_a_trial_that_reports_rarely_at_the_rung_it_has_passed() -> None:
    scheduler = ready(s.ASHAScheduler(max_t=100, grace_period=1, reduction_factor=4))
    for trial in "ab":
        scheduler.on_trial_add(trial, {})
    assert scheduler.on_trial_result("a", report(5, 0.1)) == []
    assert scheduler.on_trial_result("b", report(7, 0.2)) == [s.Decision("b", s.Action.STOP)]


def test_a_trial_without_the_metric_continues_until_max_t() -> None:
    scheduler = ready(s.ASHAScheduler(max_t=3))
    scheduler.on_trial_add("a", {})
    assert scheduler.on_trial_result("a", {"training_iteration": 1, "loss": float("nan")}) == []
    assert scheduler.on_trial_result("a", {"training_iteration": 3}) == [s.Decision("a", s.Action.STOP)]


def test_a_trial_whose_metric_is_not_a_number_is_the_worst() -> None:
    nan = float("nan")
    asha = ready(s.ASHAScheduler(max_t=9, reduction_factor=2))
    median = ready(s.MedianStoppingRule("training_iteration", grace_period=1, min_samples_required=1))
    band = ready(s.HyperBandScheduler(max_t=9, reduction_factor=3))
    for scheduler in (asha, median, band):
        for number in range(9):
            scheduler.on_trial_add(str(number), {})
    for scheduler in (asha, median):
        assert scheduler.on_trial_result("0", report(1, 5.0)) == []
        assert scheduler.on_trial_result("1", report(1, nan)) == [s.Decision("1", s.Action.STOP)]
    for number in range(9):
        decisions = band.on_trial_result(str(number), report(1, number if number else nan))
    assert s.Decision("0", s.Action.STOP) in decisions


def test_median_stopping_takes_reports_of_both_infinities() -> None:
    rule = ready(s.MedianStoppingRule("training_iteration", grace_period=1, min_samples_required=1))
    for trial in "ab":
        rule.on_trial_add(trial, {})
    rule.on_trial_result("a", report(1, float("inf")))
    rule.on_trial_result("a", report(2, float("-inf")))
    assert rule.on_trial_result("b", report(2, 1.0)) == []


def soft_median() -> s.MedianStoppingRule:
    return s.MedianStoppingRule("training_iteration", grace_period=1, min_samples_required=1, hard_stop=False)


def test_a_soft_median_rule_pauses_a_trial_until_all_have_begun() -> None:
    """Also where nothing else runs: the next trial takes the place."""
    rule = ready(soft_median())
    rule.on_trial_add("a", {})
    assert rule.on_trial_result("a", report(1, 1.0)) == []
    assert rule.on_trial_end("a") == []
    for trial in "bc":
        rule.on_trial_add(trial, {})
        assert rule.on_trial_result(trial, report(1, 5.0 if trial == "b" else 6.0)) == [
            s.Decision(trial, s.Action.PAUSE)
        ]
    assert rule.on_trials_complete() == [s.Decision(trial, s.Action.CONTINUE) for trial in "bc"]
    assert rule.on_trial_result("b", report(1, 5.0)) == []


def test_a_soft_median_rule_resumes_a_trial_that_the_searcher_waits_for() -> None:
    rule = ready(soft_median())
    for trial in "ab":
        rule.on_trial_add(trial, {})
    rule.on_trial_result("a", report(1, 1.0))
    assert rule.on_trial_result("b", report(1, 5.0)) == [s.Decision("b", s.Action.PAUSE)]
    replayed = copy.deepcopy(rule)
    replayed.adopt(s.Decision("b", s.Action.CONTINUE))
    assert replayed.on_stalled() == []
    assert rule.on_stalled() == [s.Decision("b", s.Action.CONTINUE)]
    assert rule.on_stalled() == []


def test_a_nested_metric_is_compared_as_get_best_result_does_it() -> None:
    scheduler = s.ASHAScheduler(max_t=9, reduction_factor=2, time_attr="train/epoch")
    scheduler.set_search_properties("eval/acc", "max")
    for trial in "ab":
        scheduler.on_trial_add(trial, {})
    assert scheduler.on_trial_result("a", {"train": {"epoch": 1}, "eval": {"acc": 0.9}}) == []
    assert scheduler.on_trial_result("b", {"train": {"epoch": 1}, "eval": {"acc": 0.1}}) == [
        s.Decision("b", s.Action.STOP)
    ]


def test_hyperband_halves_a_bracket_when_its_last_trial_arrives() -> None:
    scheduler = ready(s.HyperBandScheduler(max_t=9, reduction_factor=3))
    for number in range(9):
        scheduler.on_trial_add(str(number), {})
    for number in range(8):
        assert scheduler.on_trial_result(str(number), report(1, number)) == [
            s.Decision(str(number), s.Action.PAUSE)
        ]
    decisions = scheduler.on_trial_result("8", report(1, 8.0))
    assert {d.trial for d in decisions if d.action is s.Action.CONTINUE} == {"0", "1", "2"}
    assert {d.trial for d in decisions if d.action is s.Action.STOP} == {"3", "4", "5", "6", "7", "8"}


def test_median_stopping_ends_a_trial_below_the_median_of_the_averages() -> None:
    scheduler = ready(s.MedianStoppingRule(grace_period=2, min_samples_required=3), "max")
    for trial in "abcd":
        scheduler.on_trial_add(trial, {})
    for trial, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        for iteration in (1, 2, 3):
            assert scheduler.on_trial_result(trial, report(iteration, value)) == []
    assert scheduler.on_trial_result("d", report(1, 0.5)) == [], "within the grace period"
    assert scheduler.on_trial_result("d", report(2, 1.9)) == [s.Decision("d", s.Action.STOP)]


def test_pbt_lets_the_worst_continue_from_the_best_with_a_changed_configuration() -> None:
    scheduler = ready(
        s.PopulationBasedTraining(
            perturbation_interval=2,
            hyperparam_mutations={"lr": sp.loguniform(1e-3, 1)},
            quantile_fraction=0.25,
        )
    )
    for number in range(4):
        scheduler.on_trial_add(str(number), {"lr": 0.1 + number / 10, "other": number})
    for number in range(3):
        assert scheduler.on_trial_result(str(number), report(1, number)) == []
    [decision] = scheduler.on_trial_result("3", report(2, 9.0))
    assert (decision.trial, decision.action, decision.source) == ("3", s.Action.CONTINUE, "0")
    assert decision.config is not None
    assert decision.config["other"] == 0, "all that is not changed is the better trial's"
    assert decision.config["lr"] != 0.1
    assert scheduler.on_trial_result("0", report(2, 0.0)) == []


@given(st.integers(0, 10_000))
def test_explored_values_stay_within_their_distributions(seed: int) -> None:
    mutations: Mapping[str, Any] = {
        "lr": sp.loguniform(1e-4, 1e-1),
        "layers": sp.randint(1, 5),
        "act": ["relu", "gelu", "tanh"],
        "deep": {"p": sp.uniform(0, 0.5)},
        "made": lambda: 3,
    }
    config = {"lr": 1e-1, "layers": 4, "act": "relu", "deep": {"p": 0.5, "q": 1}, "made": 2.0, "kept": [1]}
    changed = explore(config, mutations, 0.25, (1.2, 0.8), random.Random(seed))
    assert 1e-4 <= changed["lr"] <= 1e-1
    assert changed["layers"] in (1, 2, 3, 4)
    assert changed["act"] in ("relu", "gelu", "tanh")
    assert 0 <= changed["deep"]["p"] <= 0.5
    assert (changed["deep"]["q"], changed["kept"]) == (1, [1])
    assert config["deep"] == {"p": 0.5, "q": 1}, "the configuration of the other trial is not changed"


def test_a_policy_file_is_repeated_at_the_recorded_times(tmp_path: Path) -> None:
    policy = tmp_path / "pbt_policy_a.txt"
    policy.write_text(
        "".join(json.dumps({"time": t, "config": {"lr": lr}}) + "\n" for t, lr in ((0, 1), (3, 2)))
    )
    scheduler = s.PopulationBasedTrainingReplay(policy)
    assert scheduler.config == {"lr": 1}
    scheduler.on_trial_add("a", {})
    assert scheduler.on_trial_result("a", report(2, 0.0)) == []
    [decision] = scheduler.on_trial_result("a", report(3, 0.0))
    assert (decision.source, decision.config) == ("a", {"lr": 2})
    with pytest.raises(ConfigError, match="one trial"):
        scheduler.on_trial_add("b", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        s.PopulationBasedTrainingReplay(tmp_path / "none")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: s.ASHAScheduler(mode="best"), "mode='best' is neither"),
        (
            lambda: s.ASHAScheduler(max_t=1, grace_period=2),
            "grace_period=2 must be above 0 and at most max_t=1",
        ),
        (lambda: s.ASHAScheduler(reduction_factor=1), "reduction_factor=1 must be above 1"),
        (lambda: s.ASHAScheduler(max_t="x"), "max_t='x'"),  # type: ignore[arg-type]
        (lambda: s.ASHAScheduler(brackets=0), "brackets=0"),
        (lambda: s.HyperBandScheduler(reduction_factor=0.5), "must be above 1"),
        (lambda: s.MedianStoppingRule(min_samples_required=0), "min_samples_required=0"),
        (lambda: s.PopulationBasedTraining(), "needs hyperparam_mutations"),
        (
            lambda: s.PopulationBasedTraining(hyperparam_mutations={"lr": 3}),
            "hyperparam_mutations['lr']=3 must be",
        ),
        (
            lambda: s.PopulationBasedTraining(hyperparam_mutations={"a": {"lr": sp.uniform(2, 1)}}),
            "hyperparam_mutations['a/lr'] cannot be used",
        ),
        (
            lambda: s.PopulationBasedTraining(hyperparam_mutations={"lr": [1]}, quantile_fraction=0.7),
            "quantile_fraction=0.7",
        ),
        (lambda: s.ASHAScheduler().set_search_properties(None, None), "Set metric and mode in TuneConfig"),
        (lambda: s.ASHAScheduler(metric="a").set_search_properties("b", "min"), "differ. Give it once"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert message in str(refused.value)
