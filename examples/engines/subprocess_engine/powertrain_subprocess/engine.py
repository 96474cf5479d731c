"""Slots of this machine, and a fresh interpreter for each process on them.

Slots are granted immediately: this engine does not share the machine with other runs, as the local engine does.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal as signals
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from powertrain.engine import process, resources
from powertrain.engine.base import (
    Capacity,
    Claim,
    Engine,
    EventSink,
    Exited,
    Granted,
    Inspection,
    OutputSink,
    ProcessSpec,
    Slot,
    SlotShape,
    Started,
)
from powertrain.engine.output import OutputReader
from powertrain.errors import EngineError
from powertrain.wire.hub import Hub

#: Names a process of this engine in the environment of all processes that it starts.
_MARK = "POWERTRAIN_SUBPROCESS"
#: Seconds for killed processes to end.
_KILL_TIMEOUT_S = 10.0
#: Signals that do not reach a shielded process before it unblocks them itself.
_SHIELDED = {signals.SIGTERM, signals.SIGHUP, signals.SIGUSR1, signals.SIGUSR2}


@dataclass(frozen=True)
class SubprocessClaim:
    """The handle of one request."""

    id: str


class _Running:
    """One process of the engine, started and awaited on its own thread."""

    def __init__(self, spec: ProcessSpec, mark: str) -> None:
        self.spec, self.mark = spec, mark
        #: 0 until it exists.
        self.pid = 0
        self.thread = threading.current_thread()
        self._lock = threading.Lock()
        self._early: list[signals.Signals] = []

    def on_start(self, pid: int) -> None:
        """Deliver the signals that were sent before the process existed."""
        with self._lock:
            self.pid = pid
        for number in self._early:
            self.signal(number)

    def signal(self, number: signals.Signals) -> None:
        with self._lock:
            if not self.pid:
                self._early.append(number)
                return
        if number == signals.SIGKILL:
            process.kill_scope(self.pid)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class SubprocessEngine(Engine):
    """Engine that starts each rank as a fresh interpreter. :class:`Engine` defines the other defaults."""

    name = "subprocess"

    def __init__(self, directory: str, custom_resources: Mapping[str, float] | None = None) -> None:
        """Make an engine whose payloads wait in ``directory`` until their processes have read them."""
        self._directory = Path(directory)
        self._machine = resources.detect(custom_resources)
        self._host = socket.gethostname()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._running: dict[str, _Running] = {}
        self._events: EventSink = lambda _: None
        self._output = OutputReader()

    def connect(self, hub: Hub) -> None:
        """Do nothing: the processes are on this machine, and need no agent."""

    def start(self, events: EventSink, output: OutputSink) -> None:
        self._events, self._output.deliver = events, output

    def wire_address(self) -> str:
        return "ipc"

    def request(self, count: int, shape: SlotShape) -> SubprocessClaim:
        resources.check(self._machine, count, shape)
        claim = SubprocessClaim(f"subprocess-{next(self._numbers)}")
        slots = tuple(Slot(f"{claim.id}/{index}", self._host, "127.0.0.1") for index in range(count))
        with self._lock:
            self._held.update(slot.id for slot in slots)
        self._events(Granted(claim.id, slots))
        return claim

    def withdraw(self, claim: Claim) -> None:
        """Do nothing: requests never wait here."""

    def watch_capacity(self, shape: SlotShape, wanted: int = 0) -> None:
        self._events(Capacity(resources.slots_free(self._machine, shape, ())))

    def fork(self, slot: Slot, spec: ProcessSpec) -> None:
        with self._lock:
            if slot.id not in self._held:
                raise EngineError(f"Slot {slot.id} is not held, so nothing can be started on it.")
            if slot.id in self._running:
                raise EngineError(f"Slot {slot.id} has a process already.")
            running = _Running(spec, f"{os.getpid()}-{next(self._numbers)}")
            running.thread = threading.Thread(
                target=self._live, args=(slot, running), name=f"powertrain-{slot.id}", daemon=True
            )
            self._running[slot.id] = running
        running.thread.start()

    def attend(self, beside: Slot, spec: ProcessSpec) -> Slot | None:
        slot = Slot(f"attendants/{next(self._numbers)}", beside.host, beside.address)
        with self._lock:
            self._held.add(slot.id)
        self.fork(slot, spec)
        return slot

    def signal(self, slot: Slot, number: signals.Signals) -> None:
        running = self._running.get(slot.id)
        if running is not None:
            running.signal(number)

    def inspect(self, slot: Slot, stacks: bool = False) -> Inspection:
        running = self._running.get(slot.id)
        if running is None or not running.pid:
            return Inspection(0, "gone")
        return process.inspection(running.pid, running.spec.title, running.spec.stacks, stacks)

    def is_in_doubt(self, since: float) -> bool:
        return False

    def release(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            with self._lock:
                self._held.discard(slot.id)
            self.signal(slot, signals.SIGKILL)

    def close(self) -> None:
        with self._lock:
            self._held.clear()
            left = list(self._running.values())
        for running in left:
            running.signal(signals.SIGKILL)
        for running in left:
            running.thread.join(_KILL_TIMEOUT_S)
        self._events = lambda _: None
        self._output.close()

    def _start_process(self, slot: Slot, running: _Running) -> subprocess.Popen[bytes]:
        spec = running.spec
        payload = self._directory / f"payload-{running.mark}"
        payload.write_bytes(spec.payload)
        changed = {**os.environ, **spec.env, _MARK: running.mark}
        if spec.cwd:
            os.makedirs(spec.cwd, exist_ok=True)
        path = [os.path.abspath(entry) for entry in sys.path]
        code = (
            f"import sys; sys.path[:] = {path!r}; from powertrain_subprocess.rank import live; "
            f"live({spec.entry!r}, {str(payload)!r}, {os.getpid()})"
        )
        read, write = os.pipe()
        # A new process inherits the blocked signals of the thread that starts it.
        before = signals.pthread_sigmask(signals.SIG_BLOCK, _SHIELDED if spec.shielded else ())
        try:
            started = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=write,
                stderr=write,
                env={name: value for name, value in changed.items() if value is not None},
                cwd=spec.cwd or None,
                start_new_session=True,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            signals.pthread_sigmask(signals.SIG_SETMASK, before)
            os.close(write)
        self._output.add(slot, read, spec.log_path)
        return started

    def _live(self, slot: Slot, running: _Running) -> None:
        """Start a process, and report its end once none of its descendants is running."""
        try:
            started = self._start_process(slot, running)
        except OSError as error:
            ended = Exited(slot, 0, 1, error=f"its process could not be started: {error}")
        else:
            self._events(Started(slot, started.pid))
            running.on_start(started.pid)
            ended = Exited(slot, started.pid, started.wait())
            _end_marked(running.mark)
            self._output.drain(slot)
        with self._lock:
            self._running.pop(slot.id, None)
        self._events(ended)


def _end_marked(mark: str) -> None:
    """End all processes that have inherited the mark, and wait until they are gone."""
    while found := [one for one in psutil.process_iter() if _has_mark(one, mark)]:
        for one in found:
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, _KILL_TIMEOUT_S)


def _has_mark(one: psutil.Process, mark: str) -> bool:
    try:
        return one.status() != psutil.STATUS_ZOMBIE and one.environ().get(_MARK) == mark
    except (psutil.Error, OSError):
        return False
