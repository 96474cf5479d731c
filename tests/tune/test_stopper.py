"""Stoppers end trials, or the sweep, as their reports say: the same calls give the same answers."""

from __future__ import annotations

import pickle
import statistics
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.errors import ConfigError
from powertrain.tune import stopper as s

NUMBERS = st.floats(-1e6, 1e6)


def feed(stopper: s.Stopper, values: list[float], trial: str = "a", metric: str = "loss") -> list[bool]:
    """The answers to the reports of one trial."""
    return [
        stopper(trial, {"training_iteration": number, metric: value})
        for number, value in enumerate(values, 1)
    ]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# --------------------------------------------------------------------------- single stoppers


def test_the_base_class_requires_both_methods() -> None:
    with pytest.raises(NotImplementedError):
        s.Stopper()("a", {})
    with pytest.raises(NotImplementedError):
        s.Stopper().stop_all()


def test_a_maximum_of_iterations_counts_each_trial_by_itself() -> None:
    stopper = s.MaximumIterationStopper(max_iter=3)
    assert feed(stopper, [1.0, 1.0]) == [False, False]
    assert feed(stopper, [1.0, 1.0, 1.0], trial="b") == [False, False, True]
    assert feed(stopper, [1.0]) == [True]
    assert not stopper.stop_all()


def test_a_function_decides_with_the_id_of_the_trial_and_its_report() -> None:
    stopper = s.FunctionStopper(lambda trial_id, result: trial_id == "b" and result["loss"] < 1)
    assert feed(stopper, [0.5]) == [False]
    assert feed(stopper, [2.0, 0.5], trial="b") == [False, True]
    assert not stopper.stop_all()


@pytest.mark.parametrize(
    ("stop", "result", "expected"),
    [
        ({"training_iteration": 5}, {"training_iteration": 4}, False),
        ({"training_iteration": 5}, {"training_iteration": 5}, True),
        ({"eval/accuracy": 0.9}, {"eval": {"accuracy": 0.95}}, True),
        ({"eval/accuracy": 0.9}, {"eval/accuracy": 0.85}, False),
        ({"missing": 1}, {"loss": 2.0}, False),
        ({"a": 10, "b": 1}, {"a": 1, "b": 1}, True),
    ],
)
def test_a_dict_stops_at_its_bounds(stop: dict[str, float], result: dict[str, Any], expected: bool) -> None:
    assert s.as_stopper(stop)("a", result) is expected


def test_a_bound_says_what_has_reached_it() -> None:
    stopper = s.BoundStopper({"accuracy": 0.9})
    assert stopper.reason("a", {"accuracy": 0.95}) == "accuracy=0.95 has reached 0.9"
    assert stopper.reason("a", {"accuracy": 0.5}) == ""


# --------------------------------------------------------------------------- plateaus


@given(values=st.lists(NUMBERS, max_size=20), window=st.integers(1, 5), grace=st.integers(0, 8))
def test_a_trial_on_a_plateau_is_one_whose_last_reports_hardly_differ(
    values: list[float], window: int, grace: int
) -> None:
    stopper = s.TrialPlateauStopper("loss", std=1.0, num_results=window, grace_period=grace)
    expected = [
        count >= max(window, grace) and statistics.pstdev(values[count - window : count]) < 1.0
        for count in range(1, len(values) + 1)
    ]
    assert feed(stopper, values) == expected


def test_a_plateau_counts_only_past_its_threshold() -> None:
    low = s.TrialPlateauStopper("loss", num_results=2, grace_period=0, metric_threshold=0.0, mode="min")
    assert feed(low, [1.0, 1.0, 0.0, 0.0]) == [False, False, False, True]
    high = s.TrialPlateauStopper("loss", num_results=2, grace_period=0, metric_threshold=1, mode="max")
    assert feed(high, [0.0, 0.0, 1.0, 1.0]) == [False, False, False, True]


def test_a_report_without_a_number_keeps_a_trial_running() -> None:
    stopper = s.TrialPlateauStopper("loss", num_results=2, grace_period=0)
    assert feed(stopper, [1.0, float("nan"), 1.0, 1.0]) == [False, False, False, True]
    assert not stopper("b", {})
    assert not stopper("b", {"loss": 1.0})
    assert stopper("b", {"loss": 1.0})


@given(values=st.lists(NUMBERS, max_size=25), top=st.integers(2, 5), mode=st.sampled_from(["min", "max"]))
def test_a_sweep_is_on_a_plateau_when_its_best_results_hardly_differ(
    values: list[float], top: int, mode: str
) -> None:
    stopper = s.ExperimentPlateauStopper("loss", std=1.0, top=top, mode=mode)
    for count, value in enumerate(values, 1):
        best = sorted(values[:count], reverse=mode == "max")[:top]
        expected = len(best) == top and statistics.pstdev(best) <= 1.0
        assert stopper(str(count % 3), {"loss": value}) is expected
        assert stopper.stop_all() is expected


def test_the_plateau_of_a_sweep_must_last() -> None:
    stopper = s.ExperimentPlateauStopper("loss", top=2, patience=3)
    assert feed(stopper, [1.0, 1.0, 1.0, 1.0]) == [False, False, False, True]
    assert feed(s.ExperimentPlateauStopper("loss", top=2, patience=2), [1.0, 1.0, 0.5, 0.5, 0.5]) == [
        False,
        False,
        False,
        False,
        True,
    ]


def test_nested_metrics_are_found() -> None:
    stopper = s.TrialPlateauStopper("eval/loss", num_results=2, grace_period=0)
    assert [stopper("a", {"eval": {"loss": 1.0}}) for _ in range(2)] == [False, True]


# --------------------------------------------------------------------------- time


@pytest.mark.parametrize("timeout", [10, timedelta(seconds=10)])
def test_the_time_of_a_sweep_counts_from_the_first_look(timeout: Any) -> None:
    clock = Clock()
    stopper = s.TimeoutStopper(timeout, clock=clock)
    clock.now += 1000
    assert not stopper.stop_all()
    clock.now += 9
    assert not stopper.stop_all()
    assert stopper.spent == 9
    assert not stopper("a", {})
    clock.now += 1
    assert stopper.stop_all()


def test_time_that_was_spent_before_a_restart_counts() -> None:
    clock = Clock()
    stopper = s.TimeoutStopper(10, clock=clock)
    stopper.add_spent(8)
    assert not stopper.stop_all()
    clock.now += 2
    assert stopper.stop_all()


def test_the_time_between_two_processes_does_not_count() -> None:
    clock = Clock()
    stopper = s.TimeoutStopper(10, clock=clock)
    stopper.stop_all()
    clock.now += 4
    stopper.stop_all()
    again = pickle.loads(pickle.dumps(stopper))
    again._clock.now += 1000
    assert not again.stop_all()
    assert again.spent == 4


# --------------------------------------------------------------------------- several


class Recording(s.NoopStopper):
    def __init__(self, answer: bool) -> None:
        self.answer, self.calls = answer, 0

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        self.calls += 1
        return self.answer

    def stop_all(self) -> bool:
        return self.answer


def test_of_several_stoppers_one_suffices_and_each_sees_every_report() -> None:
    no, yes, last = Recording(False), Recording(True), Recording(False)
    combined = s.CombinedStopper(no, yes, last)
    assert combined("a", {})
    assert combined.stop_all()
    assert (no.calls, yes.calls, last.calls) == (1, 1, 1)
    none = s.CombinedStopper(no, last)
    assert not none("a", {})
    assert not none.stop_all()


def test_a_list_combines_all_forms() -> None:
    stopper = s.as_stopper(
        [{"loss": 10}, lambda trial_id, result: trial_id == "b", s.MaximumIterationStopper(3)]
    )
    assert feed(stopper, [1.0, 11.0, 1.0]) == [False, True, True]
    assert stopper("b", {})


def test_nothing_stops_nothing_and_a_stopper_stays_itself() -> None:
    assert not s.as_stopper(None)("a", {"training_iteration": 10**9})
    assert not s.as_stopper(None).stop_all()
    own = s.MaximumIterationStopper(1)
    assert s.as_stopper(own) is own


@given(values=st.lists(NUMBERS, max_size=20))
def test_repeated_calls_bring_a_new_stopper_to_the_same_answers(values: list[float]) -> None:
    def make() -> s.Stopper:
        return s.CombinedStopper(
            s.TrialPlateauStopper("loss", std=100.0),
            s.ExperimentPlateauStopper("loss", std=10.0, top=3, patience=2),
            s.MaximumIterationStopper(15),
        )

    first = make()
    answers = feed(first, values)
    again = pickle.loads(pickle.dumps(make()))
    assert feed(again, values) == answers
    assert again.stop_all() == first.stop_all()


# --------------------------------------------------------------------------- bad input


class NotDerived:
    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (5, "stop=5 cannot say when"),
        ("loss", "stop='loss' cannot say when"),
        ([], "cannot say when"),
        ({}, "has no entries"),
        ({"loss": "low"}, "'low'.*is no number"),
        ({"loss": float("nan")}, "is no number"),
        ({1: 2}, "the key 1 is no string"),
        (lambda result: True, "is called with the id of a trial and its report"),
        (s.NoopStopper, "cannot say when"),
        (NotDerived(), "Derive its class from powertrain.tune.Stopper"),
        ([s.NoopStopper(), 3], "stop=3 cannot say when"),
    ],
)
def test_what_cannot_stop_a_trial_is_refused(stop: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        s.as_stopper(stop)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: s.MaximumIterationStopper(0), r"max_iter=\.\.\.\) was given 0"),
        (lambda: s.ExperimentPlateauStopper("loss", mode="low"), "neither 'min' nor 'max'"),
        (lambda: s.ExperimentPlateauStopper("loss", top=1), "top="),
        (lambda: s.ExperimentPlateauStopper("loss", std=0.0), "greater than 0"),
        (lambda: s.ExperimentPlateauStopper("loss", patience=-1), "patience="),
        (lambda: s.TrialPlateauStopper("loss", metric_threshold=0.0), "neither 'min' nor 'max'"),
        (lambda: s.TrialPlateauStopper("loss", std="low"), "std="),  # type: ignore[arg-type]
        (lambda: s.TimeoutStopper("1h"), "'1h'"),  # type: ignore[arg-type]
        (lambda: s.TimeoutStopper(-1), "at least 0"),
        (lambda: s.TimeoutStopper(1).add_spent(-1), "at least 0"),
        (lambda: s.CombinedStopper(3), "objects of Stopper only"),  # type: ignore[arg-type]
        (lambda: s.FunctionStopper(3), "needs a function"),  # type: ignore[arg-type]
    ],
)
def test_arguments_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
