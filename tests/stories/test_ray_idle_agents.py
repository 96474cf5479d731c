"""Agents of a run that is over serve the next run of the same driver, or are gone, and the user notices neither."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

import clustered
import psutil
import pytest
import story
from tests.ray_nodes import agent_of
from tests.stories.engines import on
from tests.stories.going import all_of, going, places

from powertrain import ScalingConfig
from powertrain.run import events as ev

pytest.importorskip("ray")
pytestmark = on("ray")


def servers_of(fits: Any, name: str, **options: Any) -> set[int]:
    """Run two ranks and return the servers that they were forked from."""
    trainer = fits.trainer(clustered.tells_its_place, workers=2, name=name)
    if options:
        trainer.scaling_config = ScalingConfig(num_workers=2, engine="ray", engine_options=options)
    assert trainer.fit().metrics["step"] == 1
    found = {place["server"] for place in places(fits.directory, 0, 2)}
    for rank in range(2):
        (fits.directory / f"place-0-{rank}").unlink()
    return found


def test_a_second_fit_forks_from_the_servers_of_the_first(fits: Any) -> None:
    assert servers_of(fits, "first") == servers_of(fits, "second") == servers_of(fits, "third")


@pytest.mark.parametrize("runtime_env", [{"env_vars": {"ONLY_THERE": "set"}}])
def test_a_run_with_another_runtime_env_has_agents_of_its_own(
    fits: Any, runtime_env: Mapping[str, Any]
) -> None:
    plain = servers_of(fits, "plain")
    of_its_own = servers_of(fits, "other", runtime_env=runtime_env)
    assert not plain & of_its_own
    assert servers_of(fits, "plain-again") == plain
    assert servers_of(fits, "other-again", runtime_env=runtime_env) == of_its_own


@pytest.mark.parametrize("of", [lambda server: server, agent_of], ids=["server", "agent"])
def test_what_was_killed_between_two_fits_is_started_again(fits: Any, of: Any) -> None:
    before = servers_of(fits, "first")
    for server in before:
        gone = psutil.Process(of(server))
        gone.send_signal(signal.SIGKILL)
        gone.wait(story.PATIENCE)
    assert not before & servers_of(fits, "second")


def test_an_agent_ends_when_no_run_comes(fits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from powertrain.engine.ray import idle_agents

    monkeypatch.setattr(idle_agents, "IDLE_TIMEOUT_S", 0.1)
    before = servers_of(fits, "only")
    pids = before | {agent_of(server) for server in before}
    wait_until(lambda: not any(map(psutil.pid_exists, pids - {0})))


def test_a_run_that_takes_longer_than_agents_rest_ends_in_order(
    fits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from powertrain.engine.ray import idle_agents

    monkeypatch.setattr(idle_agents, "IDLE_TIMEOUT_S", 8.0)
    before = servers_of(fits, "first")
    trainer = fits.trainer(
        clustered.reports_until_told, workers=2, name="long", train_loop_config={"pace": 0.5}
    )
    with going(trainer) as run:
        began = run.fact(fits, "long", ev.TrainingStarted).time
        wait_until(lambda: any(fact.time > began + 9.0 for fact in all_of(fits, "long", ev.Committed)))
        assert {place["server"] for place in places(fits.directory, 0, 2)} == before
    assert run.outcome["raised"] == "", run.outcome
    assert len(all_of(fits, "long", ev.AttemptStarted)) == 1


def wait_until(come: Callable[[], Any]) -> None:
    deadline = time.monotonic() + story.PATIENCE
    while not come():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_whose_ranks_failed_leaves_agents_that_serve_the_next(fits: Any) -> None:
    before = servers_of(fits, "first")
    trainer = fits.trainer(clustered.fails_at_its_place, workers=2, name="fails")
    assert "no good" in story.outcome_of(trainer.fit)["message"]
    assert {place["server"] for place in places(fits.directory, 0, 2)} == before
    for rank in range(2):
        os.unlink(fits.directory / f"place-0-{rank}")
    assert servers_of(fits, "third") == before
