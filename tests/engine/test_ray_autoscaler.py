"""Whether a cluster adds nodes by itself, and that it does: on real clusters, with each of Ray's autoscalers.

A process that is connected to one cluster cannot look at another, so those that scale are looked at by drivers of
their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest
from tests.ray_autoscaled import RayAutoscaled
from tests.ray_nodes import RayNodes

pytest.importorskip("ray")

_DRIVER = """
import json, sys, time
import ray
from powertrain.engine.ray.autoscaler import autoscales

def until(holds):
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.2)
    return holds()

def alive():
    return sum(node["Alive"] for node in ray.nodes())

answers = {"without Ray": autoscales()}
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
"""
_SCALES = """
from ray.util.placement_group import placement_group, remove_placement_group

deadline = time.monotonic() + 30
while not (answer := autoscales()) and time.monotonic() < deadline:
    time.sleep(1)
answers["scales"] = answer
answers["before"] = alive()
group = placement_group([{"CPU": 1}])
answers["placed"] = group.wait(60)
answers["with a group"] = alive()
remove_placement_group(group)
answers["leaves"] = until(lambda: alive() == 1)
"""
_LOOKS = """
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
from ray.experimental.internal_kv import internal_kv_get_gcs_client

def has_reported():
    status = internal_kv_get_gcs_client().get_cluster_status(timeout_s=5)
    return GetClusterStatusReply.FromString(status).HasField("autoscaling_state")

answers["reports"] = until(has_reported)
answers["ever"] = False
for _ in range(60):
    answers["ever"] |= autoscales()
    time.sleep(0.05)
"""


def ask(cluster: RayAutoscaled, script: str) -> dict[str, Any]:
    script = f"{_DRIVER}{script}\nray.shutdown()\nprint(json.dumps(answers))"
    driver = [sys.executable, "-c", script, cluster.address]
    said = subprocess.run(driver, stdout=subprocess.PIPE, text=True, check=True, timeout=110).stdout
    answers: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answers


def test_a_cluster_whose_nodes_are_added_by_hand_does_not_scale(ray_cluster: RayNodes) -> None:
    from ray.experimental import internal_kv

    from powertrain.engine.ray.autoscaler import autoscales

    store: Any = internal_kv
    answers = [autoscales()]
    while b"node_" not in (store._internal_kv_get("__autoscaling_status") or b""):
        answers.append(autoscales())
        time.sleep(0.05)
    assert not any([*answers, autoscales()])


@pytest.mark.parametrize(
    "ray_autoscaled",
    [{"version": 1, "idle_s": 1}, {"version": 2, "idle_s": 1}],
    indirect=True,
    ids=["v1", "v2"],
)
def test_a_placement_group_that_waits_brings_a_node_which_leaves_when_it_is_idle(
    ray_autoscaled: RayAutoscaled,
) -> None:
    assert ask(ray_autoscaled, _SCALES) == {
        "without Ray": False,
        "scales": True,
        "before": 1,
        "placed": True,
        "with a group": 2,
        "leaves": True,
    }


@pytest.mark.parametrize("ray_autoscaled", [{"only_looks": True}], indirect=True, ids=["v2"])
def test_a_cluster_of_kuberay_with_autoscaling_off_does_not_scale(ray_autoscaled: RayAutoscaled) -> None:
    assert ask(ray_autoscaled, _LOOKS) == {"without Ray": False, "reports": True, "ever": False}
