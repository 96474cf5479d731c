"""Detection of processes, threads and files that a test leaves behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
from tests.ray_nodes import idle_agents, processes_of_ray

#: Seconds for a test's processes, threads and files to disappear after its last line.
_PATIENCE_S = 20.0
#: Set by the tools around a test, not by the test.
_FOREIGN_VARIABLES = {"PYTEST_CURRENT_TEST", "COLUMNS", "LINES"}
#: Ray sets these for itself, when it is imported and when a process connects.
_RAY_VARIABLES = {"RAY_CLIENT_MODE", "PYTHONBREAKPOINT"}
#: torch sets these for itself when it is imported or first used.
_TORCH_VARIABLES = {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
#: The processes that hold a Ray cluster of this session, and those that fork scripts.
clusters: list[int] = []
warm: list[int] = []


class Surroundings:
    """Processes, threads, variables, directories and files that exist when a test begins."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.cwd = os.getcwd()
        self.threads = set(threading.enumerate())
        self.children = set(descendants())
        self.runtime_files = set(_runtime_files())

    def leftovers(self) -> list[str]:
        """Return one sentence for each leftover after :data:`_PATIENCE_S`; restore the state where possible."""
        lingering = _until_gone(lambda: [*self._processes(), *self._threads(), *self._files()])
        return [*lingering, *self._variables(), *self._directory(), *_process_group()]

    def _processes(self) -> list[str]:
        new = [pid for pid in descendants() if pid not in self.children]
        lasting = _lasting_pids() if new else set()
        return [line for pid in new if pid not in lasting for line in _description(pid)]

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


def descendants(pid: int | str = "self") -> Iterator[int]:
    """Yield the processes below this one. Linux lists the children of each thread: no walk over all processes."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    for thread in threads:
        try:
            children = Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


def _until_gone(look: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + _PATIENCE_S
    pause = 0.001
    while (left := look()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return left


def _description(pid: int) -> list[str]:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            if process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid():
                return []  # its parent is about to reap it, and it holds no resources
            return [f"process {process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}"]
    except psutil.NoSuchProcess:
        return []


def _put_back(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _lasting_pids() -> set[int]:
    """Return processes that tests share and that end with this one: warm servers, idle agents on Ray,
    multiprocessing's tracker."""
    local = sys.modules.get("powertrain.engine.local.warm_server")  # the check must not import it
    servers = set(local.server_pids()) if local else set()
    tracker: int | None = getattr(resource_tracker._resource_tracker, "_pid", None)
    of_ray = {pid for cluster in clusters for pid in processes_of_ray(cluster)}
    return servers | of_ray | set(idle_agents().values()) | set(warm) | ({tracker} if tracker else set())


def _runtime_files() -> list[Path]:
    """Return the files of runs in this session's runtime directory."""
    root = Path(os.environ["XDG_RUNTIME_DIR"], "powertrain")
    return sorted(root.iterdir()) if root.is_dir() else []


def _process_group() -> list[str]:
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["an initialised torch process group"]
