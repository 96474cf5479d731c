"""Another benchmark's script as a driver of a Ray cluster: python connected.py ADDRESS MODULES SCRIPT ARGUMENTS

As a script for a cluster is written: first the imports (MODULES, with commas between), then ``ray.init``, then the
trainer. The script starts after that, and counts from there, because BENCHMARK_STARTED is removed: neither the start of
Ray nor of the interpreter counts. Leftovers of its run on the cluster while the driver is still alive are written to
the file that BENCHMARK_LEFT names, one per line.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import time

import ray

#: Seconds in which what has been given back may still be seen.
GRACE = 5.0


def left_on_cluster() -> list[str]:
    """Placement groups and this driver's actors that are still there: Ray Train starts one that serves all drivers.

    Powertrain's agents for the driver's next run are none of them. They end with the driver, and whether their
    processes do is looked for after it.
    """
    job = ray.get_runtime_context().get_job_id()
    groups = ray.util.placement_group_table().values()
    actors = ray._private.state.actors()
    return [
        *(f"placement group {group['name']}" for group in groups if group["state"] != "REMOVED"),
        *(
            f"actor {actor['ActorClassName']}"
            for id, actor in actors.items()
            if actor["State"] != "DEAD" and actor["JobID"] == job and id not in idle_agents()
        ),
    ]


def idle_agents() -> set[str]:
    """The actors that Powertrain, if this driver has it, keeps for the next run."""
    module = sys.modules.get("powertrain.engine.ray.idle_agents")
    return set() if module is None else {actor._actor_id.hex() for actor in module.idle_agents.actors()}


address, modules, script = sys.argv[1:4]
del sys.argv[:3]
# Ray gives its workers the directory of the script that runs: it must be the one whose modules they import.
sys.path[0] = os.path.dirname(script)
os.environ.pop("BENCHMARK_STARTED", None)
for module in modules.split(","):
    importlib.import_module(module)
ray.init(address=address)
runpy.run_path(script, run_name="__main__")

deadline = time.monotonic() + GRACE
while (left := left_on_cluster()) and time.monotonic() < deadline:
    time.sleep(0.05)
with open(os.environ.get("BENCHMARK_LEFT", os.devnull), "a") as file:
    file.writelines(f"{thing}\n" for thing in left)
ray.shutdown()
