"""What holds for every test: it has its own storage, and it leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import hypothesis
import psutil
import pytest
from tests.ray_autoscaled import RayAutoscaled
from tests.ray_nodes import RayNodes, processes_of_ray
from tests.s3_server import Proxy, S3Server

hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")

#: How long a test's processes, threads and files may take to go after its last line.
_PATIENCE = 5.0
#: Set by the tools around a test, not by the test.
_FOREIGN_VARIABLES = {"PYTEST_CURRENT_TEST", "COLUMNS", "LINES"}
#: Ray sets these for itself, when it is imported and when a process connects.
_RAY_VARIABLES = {"RAY_CLIENT_MODE", "PYTHONBREAKPOINT"}
#: torch sets these for itself when it is imported or first used.
_TORCH_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_directory() -> Iterator[None]:
    """Sockets of this session lie apart from any other's; the path is short because sockets need that."""
    directory = tempfile.mkdtemp(prefix="pt-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        patch.setenv("XDG_CONFIG_HOME", f"{directory}/config")
        # The clusters of these tests go without tokens. A process that once began to use them would go on for good.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield
    shutil.rmtree(directory)


@pytest.fixture(scope="module", autouse=True)
def _own_signal_handlers() -> Iterator[None]:
    """Connecting to Ray sets a handler for SIGTERM, and leaving does not take it back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        if handler is not None:  # which is one that was not set by Python
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _own_storage(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs without a storage path go to a directory of this test."""
    monkeypatch.setenv("POWERTRAIN_STORAGE", str(tmp_path_factory.mktemp("runs")))


@pytest.fixture(autouse=True)
def _nothing_left_behind(_own_storage: None) -> Iterator[None]:
    """Fails the test that leaves a process, a thread, a variable, a directory or a file behind."""
    before = _Surroundings()
    yield
    left = before.leftovers()
    assert not left, "the test left something behind:\n" + "\n".join(f"- {line}" for line in left)


@pytest.fixture
def mount_small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of so many bytes ("256k", "8m") for one test; skips where that is not allowed."""
    disk = tmp_path / "disk"

    def mount(size: str) -> Path:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        mounted = subprocess.run(command, capture_output=True)
        if mounted.returncode != 0:
            pytest.skip("a small file system cannot be mounted here: " + mounted.stderr.decode())
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """One S3 server for a whole file of tests."""
    with S3Server() as server:
        yield server


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    """A way to the S3 server that can be made to misbehave."""
    with Proxy(s3.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayNodes]:
    """A Ray of a head and one node with eight CPUs, for the whole session. Who adds a node takes it away again."""
    nodes = RayNodes()
    _clusters.append(nodes.pid)
    try:
        nodes.add(num_cpus=8, resources={"custom": 4})
        yield nodes
    finally:
        nodes.close()
        _clusters.remove(nodes.pid)


@pytest.fixture(scope="module")
def ray_cluster(ray_nodes: RayNodes) -> Iterator[RayNodes]:
    """The same, with this process connected to it."""
    import ray

    from powertrain.engine.ray_client import connect

    connect(ray_nodes.address)
    yield ray_nodes
    ray.shutdown()


@pytest.fixture(scope="module")
def ray_autoscaled(request: pytest.FixtureRequest) -> Iterator[RayAutoscaled]:
    """A Ray that adds nodes of one CPU by itself, for a file of tests; its options may be given as a parameter."""
    cluster = RayAutoscaled(**getattr(request, "param", {}))
    _clusters.append(cluster.pid)
    try:
        yield cluster
    finally:
        cluster.close()
        _clusters.remove(cluster.pid)


#: The processes that hold a Ray cluster of this session.
_clusters: list[int] = []


class _Surroundings:
    """What was there when the test began."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.cwd = os.getcwd()
        self.threads = set(threading.enumerate())
        self.children = set(psutil.Process().children(recursive=True))
        self.runtime_files = set(_runtime_files())

    def leftovers(self) -> list[str]:
        """One sentence for each thing that is still there after :data:`_PATIENCE`; puts back what it can."""
        lingering = _until_gone(lambda: [*self._processes(), *self._threads(), *self._files()])
        return [*lingering, *self._variables(), *self._directory(), *_process_group()]

    def _processes(self) -> list[str]:
        lasting = _lasting_pids()
        left = []
        for process in psutil.Process().children(recursive=True):
            if process not in self.children and process.pid not in lasting:
                left.extend(_description(process))
        return left

    def _threads(self) -> list[str]:
        return [
            f"thread {thread.name!r} (daemon={thread.daemon})"
            for thread in threading.enumerate()
            if thread not in self.threads and (not thread.daemon or thread.name.startswith("powertrain-"))
        ]

    def _files(self) -> list[str]:
        return [f"runtime file {path}" for path in _runtime_files() if path not in self.runtime_files]

    def _variables(self) -> list[str]:
        left = []
        ours = _FOREIGN_VARIABLES | _TORCH_VARIABLES | _RAY_VARIABLES
        for name in sorted((self.environ.keys() | os.environ.keys()) - ours):
            was, now = self.environ.get(name), os.environ.get(name)
            if was != now:
                left.append(f"environment variable {name}: {was!r} became {now!r}")
                _put_back(name, was)
        return left

    def _directory(self) -> list[str]:
        now = os.getcwd()
        if now == self.cwd:
            return []
        os.chdir(self.cwd)
        return [f"working directory {self.cwd} became {now}"]


def _until_gone(look: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + _PATIENCE
    pause = 0.001
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return left


def _description(process: psutil.Process) -> list[str]:
    try:
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid():
                return []  # its parent is on its way to reap it, and it holds nothing any more
            return [f"process {process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}"]
    except psutil.NoSuchProcess:
        return []


def _put_back(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _lasting_pids() -> set[int]:
    """Processes that tests share and that end with this one: warm servers, multiprocessing's tracker."""
    local = sys.modules.get("powertrain.engine.local")  # looking must not be what loads it
    servers = set(local.server_pids()) if local else set()
    tracker: int | None = getattr(resource_tracker._resource_tracker, "_pid", None)
    of_ray = {pid for cluster in _clusters for pid in processes_of_ray(cluster)}
    return servers | of_ray | ({tracker} if tracker else set())


def _runtime_files() -> list[Path]:
    """What runs have put into this session's runtime directory."""
    root = Path(os.environ["XDG_RUNTIME_DIR"], "powertrain")
    return sorted(root.iterdir()) if root.is_dir() else []


def _process_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["an initialised torch process group"]
