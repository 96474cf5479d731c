"""This very process: one slot, whose rank runs in the thread that called ``fit``.

The controller runs in a side thread and uses the wire as always; only ``fork`` is different: it hands the rank to
the calling thread, which waits in :meth:`InlineEngine.serve`. Standard output stays where it is, breakpoints work,
and an exception is retried by calling the function again.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from powertrain.engine import process, resources
from powertrain.engine.base import (
    Claim,
    EventSink,
    Exited,
    Granted,
    Inspection,
    OutputSink,
    ProcessSpec,
    RankInDriver,
    Slot,
    SlotShape,
    Started,
)
from powertrain.engine.local.server import apply_env
from powertrain.errors import ConfigError
from powertrain.trace.stacks.stacks import dump_path
from powertrain.wire.hub import Hub
from powertrain.worker.main import Rank, WorkerSpec
from powertrain.worker.session import in_worker

_numbers = itertools.count(1)
#: Held while a rank lives in this process.
_in_use = threading.Lock()


@dataclass(frozen=True)
class InlineClaim:
    id: str


class InlineEngine:
    """One slot in the calling thread."""

    name = "inline"
    restarts = True
    replaces = False
    owns_processes = False
    shares_driver_process = True
    forks_driver = False

    def __init__(
        self, function: Callable[[], Any], custom_resources: Mapping[str, float] | None = None
    ) -> None:
        self._function = function
        self._machine = resources.detect(custom_resources)
        self._forks: queue.SimpleQueue[tuple[Slot, ProcessSpec] | None] = queue.SimpleQueue()
        self._events: EventSink = lambda _: None
        self._started = False
        #: The last exception of the function, for the caller to chain to.
        self.error: BaseException | None = None

    @property
    def rank_in_driver(self) -> RankInDriver:
        return self

    def connect(self, hub: Hub) -> None:
        """Do nothing: the rank is in this process."""

    def start(self, events: EventSink, output: OutputSink) -> None:
        if in_worker() or not _in_use.acquire(blocking=False):
            raise ConfigError(
                "Another run is training in this process already, and a process can be only one rank at a time. Let it "
                "end first, or give this one a process of its own with ScalingConfig(num_workers=1)."
            )
        self._started = True
        self._events = events

    def wire_address(self) -> str:
        return "ipc"

    def request(self, count: int, shape: SlotShape) -> InlineClaim:
        resources.check(self._machine, count, shape)
        claim = InlineClaim(f"inline-{next(_numbers)}")
        gpus = resources.share_gpus(self._machine.visible, count, shape.gpus)[0]
        slot = Slot(id=f"{claim.id}/0", host=socket.gethostname(), address="127.0.0.1", gpus=gpus)
        self._events(Granted(claim.id, (slot,)))
        return claim

    def withdraw(self, claim: Claim) -> None:
        """Do nothing: each claim is granted when it is made."""

    def watch_capacity(self, shape: SlotShape, wanted: int = 0) -> None:
        """Do nothing: there is always one slot, so no change to report."""

    def fork(self, slot: Slot, spec: ProcessSpec) -> None:
        self._forks.put((slot, spec))

    def attend(self, beside: Slot, spec: ProcessSpec) -> None:
        """Return None: this process is the user's own and starts no others; the controller in it uploads
        checkpoints."""

    def signal(self, slot: Slot, number: signal.Signals) -> None:
        """Signal the main thread, since no process can be killed here: the second SIGTERM ends the function as soon as
        it is back in Python."""
        if number == signal.SIGTERM:
            os.kill(os.getpid(), number)

    def inspect(self, slot: Slot, stacks: bool = False) -> Inspection:
        seen = process.inspection(os.getpid(), "rank 0", dump_path(), stacks)
        return replace(seen, state="running")  # the caller is this process itself

    def is_in_doubt(self, since: float) -> bool:
        return False

    def release(self, slots: Sequence[Slot]) -> None:
        """Do nothing: this engine holds no slots."""

    def close(self) -> None:
        """Let :meth:`serve` return."""
        self._events = lambda _: None
        self._forks.put(None)
        if self._started:
            self._started = False
            _in_use.release()

    def serve(self) -> None:
        """Run each rank that is forked, in this thread, until the engine is closed."""
        while (fork := self._forks.get()) is not None:
            slot, spec = fork
            self._events(Started(slot, os.getpid()))
            code = self._live(spec)
            self._events(Exited(slot, os.getpid(), code))

    def _live(self, spec: ProcessSpec) -> int:
        # Which GPUs this process sees was fixed before it called ``fit``.
        env = {name: value for name, value in spec.env.items() if name != "CUDA_VISIBLE_DEVICES"}
        with environment(env):
            rank = Rank(msgspec.msgpack.decode(spec.payload, type=WorkerSpec), self._function)
            try:
                return rank.live()
            finally:
                self.error = rank.error


@contextmanager
def environment(env: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables within the block, and restore the previous values afterwards."""
    before = {name: os.environ.get(name) for name in env}
    try:
        apply_env(env)
        yield
    finally:
        apply_env(before)
