"""A real Ray of several nodes on this machine. Its processes belong to ``python -m tests.ray_nodes``.

Each node is a raylet with its own workers. Tests connect to the head as a driver would, add nodes, and take them away
as a machine goes away: the raylet is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

_ROOT = Path(__file__).parents[1]
#: In the environment of every process that comes from a cluster.
_MARKER = "POWERTRAIN_RAY_NODES"
#: Ray's own processes, by what is in their command lines. All others below a raylet are a run's.
_OF_RAY = (
    *("ray::IDLE", "ray::_", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "default_worker.py"),
    *("/raylet/raylet", "/gcs_server", "/ray/_private/", "/ray/dashboard/", "/ray/autoscaler/"),
    "-m ray.util.client.server",  # which a head starts where grpcio is installed
)
#: In the command line of a warm server, before a descriptor and the pid of its agent.
_SERVER = "serve_clean("


class RayNodes:
    """The cluster. Its head has no CPUs, so that workers lie on nodes that can be taken away."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="ray-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_nodes", self._temporary.name],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "RAY_AUTH_MODE": "disabled",
                "RAY_DISABLE_IMPORT_WARNING": "1",
                _MARKER: self._temporary.name,
            },
        )
        self.address: str = self._answer()
        self.nodes: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, **options: Any) -> str:
        """One more node; returns its id."""
        node: str = self._ask("add", options)
        self.nodes.append(node)
        return node

    def kill(self, node: str) -> None:
        """The node goes away: its raylet is killed, and with it all that hangs on it."""
        self._ask("kill", node)
        self.nodes.remove(node)

    def remove(self, node: str) -> None:
        """The node leaves as one that is shut down."""
        self._ask("remove", node)
        self.nodes.remove(node)

    def processes_of_runs(self) -> set[int]:
        """Those on its nodes that are not Ray's own; also those that are not below it, having lost their parent."""
        marker = f"{_MARKER}={self._temporary.name}".encode()
        found = {process.pid for process in psutil.Process(self.pid).children(recursive=True)}
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and marker in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.add(int(entry))
        return {pid for pid in found - {self.pid} if not _is_of_ray(pid)}

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._temporary.cleanup()

    def _ask(self, command: str, argument: Any) -> Any:
        assert self._process.stdin is not None
        print(json.dumps([command, argument]), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[len("ANSWER ") :])
        raise RuntimeError("the cluster's process has ended")


def processes_of_ray(pid: int) -> set[int]:
    """Those below ``pid`` that are Ray's own, itself included: they last as long as the cluster."""
    found = {pid}
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return found
    return found | {process.pid for process in below if _is_of_ray(process.pid)}


def idle_agents() -> dict[str, int]:
    """Return the agents that this process keeps for its next run: their actors' ids and pids."""
    ours, ray = sys.modules.get("powertrain.engine.ray.idle_agents"), sys.modules.get("ray")
    if ours is None or ray is None or not ray.is_initialized():
        return {}
    table = ray._private.state.actors()
    ids = {actor._actor_id.hex() for actor in ours.idle_agents.actors()}
    return {id: table[id]["Pid"] for id in ids & set(table)}


def agent_of(pid: int) -> int:
    """Return the pid of the agent that the process is the warm server of, by its command line; 0 for all others."""
    found = None
    with contextlib.suppress(psutil.NoSuchProcess):
        found = re.search(re.escape(_SERVER) + r"\d+, (\d+),", " ".join(psutil.Process(pid).cmdline()))
    return int(found[1]) if found else 0


def _is_of_ray(pid: int) -> bool:
    """True also for what is gone."""
    try:
        line = " ".join(psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return True
    # A warm server's own line has all directories in which modules are found, among them Ray's.
    return not line or (_SERVER not in line and any(part in line for part in _OF_RAY))


def _serve(directory: str) -> None:
    from ray._common.utils import get_ray_address_file
    from ray.cluster_utils import Cluster

    # Ray writes the cluster's address there, and on a machine that never ran it the directory is absent.
    os.makedirs(os.path.dirname(get_ray_address_file(None)), exist_ok=True)

    def say(value: Any) -> None:
        print("ANSWER " + json.dumps(value), flush=True)

    memory = 100 * 2**20
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": memory,
            "include_dashboard": False,
            # It reads every worker's log again and again, for lines that no test looks at.
            "include_log_monitor": False,
            "temp_dir": directory,
        },
    )
    nodes: dict[str, Any] = {}
    say(cluster.address)
    for line in sys.stdin:
        command, argument = json.loads(line)
        if command == "add":
            node = cluster.add_node(**{"object_store_memory": memory, **argument})
            nodes[node.node_id] = node
            say(node.node_id)
        elif command == "kill":
            node = nodes.pop(argument)
            node.kill_raylet(check_alive=False)
            cluster.worker_nodes.discard(node)
            node.kill_all_processes(check_alive=False, allow_graceful=False)
            say(None)
        else:
            cluster.remove_node(nodes.pop(argument), allow_graceful=True)
            say(None)
    cluster.shutdown()


if __name__ == "__main__":
    _serve(sys.argv[1])
