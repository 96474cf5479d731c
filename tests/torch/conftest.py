"""Real processes for tests of torch's side: ``forked(n)`` gives a worker group of ``n`` of them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tests.torch.lone_rank import session_of

from powertrain.backend import Worker, WorkerMetadata
from powertrain.worker import session as worker_session
from powertrain.worker.session import Session


class ForkedGroup:
    """A worker group of forked processes. ``close`` ends them, stuck or not."""

    def __init__(self, zygote: subprocess.Popen[str], world_size: int, directory: Path) -> None:
        self._links: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        # Ranks connect in any order, and a backlog of one would refuse some.
        with Listener(str(directory / "ranks"), "AF_UNIX", backlog=world_size) as listener:
            assert zygote.stdin is not None
            for rank in range(world_size):
                zygote.stdin.write(f"{rank} {world_size} {listener.address}\n")
            zygote.stdin.flush()
            for _ in range(world_size):
                link = listener.accept()
                rank, pid = link.recv()
                self._links[rank], self._pids[rank] = link, pid
        self._queues = [ThreadPoolExecutor(1) for _ in range(world_size)]

    @property
    def workers(self) -> list[Worker]:
        return [
            Worker(rank, WorkerMetadata("node", "127.0.0.1", socket.gethostname(), self._pids[rank]))
            for rank in range(len(self))
        ]

    def __len__(self) -> int:
        return len(self._links)

    def execute(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [future.result(timeout=30) for future in self.execute_async(fn, *args, **kwargs)]

    def execute_async(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Future[Any]]:
        return [self.execute_single_async(rank, fn, *args, **kwargs) for rank in range(len(self))]

    def execute_single(self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.execute_single_async(rank, fn, *args, **kwargs).result(timeout=30)

    def execute_single_async(
        self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Future[Any]:
        return self._queues[rank].submit(self._call, rank, cloudpickle.dumps((fn, args, kwargs)))

    def kill(self, rank: int) -> None:
        os.kill(self._pids[rank], signal.SIGKILL)

    def close(self) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for queue in self._queues:
            queue.shutdown()
        for link in self._links.values():
            link.close()

    def _call(self, rank: int, call: bytes) -> Any:
        self._links[rank].send_bytes(call)
        succeeded, value = cloudpickle.loads(self._links[rank].recv_bytes())
        if not succeeded:
            raise value
        return value


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    here = Path(__file__).parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    process = subprocess.Popen(
        [sys.executable, str(here / "zygote.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path != str(here))},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait(10)
    process.stdout.close()


@pytest.fixture
def forked(
    zygote: subprocess.Popen[str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[[int], ForkedGroup]]:
    """Start a group of this many ranks; its processes end with the test."""
    # Functions of the test module travel by value: ranks cannot import it.
    cloudpickle.register_pickle_by_value(request.module)
    groups: list[ForkedGroup] = []

    def start(world_size: int) -> ForkedGroup:
        groups.append(ForkedGroup(zygote, world_size, tmp_path))
        return groups[-1]

    yield start
    for group in groups:
        group.close()
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Session]:
    """Be this rank of that many."""

    def become(rank: int, world_size: int, positions: dict[str, Any] | None = None, **place: Any) -> Session:
        session = session_of(rank, world_size, positions, **place)
        monkeypatch.setattr(worker_session, "_session", session)
        return session

    from powertrain.torch import device  # loads torch, which most of these tests do in other processes

    monkeypatch.setattr(device, "_settings", device._Settings())
    become(0, 1)
    return become


@pytest.fixture
def ranks(forked: Callable[[int], Any], request: pytest.FixtureRequest) -> Callable[[int], Any]:
    """Start a group of ranks that are in their process group; ``GROUP_TIMEOUT_S`` of the module bounds a collective."""
    from powertrain.torch.backend import TorchBackend
    from powertrain.torch.config import TorchConfig

    timeout_s = getattr(request.module, "GROUP_TIMEOUT_S", 30)

    def start(world_size: int) -> Any:
        group = forked(world_size)
        TorchBackend().on_start(group, TorchConfig(backend="gloo", timeout_s=timeout_s))
        return group

    return start
