"""Callbacks get every event, and none of them can end the sweep."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest

from powertrain.errors import ConfigError
from powertrain.run.forced_end import EndedAtOnce
from powertrain.tune.callback import HOOKS, Callback, CallbackList
from powertrain.tune.trial import Trial

TRIAL = Trial("7f3a2_00000", 0, "train_7f3a2_00000", {"lr": 0.1})
INFO: dict[str, dict[str, Any]] = {
    "setup": {"stop": None, "num_samples": 1, "total_num_samples": 4},
    "on_step_begin": {"iteration": 1, "trials": [TRIAL]},
    "on_step_end": {"iteration": 1, "trials": [TRIAL]},
    "on_experiment_end": {"trials": [TRIAL]},
    "on_trial_result": {"iteration": 1, "trials": [TRIAL], "trial": TRIAL, "result": {"loss": 1.0}},
    "on_checkpoint": {"iteration": 1, "trials": [TRIAL], "trial": TRIAL, "checkpoint": object()},
}
for _hook in HOOKS - INFO.keys():
    INFO[_hook] = {"iteration": 1, "trials": [TRIAL], "trial": TRIAL}


class Heard(Callback):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []


def _recorder(hook: str) -> Callable[..., None]:
    def method(self: Heard, **info: Any) -> None:
        self.calls.append((hook, info))

    return method


for _hook in HOOKS:
    setattr(Heard, _hook, _recorder(_hook))


def listed(*callbacks: Any) -> tuple[CallbackList, list[str]]:
    said: list[str] = []
    return CallbackList(callbacks, said.append), said


def test_the_hooks_are_those_of_ray_tune() -> None:
    assert {
        "setup",
        "on_step_begin",
        "on_step_end",
        "on_trial_start",
        "on_trial_restore",
        "on_trial_save",
        "on_trial_result",
        "on_trial_complete",
        "on_trial_recover",
        "on_trial_error",
        "on_checkpoint",
        "on_experiment_end",
    } == HOOKS


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_each_hook_reaches_each_callback_with_its_arguments(hook: str) -> None:
    first, second = Heard(), Heard()
    calls, said = listed(first, Callback(), second)
    calls.call(hook, **INFO[hook], later="added")
    assert first.calls == second.calls == [(hook, {**INFO[hook], "later": "added"})]
    assert not said


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_hooks_that_are_not_defined_take_their_arguments_and_do_nothing(hook: str) -> None:
    assert getattr(Callback(), hook)(**INFO[hook], later="added") is None
    assert set(INFO[hook]) <= set(inspect.signature(getattr(Callback, hook)).parameters)


class Raising:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_trial_start(self, **info: Any) -> None:
        raise self.error

    def on_trial_error(self, **info: Any) -> None:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("no disk"), SystemExit(1)])
def test_what_a_callback_raises_is_said_once_for_each_hook_and_reaches_no_other(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard()
    calls, said = listed(Raising(error), heard)
    with caplog.at_level(logging.WARNING, "powertrain"):
        for _ in range(3):
            calls.call("on_trial_start", **INFO["on_trial_start"])
        calls.call("on_trial_error", **INFO["on_trial_error"])
    assert len(heard.calls) == 4
    assert len(said) == 2
    assert f"Raising.on_trial_start raised {type(error).__name__}: {error}" in said[0]
    assert "The sweep continues" in said[0]
    assert "Raising.on_trial_error" in said[1]
    assert sum("Traceback" in record.getMessage() for record in caplog.records) == 2


def test_two_callbacks_of_a_class_are_distinguished() -> None:
    calls, said = listed(Raising(ValueError("one")), Raising(ValueError("two")))
    calls.call("on_trial_start", **INFO["on_trial_start"])
    assert [message.count("one") for message in said] == [1, 0]


def test_an_interruption_is_let_through() -> None:
    calls, said = listed(Raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        calls.call("on_trial_start", **INFO["on_trial_start"])
    assert not said


def test_after_the_forced_end_none_is_called_again() -> None:
    heard = Heard()
    calls, said = listed(heard, Raising(EndedAtOnce()))
    with pytest.raises(EndedAtOnce):
        calls.call("on_trial_start", **INFO["on_trial_start"])
    calls.call("on_experiment_end", trials=[])
    assert len(heard.calls) == 1
    assert not said


def test_a_list_without_callbacks_is_false() -> None:
    assert not listed()[0]
    assert listed(Callback())[0]


def test_a_closed_list_calls_nothing() -> None:
    heard = Heard()
    calls, _ = listed(heard)
    calls.close()
    calls.call("on_experiment_end", trials=[])
    assert not heard.calls


def test_a_callback_needs_neither_the_base_class_nor_all_arguments() -> None:
    class Plain:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def setup(self) -> None:
            self.seen.append("setup")

        def on_trial_result(self, trial: Trial, result: dict[str, Any]) -> None:
            self.seen.append((trial.trial_id, result["loss"]))

    plain = Plain()
    calls, said = listed(plain)
    for hook in ("setup", "on_trial_start", "on_trial_result"):
        calls.call(hook, **INFO[hook])
    assert plain.seen == ["setup", ("7f3a2_00000", 1.0)]
    assert not said


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def on_trial_start(self, **info: Any) -> None:
        self.count += 1

    def get_state(self) -> dict[str, Any] | None:
        return {"count": self.count}

    def set_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Stateless(Raising):
    def get_state(self) -> dict[str, Any] | None:
        raise self.error


def test_states_survive_a_restart() -> None:
    calls, _ = listed(Callback(), Counting())
    calls.call("on_trial_start", **INFO["on_trial_start"])
    state = calls.get_state()
    assert state == {1: {"count": 1}}
    counting = Counting()
    again, said = listed(Callback(), counting)
    again.set_state({**state, 7: {"count": 9}})
    assert counting.count == 1
    assert not said
    assert listed(Callback())[0].get_state() is None


def test_a_state_that_cannot_be_had_is_said_and_does_not_keep_others_from_theirs() -> None:
    calls, said = listed(Stateless(ValueError("broken")), Counting())
    assert calls.get_state() == {1: {"count": 0}}
    assert "Stateless.get_state raised ValueError: broken" in said[0]


@pytest.mark.parametrize(
    ("callback", "message"),
    [(Counting, r"is a class. Give an object of it: callbacks=\[Counting\(\)\]"), (3, "none of the hooks")],
)
def test_what_is_no_callback_is_refused(callback: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CallbackList([callback], print)


def test_an_unknown_hook_is_refused() -> None:
    with pytest.raises(ConfigError, match="'on_lunch' is no hook"):
        listed(Callback())[0].call("on_lunch")
