"""A real Ray with a real autoscaler on this machine: nodes come when Ray has work that fits nowhere, and go when idle.

The autoscaler is Ray's own, with the provider that Ray tests it with: a node is one more raylet, started by the
autoscaler's process. All of them belong to ``python -m tests.ray_autoscaled``, also those whose parent has ended; when
whoever asked for the cluster is done with it, or gone, exactly these are ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

_ROOT = Path(__file__).parents[1]
_PATIENCE = 60.0
_MEMORY = 100 * 2**20
#: prctl: processes below this one whose parent has ended become its children.
_PR_SET_CHILD_SUBREAPER = 36
#: What Ray's provider takes for the head; nodes are counted up from here.
_HEAD = "f" * 51 + "00000"


class RayAutoscaled:
    """The cluster. Its head has no CPUs, and there is no other node until one is needed; then at most ``most``.

    A node that has been idle for ``idle_s`` goes. Of Ray's two autoscalers ``version`` 2 is what KubeRay and ``ray up``
    have. One that ``only_looks`` is what KubeRay leaves where autoscaling is off: no node ever comes.
    """

    def __init__(
        self,
        *,
        cpus: int = 1,
        most: int = 2,
        resources: dict[str, float] | None = None,
        idle_s: float = 5.0,
        version: int = 2,
        only_looks: bool = False,
    ) -> None:
        self.temporary = tempfile.mkdtemp(prefix="ray-")
        worker = {"CPU": cpus, **(resources or {}), "object_store_memory": _MEMORY}
        setting = {"worker": worker, "most": most, "idle_s": idle_s, "only_looks": only_looks}
        self._keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.ray_autoscaled", self.temporary, json.dumps(setting)],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **_environment(self.temporary, version)},
        )
        assert self._keeper.stdout is not None
        for line in self._keeper.stdout:
            if line.startswith("ADDRESS "):
                self.address = line.split()[1]
                return
        self.close()
        raise RuntimeError("the cluster's process has ended")

    @property
    def pid(self) -> int:
        """All processes of the cluster are below this one."""
        return self._keeper.pid

    def close(self) -> None:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait(_PATIENCE)
        self._keeper.stdout.close()


def _environment(temporary: str, version: int) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "disabled",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": temporary,
        # Ray's provider insists on it.
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1" if version == 2 else "0",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }


def _config(address: str, worker: dict[str, float], most: int, idle_s: float) -> dict[str, Any]:
    return {
        "cluster_name": "autoscaled",
        "max_workers": most,
        "upscaling_speed": 100.0,
        "idle_timeout_minutes": idle_s / 60,
        "provider": {
            # Not "fake_multinode", which is the same class: for that Ray reads a file that its wheel does not have.
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": address,
            "head_node_id": _HEAD,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": worker, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
        # There is nothing to set up, but Ray looks.
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        **{f"{whose}setup_commands": [] for whose in ("", "head_", "worker_")},
        **{f"{whose}_start_ray_commands": [] for whose in ("head", "worker")},
        **{key: [] for key in ("initialization_commands", "cluster_synced_files")},
    }


def _serve(temporary: str, worker: dict[str, float], most: int, idle_s: float, only_looks: bool) -> None:
    from ray.cluster_utils import Cluster
    from ray.util import get_node_ip_address

    with socket.create_server(("", 0)) as taken:
        port: int = taken.getsockname()[1]
    config = Path(temporary, "autoscaling.json")
    config.write_text(json.dumps(_config(f"{get_node_ip_address()}:{port}", worker, most, idle_s)))
    own: dict[str, Any] = {
        "autoscaling_config": str(config),
        "env_vars": {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD, "RAY_CLOUD_INSTANCE_ID": _HEAD},
    }
    pod = {"env_vars": {"RAY_CLOUD_INSTANCE_ID": "pod", "RAY_NODE_TYPE_NAME": "headgroup"}}
    cluster = Cluster(
        initialize_head=True,
        shutdown_at_exit=False,
        head_node_args={
            "num_cpus": 0,
            "object_store_memory": _MEMORY,
            "include_dashboard": False,
            "gcs_server_port": port,
            **(pod if only_looks else own),
        },
    )
    print("ADDRESS " + cluster.address, flush=True)
    sys.stdin.read()  # until the process that started the cluster is done with it, or gone


def _end_all_below() -> None:
    """Until there are none: some may start others before they are ended."""
    while below := psutil.Process().children(recursive=True):
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(below, 5)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _main(temporary: str, setting: str) -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        _serve(temporary, **json.loads(setting))
    finally:
        _end_all_below()
        shutil.rmtree(temporary, ignore_errors=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
