"""A worker that the run has given up, and that lives: it can change nothing any more."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import clustered
import psutil
import pytest
import story
from tests.ray_nodes import RayNodes, agent_of
from tests.stories.engines import on
from tests.stories.going import all_of, going, places, sizes

from powertrain import ScalingConfig
from powertrain.run import events as ev

pytest.importorskip("ray")
pytestmark = on("ray")


@pytest.fixture
def nodes(ray_cluster: RayNodes) -> Iterator[None]:
    """Two nodes for one worker each."""
    added = [ray_cluster.add(num_cpus=1, resources={"fenced": 1}) for _ in range(2)]
    yield
    for node in added:
        ray_cluster.kill(node)


@pytest.mark.usefixtures("nodes")
def test_a_worker_whose_node_was_given_up_commits_nothing_although_it_lives_and_reports(
    fits: Any, ray_cluster: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from powertrain.engine.ray import agents

    monkeypatch.setattr(agents, "LOST_TIMEOUT_S", 6.0)
    trainer = fits.trainer(
        clustered.reports_until_told, workers=(1, 2), name="fenced", train_loop_config={"pace": 0.1}
    )
    trainer.scaling_config = ScalingConfig(
        num_workers=(1, 2), engine="ray", resources_per_worker={"CPU": 1, "fenced": 1}
    )
    with going(trainer) as run:
        story.await_told("steps-0-0", "steps-0-1")
        outcast = psutil.Process(places(fits.directory, 0, 2)[1]["pid"])
        agent = psutil.Process(agent_of(outcast.ppid()))
        agent.suspend()  # it is as silent as if its network were cut, and cannot end the worker
        try:
            began = run.fact(fits, "fenced", ev.TrainingStarted, attempt=1)
            before = int((fits.directory / "steps-0-1").read_text())
            wait_until(lambda: int((fits.directory / "steps-0-1").read_text()) > before + 5)
            wait_until(lambda: len(commits_since(fits, began.time)) > 5)
            assert outcast.is_running()
        finally:
            agent.resume()
        wait_until(lambda: not outcast.is_running())
    assert run.outcome["raised"] == "", run.outcome
    assert sizes(fits, "fenced") == [2, 1]
    assert {commit.attempt for commit in commits_since(fits, began.time)} == {1}
    assert [lost.ranks for lost in all_of(fits, "fenced", ev.Lost)] == [(1,)]


def commits_since(fits: Any, when: float) -> list[Any]:
    return [commit for commit in all_of(fits, "fenced", ev.Committed) if commit.time > when]


def wait_until(come: Any) -> None:
    deadline = time.monotonic() + story.PATIENCE
    while not come():
        assert time.monotonic() < deadline
        time.sleep(0.05)
