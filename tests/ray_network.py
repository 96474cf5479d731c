"""A Ray whose nodes have a network of their own: each lives in a network namespace, with a cable to one bridge.

What a test does to a cable happens as it would to a machine: packets vanish, and nobody is told. The head, without
CPUs, is on this machine itself, at the bridge; so is the driver. A node has a host name of its own, and directories of
this machine can be hidden from it: what it finds there is an empty file system.

It takes a user who may make namespaces: root. Whatever becomes of the test's process, all of it is removed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tests.ray_nodes import agent_of, idle_agents, processes_of_ray

_ROOT = Path(__file__).parents[1]
#: In the environment of every process of the cluster: the network's name.
_MARK = "RAY_NETWORK"
_PATIENCE = 60.0
#: In a new mount and UTS namespace: take the host name $1, hide the directories up to "--", go on with the rest.
_ENTER = """
hostname "$1"; shift
while [ "$1" != -- ]; do mount -t tmpfs none "$1" || exit 1; shift; done
shift; exec "$@"
"""


class NotAllowed(Exception):
    """This machine or this user cannot have such a network; says why."""


@dataclass(frozen=True)
class NetworkNode:
    """A node: its host name, its address, what Ray calls it."""

    name: str
    address: str
    id: str


class RayNetwork:
    """The cluster. This process is connected to it from :meth:`connect` on."""

    def __init__(self) -> None:
        if shutil.which("ip") is None or shutil.which("unshare") is None:
            raise NotAllowed("the commands 'ip' and 'unshare' are not there")
        self._name = f"pt{secrets.token_hex(3)}"
        self._prefix = f"10.{64 + secrets.randbelow(64)}.{secrets.randbelow(256)}"
        self._numbers = itertools.count(2)
        self._temporary = tempfile.mkdtemp(prefix="ray-")
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_network", self._name, self._temporary],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._make_bridge()
            self.address = self._start_head()
        except BaseException:
            self.close()
            raise

    def _make_bridge(self) -> None:
        bridge = f"{self._name}b"
        mount = "mount -t tmpfs none /mnt && hostname probe"
        for needed in (
            ["ip", "netns", "add", f"{self._name}n0"],
            ["unshare", "--uts", "--mount", "sh", "-c", mount],
        ):
            tried = _run(*needed, check=False)
            if tried.returncode:
                raise NotAllowed(
                    f"namespaces cannot be made here ({' '.join(needed)}: {tried.stdout.strip()})"
                )
        # An address of its own: by itself a bridge takes that of a port, which then gets its packets even when cut off.
        _run("ip", "link", "add", bridge, "address", "02:70:74:00:00:01", "type", "bridge")
        _run("ip", "addr", "add", f"{self._prefix}.1/24", "dev", bridge)
        _run("ip", "link", "set", bridge, "up")

    def _start_head(self) -> str:
        port = free_port()
        self._ray_start(
            [],
            "--head",
            f"--node-ip-address={self._prefix}.1",
            f"--port={port}",
            "--num-cpus=0",
            "--include-dashboard=false",
            f"--temp-dir={self._temporary}",
        )
        return f"{self._prefix}.1:{port}"

    def _ray_start(self, prefix: Sequence[str], *options: str) -> None:
        """Its processes are children of neither this one nor the command that starts them."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        common = ["--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0"]
        environment = {
            **os.environ, "RAY_AUTH_MODE": "disabled", "RAY_DISABLE_IMPORT_WARNING": "1", _MARK: self._name,
        }  # fmt: skip
        _run(*prefix, *command, *common, *options, env=environment, cwd=_ROOT)

    def connect(self) -> None:
        from powertrain.engine.ray.client import connect

        connect(self.address, _node_ip_address=f"{self._prefix}.1")

    def add(self, *, cpus: int, hidden: Sequence[str] = (), **resources: float) -> NetworkNode:
        """One more node; waits until Ray knows it."""
        number = next(self._numbers)
        name, address = f"node-{number}", f"{self._prefix}.{number}"
        space, cable = f"{self._name}n{number}", f"{self._name}v{number}"
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
        for inside in ("lo", "eth0"):
            _run("ip", "-n", space, "link", "set", inside, "up")
        _run("ip", "link", "set", cable, "master", f"{self._name}b", "up")
        enter = [
            "nsenter",
            f"--net=/run/netns/{space}",
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            _ENTER,
            "sh",
        ]
        self._ray_start(
            [*enter, name, *hidden, "--"],
            f"--address={self.address}",
            f"--node-ip-address={address}",
            f"--num-cpus={cpus}",
            f"--resources={json.dumps(resources)}",
        )
        return NetworkNode(name, address, self._id_of(address))

    def _id_of(self, address: str) -> str:
        import ray

        table: Any = ray.nodes
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            for found in table():
                if found["Alive"] and found["NodeManagerAddress"] == address:
                    return str(found["NodeID"])
            time.sleep(0.05)
        raise TimeoutError(f"Ray does not know the node at {address} after {_PATIENCE:g} s")

    # ------------------------------------------------------------------ what happens to nodes

    def cut(self, node: NetworkNode) -> None:
        """Nothing reaches the node any more, and nothing it sends arrives."""
        _run("ip", "link", "set", self._cable(node), "nomaster")

    def heal(self, node: NetworkNode) -> None:
        _run("ip", "link", "set", self._cable(node), "master", f"{self._name}b")

    def block(self, node: NetworkNode, port: int) -> None:
        """The node cannot connect to this port of anybody."""
        _run("ip", "-n", self._space(node), "rule", "add", *_to(port))

    def unblock(self, node: NetworkNode, port: int) -> None:
        _run("ip", "-n", self._space(node), "rule", "del", *_to(port))

    def ours(self, node: NetworkNode | None = None) -> list[str]:
        """Processes of runs, on a node or on all, a line for each: neither Ray's own, nor agents that this process
        keeps for its next run."""
        pids = _marked(self._name) if node is None else _pids_in(self._space(node))
        others = processes_of_ray(1) | set(idle_agents().values())
        lines = {pid: _command_line(pid) for pid in pids if pid not in others and agent_of(pid) not in others}
        return [f"{pid}: {line}" for pid, line in lines.items() if line]

    def seen_by(self, node: NetworkNode, path: str) -> Path:
        """A path of the node, which may be hidden from this process."""
        return Path(f"/proc/{_pids_in(self._space(node))[0]}/root", path.lstrip("/"))

    def close(self) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.wait(_PATIENCE)

    def _space(self, node: NetworkNode) -> str:
        return f"{self._name}n{node.address.rpartition('.')[2]}"

    def _cable(self, node: NetworkNode) -> str:
        return f"{self._name}v{node.address.rpartition('.')[2]}"


def _run(*command: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
    return done


def _to(port: int) -> list[str]:
    return ["pref", "1", "ipproto", "tcp", "dport", str(port), "unreachable"]


def free_port() -> int:
    """A number that is free just now."""
    with socket.create_server(("", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def _pids_in(space: str) -> list[int]:
    return [int(pid) for pid in _run("ip", "netns", "pids", space).stdout.split()]


def _marked(name: str) -> list[int]:
    """All processes of a network, on whichever node."""
    mark, found = f"{_MARK}={name}".encode(), []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and mark in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return found


def _command_line(pid: int) -> str:
    """Empty for a process that is gone, or about to be."""
    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _sweep(name: str, temporary: str) -> None:
    """End and remove all that belongs to a network."""
    spaces = [
        line.split()[0] for line in _run("ip", "netns", "list", check=False).stdout.splitlines() if line
    ]
    own = [space for space in spaces if space.startswith(name)]
    deadline = time.monotonic() + _PATIENCE / 2
    while (left := {*_marked(name), *itertools.chain.from_iterable(map(_pids_in, own))}) and (
        time.monotonic() < deadline
    ):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    for space in own:
        _run("ip", "netns", "del", space, check=False)
    _run("ip", "link", "del", f"{name}b", check=False)
    shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    sys.stdin.read()  # until the process that made the network is done with it, or gone
    _sweep(*sys.argv[1:])
