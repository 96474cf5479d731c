"""A run on a cluster that adds nodes by itself where there is need, one CPU each, at most two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import clustered
import pytest
from tests.ray_autoscaled import RayAutoscaled
from tests.stories.conftest import Fits
from tests.stories.going import changes_of_size, going

from powertrain import ScalingConfig
from powertrain.run import events as ev
from powertrain.run.scaling import policy

pytest.importorskip("ray")


@pytest.fixture
def fits(directory: Any, ray_autoscaled: RayAutoscaled) -> Iterator[Fits]:
    """Runs on the cluster that grows."""
    import ray

    from powertrain.engine.ray.client import connect

    connect(ray_autoscaled.address)
    yield Fits(directory, "ray")
    ray.shutdown()


def test_an_elastic_run_has_nodes_added_up_to_its_largest_size(
    fits: Fits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "GROW_DELAY_S", 0.5)
    trainer = fits.trainer(
        clustered.reports_until_told, workers=(1, 3), name="grows", train_loop_config={"pace": 0.2}
    )
    trainer.scaling_config = ScalingConfig(num_workers=(1, 3), engine="ray", resources_per_worker={"CPU": 1})
    with going(trainer) as run:
        run.fact(fits, "grows", ev.TrainingStarted, attempt=0)
        run.trains_on(fits, "grows", 2, after=0)
    assert run.outcome["raised"] == "", run.outcome
    assert changes_of_size(fits, "grows") == [1, 2]
    assert groups_left() == []


def groups_left() -> list[str]:
    """Placement groups that still ask for room, or have it."""
    from ray.util import placement_group_table

    return [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
