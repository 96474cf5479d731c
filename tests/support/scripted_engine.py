"""An engine without processes: a script determines grants, losses and drains, and functions act as workers.

Each fork is one thread that simulates a process. A training worker uses the real wire protocol: it decodes its spec,
makes the handshake with the controller, replies to calls, reports, crosses boundaries and sends its outcome, so a real
controller can be driven from its first request to its end in milliseconds::

    def play(worker):
        worker.report({"loss": 1.0})
        if worker.rank == 1 and worker.attempt == 0:
            worker.die(-signal.SIGSEGV)
        return "done"

    engine = ScriptedEngine(play)

By default every request is granted completely and immediately. ``on_request`` changes that: it is called with the
engine and the claim, and may ``grant`` in parts, ``say_waiting``, or hold the claim. ``tell_capacity`` sets the
available slots, before the run begins to watch or later; without it the capacity does not change.
"""

from __future__ import annotations

import itertools
import signal as _signal
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.support.scripted_worker import Ended, ScriptedProcess, ScriptedWorker

from powertrain.checkpoint import uploader
from powertrain.engine.base import (
    Capacity,
    Claim,
    ClaimRefused,
    Drain,
    EngineEvent,
    EventSink,
    Exited,
    Granted,
    Inspection,
    OutputSink,
    ProcessSpec,
    Slot,
    SlotLost,
    SlotShape,
    Started,
    Waiting,
)
from powertrain.errors import EngineError, ResourceError
from powertrain.wire.hub import Hub
from powertrain.worker.main import ENTRY

#: Timeout of ``close`` for a simulated process; exceeding it is an error of the script.
_PATIENCE = 10.0


@dataclass
class ScriptedClaim:
    """One request and its granted slots so far."""

    id: str
    count: int
    shape: SlotShape
    slots: list[Slot] = field(default_factory=list)
    #: True when the run no longer waits for the rest.
    withdrawn: bool = False


Play = Callable[[ScriptedWorker], Any]
Program = Callable[[ScriptedProcess], int]


def play_uploader(process: ScriptedProcess) -> int:
    """Run the real uploader in the thread of a simulated process."""
    spec = msgspec.msgpack.decode(process.spec.payload, type=uploader.UploaderSpec)
    uploader.Uploader(spec, watch=process.ended_descriptor).serve()
    process.check()
    return 0


def grant_all(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
    """Grant a request completely and immediately: the default."""
    engine.grant(claim, claim.count)


class ScriptedEngine:
    """Slots and processes that exist only in this process. See the module's docstring."""

    name = "scripted"
    rank_in_driver = None

    def __init__(
        self,
        play: Play = lambda worker: None,
        *,
        on_request: Callable[[ScriptedEngine, ScriptedClaim], None] = grant_all,
        most: int = 1000,
        hosts: Sequence[str] = ("scripted-host",),
        programs: Mapping[str, Program] | None = None,
        restarts: bool = True,
        replaces: bool = False,
        owns_processes: bool = True,
        shares_driver_process: bool = False,
        attends: bool = True,
    ) -> None:
        """Create an engine with ``most`` slots, on ``hosts`` in turn; ``programs`` simulates entries other than
        workers.

        Without ``attends`` the ranks upload their own checkpoints.
        """
        self.restarts, self.replaces, self._attends = restarts, replaces, attends
        self.owns_processes, self.shares_driver_process = owns_processes, shares_driver_process
        self.forks_driver = False
        self._play, self._on_request, self._most, self._hosts = play, on_request, most, tuple(hosts)
        self._programs = {uploader.ENTRY: play_uploader, **(programs or {})}
        self._numbers = itertools.count(1)
        self._events: EventSink = lambda _: None
        self._output: OutputSink = lambda _slot, _data: None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._processes: dict[str, ScriptedProcess] = {}
        self._held: dict[str, Slot] = {}
        self._lost: set[str] = set()
        self._closed = False
        self._capacity: int | None = None
        #: The shape whose capacity the run watches, None for none; and each number it would use.
        self.watched: SlotShape | None = None
        self.wanted: list[int] = []
        #: All claims, oldest first.
        self.claims: list[ScriptedClaim] = []
        #: All forked processes, oldest first.
        self.forked: list[ScriptedProcess] = []

    # -- the protocol

    def connect(self, hub: Hub) -> None:
        """Do nothing: the workers are functions."""

    def start(self, events: EventSink, output: OutputSink) -> None:
        self._events, self._output = events, output

    def wire_address(self) -> str:
        return "ipc"

    def request(self, count: int, shape: SlotShape) -> ScriptedClaim:
        if count > self._most:
            raise ResourceError(
                f"{count} slot(s) were asked for, but this script has {self._most}. Ask for fewer, or give "
                "ScriptedEngine(most=...)."
            )
        claim = ScriptedClaim(f"scripted-{next(self._numbers)}", count, shape)
        self.claims.append(claim)
        self._on_request(self, claim)
        return claim

    def withdraw(self, claim: Claim) -> None:
        with self._lock:
            for known in self.claims:
                known.withdrawn |= known.id == claim.id

    def watch_capacity(self, shape: SlotShape, wanted: int = 0) -> None:
        """Watch the capacity; reports the value of the script immediately, if any."""
        with self._lock:
            self.watched = shape
            self.wanted.append(wanted)
            if self._capacity is not None:
                self._tell(Capacity(self._capacity))

    def fork(self, slot: Slot, spec: ProcessSpec) -> None:
        with self._lock:
            if slot.id not in self._held:
                raise EngineError(f"Slot {slot.id} is not held, so nothing can be forked on it.")
            if slot.id in self._processes:
                raise EngineError(f"Slot {slot.id} has a process already.")
            process = ScriptedProcess(slot, spec, lambda data: self._output(slot, data))
            self._processes[slot.id] = process
            self.forked.append(process)
        threading.Thread(
            target=self._run, args=(process,), name=f"powertrain-scripted {spec.title}", daemon=True
        ).start()

    def attend(self, beside: Slot, spec: ProcessSpec) -> Slot | None:
        """Run the process on its own slot; an uploader is the real one."""
        if not self._attends:
            return None
        slot = Slot(f"attendants/{next(self._numbers)}", beside.host, beside.address)
        self._held[slot.id] = slot
        self.fork(slot, spec)
        return slot

    def signal(self, slot: Slot, number: _signal.Signals) -> None:
        """End a simulated process: it handles no signal."""
        process = self._processes.get(slot.id)
        if process is not None:
            process.kill(-number)

    def inspect(self, slot: Slot, stacks: bool = False) -> Inspection:
        process = self._processes.get(slot.id)
        if process is None:
            return Inspection(0, "gone")
        return Inspection(
            process.pid, process.state, process.stacks if stacks else (), debugged=process.debugged
        )

    def is_in_doubt(self, since: float) -> bool:
        return False

    def release(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self.signal(slot, _signal.SIGKILL)
            self._held.pop(slot.id, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._held.clear()
            processes = list(self._processes.values())
        for process in processes:
            process.kill(-_signal.SIGKILL)
        with self._changed:
            gone = self._changed.wait_for(lambda: not self._processes, timeout=_PATIENCE)
        assert gone, f"these played processes do not notice their end: {list(self._processes)}"

    # -- the script's side; any thread

    def grant(self, claim: ScriptedClaim, count: int) -> tuple[Slot, ...]:
        """Grant ``count`` more slots to a claim; none to a withdrawn one."""
        with self._lock:
            if claim.withdrawn:
                return ()
            slots = tuple(self._new_slot(claim) for _ in range(count))
            self._tell(Granted(claim.id, slots))
            return slots

    def say_waiting(self, claim: ScriptedClaim, reason: str) -> None:
        """Report the reason why a claim waits."""
        self._tell(Waiting(claim.id, len(claim.slots), reason))

    def refuse(self, claim: ScriptedClaim, reason: str) -> None:
        """Report that a claim will never be met."""
        self._tell(ClaimRefused(claim.id, reason))

    def lose(self, slot: Slot, reason: str = "the script took it away") -> None:
        """Withdraw a slot, and end its process without a message."""
        with self._changed:
            self._held.pop(slot.id, None)
            process = self._processes.get(slot.id)
            if process is not None:
                self._lost.add(slot.id)
                process.kill(-_signal.SIGKILL)
                self._changed.wait_for(lambda: slot.id not in self._processes, timeout=_PATIENCE)
        self._tell(SlotLost(slot, reason))

    def drain(self, slot: Slot, deadline: float, reason: str = "the script will take it away") -> None:
        """Announce the loss of a slot."""
        self._tell(Drain(slot, deadline, reason))

    def is_held(self, slot: Slot) -> bool:
        """Return True while the slot is granted and neither lost nor given back."""
        return slot.id in self._held

    def tell_capacity(self, count: int) -> None:
        """Set the available slots, including held ones; reported if the run watches, else stored."""
        with self._lock:
            changed, self._capacity = count != self._capacity, count
            if changed and self.watched is not None:
                self._tell(Capacity(count))

    def end(self, slot: Slot, code: int, out_of_memory: bool = False) -> None:
        """End a slot's process from outside."""
        process = self._processes.get(slot.id)
        if process is not None:
            process.kill(code, out_of_memory)

    # -- implementation

    def _new_slot(self, claim: ScriptedClaim) -> Slot:
        number = len(claim.slots)
        slot = Slot(f"{claim.id}/{number}", self._hosts[number % len(self._hosts)], "127.0.0.1")
        claim.slots.append(slot)
        self._held[slot.id] = slot
        return slot

    def _tell(self, event: EngineEvent) -> None:
        with self._lock:
            if not self._closed:
                self._events(event)

    def _run(self, process: ScriptedProcess) -> None:
        self._tell(Started(process.slot, process.pid))
        try:
            end = Ended(self._code_of(process))
        except Ended as ended:
            end = ended
        except Exception:
            self._output(process.slot, traceback.format_exc().encode())
            end = Ended(1)
        process.forget()
        with self._changed:
            del self._processes[process.slot.id]
            if process.slot.id not in self._lost:
                self._tell(Exited(process.slot, process.pid, end.code, end.out_of_memory))
            self._changed.notify_all()

    def _code_of(self, process: ScriptedProcess) -> int:
        if process.spec.entry == ENTRY:
            return ScriptedWorker(process).live(self._play)
        program = self._programs.get(process.spec.entry)
        if program is None:
            process.write(f"this script has no program for {process.spec.entry!r}\n")
            return 1
        return program(process)
