"""Options of ``remote`` on one machine: what holds, what has no effect and says so once, what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from powertrain.calls import options
from powertrain.config.validation import VALIDATION_OPTIONS_WITHOUT_EFFECT
from powertrain.errors import ConfigError


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the lines that were printed since it was last called."""
    monkeypatch.setattr(options, "_said", set())
    caplog.set_level(logging.WARNING, "powertrain")

    def printed() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return printed


def test_an_option_without_effect_is_named_once_with_the_reason(lines: Any) -> None:
    for _ in range(2):
        options.of_a_task({"max_retries": 3, "memory": 2**30, "scheduling_strategy": "SPREAD"}, "load")
    (line,) = lines()
    assert line.startswith(
        "Accepted as in Ray, but without effect on one machine: max_retries (it is not started"
    )
    assert "memory (memory is not reserved); scheduling_strategy (there is one machine" in line
    assert line.endswith(", of load.")
    options.of_an_actor({"max_restarts": -1, "name": "counter", "max_task_retries": 2}, "Counter")
    options.check_method({"concurrency_group": "io", "name": "first"}, "Counter.add")
    (made, called) = lines()
    assert made.count("it is not started again") == 2
    assert "name (an actor is reached through its handle)" in made
    assert "concurrency_group (all methods share max_concurrency), of Counter.add" in called


def test_a_value_that_requests_what_happens_anyway_gives_no_notice(lines: Any) -> None:
    options.of_a_task({"max_retries": 0, "num_returns": 1, "memory": None, "name": "first"}, "load")
    options.of_an_actor({"max_restarts": 0, "get_if_exists": False, "lifetime": "non_detached"}, "Counter")
    assert lines() == []


def test_max_concurrency_and_lifetime_and_variables_hold(lines: Any) -> None:
    meaning = options.of_an_actor(
        {"max_concurrency": 4, "lifetime": "detached", "runtime_env": {"env_vars": {"A": "1"}}}, "Counter"
    )
    assert (meaning.max_concurrency, meaning.detached, meaning.env) == (4, True, {"A": "1"})
    assert meaning.shape.cpus == 0, "as in Ray, an actor reserves nothing unless it is asked to"
    assert lines() == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_returns": 2}, r"num_returns=2\) cannot be met on one machine.*Return a tuple"),
        ({"num_returns": "streaming"}, r"num_returns='streaming'\) cannot be met"),
        ({"runtime_env": {"pip": ["numpy"]}}, r"runtime_env of load has 'pip', and only a Ray cluster"),
        ({"runtime_env": {"env_vars": {"A": 1}}}, r"has a int for 'A'. Write it as a string"),
        ({"runtime_env": "env.yaml"}, r"runtime_env of load was given a str"),
        ({"num_cpus": -1}, r"remote\(num_cpus\) was given -1"),
    ],
)
def test_what_would_change_the_values_of_a_task_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.of_a_task(given, "load")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"get_if_exists": True}, r"get_if_exists=True\) cannot find an actor.*pass the handle"),
        ({"lifetime": "long"}, r"lifetime='long'\) is not a lifetime"),
        ({"max_concurrency": 0}, r"max_concurrency=0\) is not a number of calls"),
    ],
)
def test_what_would_change_an_actor_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.of_an_actor(given, "Counter")
    with pytest.raises(ConfigError, match="num_returns=2"):
        options.check_method({"num_returns": 2}, "Counter.add")


def test_a_misspelt_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"no option 'max_retry'. Did you mean 'max_retries'\? It takes"):
        options.check_names({"max_retry": 1}, options.OF_A_TASK, "remote() of a function")
    with pytest.raises(ConfigError, match=r"no option 'max_restart'. Did you mean 'max_restarts'\?"):
        options.check_names({"max_restart": 1}, options.OF_AN_ACTOR, "remote() of a class")


def test_a_validation_accepts_the_options_that_have_no_effect_on_a_task() -> None:
    ignored = {*options._WITHOUT_EFFECT, *options._WITHOUT_EFFECT_FOR_A_TASK, "name"}
    assert set(VALIDATION_OPTIONS_WITHOUT_EFFECT) == ignored
