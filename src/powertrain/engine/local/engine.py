"""The local engine: slots of this machine, granted by the ledger that all runs of the user share."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from powertrain.engine import process, resources
from powertrain.engine.base import (
    Capacity,
    Claim,
    EventSink,
    Exited,
    Granted,
    Inspection,
    OutputSink,
    ProcessSpec,
    Remark,
    Slot,
    SlotLost,
    SlotShape,
    Started,
    Waiting,
)
from powertrain.engine.local import ledger, locks
from powertrain.engine.local.warm_server import CLOSE_TIMEOUT_S, warm_up
from powertrain.engine.output import OutputReader
from powertrain.errors import EngineError
from powertrain.storage.files.private_roots import runtime_root
from powertrain.trace.machine import processes
from powertrain.wire.hub import Hub

if TYPE_CHECKING:
    from powertrain.engine.local.warm_server import WarmServer


_numbers = itertools.count(1)

_ledger = ledger.Ledger(runtime_root)


def _forget_ledger_of_parent() -> None:
    """Forget the ledger in a forked child: its claims and its lock are the parent's."""
    global _ledger
    _ledger = ledger.Ledger(runtime_root)


os.register_at_fork(after_in_child=_forget_ledger_of_parent)

#: Seconds within which the server reports that a process has ended, even on a machine that hardly gets to run it.
_EXIT_REPORT_TIMEOUT_S = 15.0
#: The claim under which processes beside the slots are kept; it holds no resources.
_ATTENDANTS = "attendants"
_STATE_IS_LOST = (
    "The process that workers are forked from was killed, and with it the modules as the script had set and patched "
    "them. Workers that start from now on import modules anew from their files and see none of those changes. Pass "
    "settings in train_loop_config: those stay the same."
)


@dataclass(frozen=True)
class LocalClaim:
    id: str
    count: int
    shape: SlotShape


class LocalEngine:
    """Slots on this machine."""

    name = "local"
    restarts = True
    replaces = False
    owns_processes = True
    shares_driver_process = False
    forks_driver = True
    rank_in_driver = None

    def __init__(
        self,
        server: WarmServer | None = None,
        custom_resources: Mapping[str, float] | None = None,
        run: str = "",
    ) -> None:
        """Create an engine. ``run`` is its display name for processes that wait for its resources; by default the
        script's."""
        self._server = server or warm_up()
        self._owner = f"engine-{next(_numbers)}"
        self._run = f"run {run}" if run else os.path.basename(sys.argv[0]) or "python"
        self._machine = resources.detect(custom_resources)
        self._host = socket.gethostname()
        #: Claims not granted yet, slots held by each claim, and those to give back once their process is gone.
        self._waiting: set[str] = set()
        self._slots: dict[str, dict[str, Slot]] = {}
        self._leaving: set[str] = set()
        self._processes: dict[str, str] = {}
        self._pids: dict[str, int] = {}
        #: Each slot's process title, and the file for its stacks.
        self._dumps: dict[str, tuple[str, str]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._events: EventSink = lambda _: None
        self._output = OutputReader()

    def connect(self, hub: Hub) -> None:
        """Do nothing: the server is a child of this process, and needs no wire."""

    def start(self, events: EventSink, output: OutputSink) -> None:
        self._events = events
        self._output.deliver = output

    def wire_address(self) -> str:
        return "ipc"

    def request(self, count: int, shape: SlotShape) -> LocalClaim:
        resources.check(self._machine, count, shape)
        self._replace_killed_server()
        claim = LocalClaim(f"local-{next(_numbers)}", count, shape)
        request = ledger.SlotRequest(
            id=claim.id,
            owner=self._owner,
            run=self._run,
            host=self._host,
            machine=self._machine,
            count=count,
            shape=shape,
        )
        self._waiting.add(claim.id)
        try:
            _ledger.claim(
                request,
                granted=lambda gpus: self._grant(claim, gpus),
                waits=lambda reason: self._events(Waiting(claim.id, 0, reason)),
            )
        except EngineError:
            self._waiting.discard(claim.id)
            raise
        return claim

    def withdraw(self, claim: Claim) -> None:
        self._waiting.discard(claim.id)
        _ledger.withdraw(claim.id)

    def watch_capacity(self, shape: SlotShape, wanted: int = 0) -> None:
        """Report the capacity once where the shape holds nothing countable: it does not depend on other runs then."""
        if resources.counted(shape, 1):
            _ledger.watch(self._owner, self._machine, shape, lambda count: self._events(Capacity(count)))
        else:
            _ledger.unwatch(self._owner)
            self._events(Capacity(resources.slots_free(self._machine, shape, ())))

    def fork(self, slot: Slot, spec: ProcessSpec) -> None:
        if slot.id in self._processes:
            raise EngineError(f"slot {slot.id} has a process already")
        read, write = os.pipe()
        self._output.add(slot, read, spec.log_path)
        self._dumps[slot.id] = (spec.title, spec.stacks)
        id = self._processes[slot.id] = f"p{next(_numbers)}"
        requested_at = time.monotonic()
        # Keeps the process's resources claimed until it is gone, even if this process is killed before it.
        claim = _ledger.lend(slot.id.rsplit("/", 1)[0])
        try:
            self._server.fork(
                id,
                spec,
                write,
                started=lambda pid: self._started(slot, pid, requested_at),
                ended=lambda pid, code, oom: self._ended(slot, pid, code, oom),
                claim=claim,
            )
        except EngineError:  # the server is gone: so is the slot
            self._ended(slot, 0, -signal.SIGKILL, False)
        finally:
            if claim is not None:
                locks.close(claim)

    def attend(self, beside: Slot, spec: ProcessSpec) -> Slot:
        self._replace_killed_server()
        slot = Slot(id=f"{_ATTENDANTS}/{next(_numbers)}", host=self._host, address="127.0.0.1")
        with self._changed:
            self._slots.setdefault(_ATTENDANTS, {})[slot.id] = slot
        self.fork(slot, spec)
        return slot

    def signal(self, slot: Slot, number: signal.Signals) -> None:
        id = self._processes.get(slot.id)
        if id is not None:
            self._server.kill(id, number)

    def inspect(self, slot: Slot, stacks: bool = False) -> Inspection:
        title, dump = self._dumps.get(slot.id, ("", ""))
        return process.inspection(self._pids.get(slot.id, 0), title, dump, stacks)

    def is_in_doubt(self, since: float) -> bool:
        if time.monotonic() - since > _EXIT_REPORT_TIMEOUT_S:
            return False
        return any(processes.state(pid) in ("zombie", "gone") for pid in list(self._pids.values()))

    def release(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            with self._changed:
                self._leaving.add(slot.id)
                busy = slot.id in self._processes
            if busy:
                self.signal(slot, signal.SIGKILL)
            else:
                self._give_back(slot.id)

    def close(self) -> None:
        self._events = lambda _: None
        with self._changed:
            self._closed = True
        _ledger.unwatch(self._owner)
        for claim in list(self._waiting):
            _ledger.withdraw(claim)
        self.release([slot for slots in list(self._slots.values()) for slot in list(slots.values())])
        for _ in range(2):  # killed for the second time they go without the server, should it hang
            with self._changed:
                if self._changed.wait_for(lambda: not self._processes, timeout=CLOSE_TIMEOUT_S):
                    break
                left = list(self._processes.values())
            for id in left:
                self._server.kill(id, signal.SIGKILL)
        self._output.close()

    def _replace_killed_server(self) -> None:
        """Continue with the clean server where the forking server was killed, and warn about the difference.

        It is not forked from this process again: the script's settings may have changed since.
        """
        if self._server.alive:
            return
        was_forked = self._server.is_forked
        self._server = warm_up(clean=True, preload=self._server.preload)
        self._server.take_over_sweeps()
        if was_forked:
            self._events(Remark(_STATE_IS_LOST))

    def _give_back(self, slot_id: str) -> None:
        """Free a slot for others, with the GPUs that no other slot of its claim uses. Nothing runs on it."""
        claim = slot_id.rsplit("/", 1)[0]
        with self._changed:
            self._leaving.discard(slot_id)
            slot = self._slots.get(claim, {}).pop(slot_id, None)
            if claim == _ATTENDANTS:
                return
            shared = {gpu for other in self._slots.get(claim, {}).values() for gpu in other.gpus}
        if slot is not None:
            _ledger.give_back_slot(claim, [gpu for gpu in slot.gpus if gpu not in shared])

    def _grant(self, claim: LocalClaim, gpus: tuple[str, ...]) -> None:
        shares = resources.share_gpus(gpus, claim.count, claim.shape.gpus)
        slots = tuple(
            Slot(id=f"{claim.id}/{i}", host=self._host, address="127.0.0.1", gpus=shares[i])
            for i in range(claim.count)
        )
        with self._changed:
            self._waiting.discard(claim.id)
            self._slots[claim.id] = {slot.id: slot for slot in slots}
            too_late = self._closed
        if too_late:
            self.release(slots)
        self._events(Granted(claim.id, slots))

    def _started(self, slot: Slot, pid: int, requested_at: float) -> None:
        self._pids[slot.id] = pid
        self._events(Started(slot, pid, *self._server.kept_waiting(requested_at)))

    def _ended(self, slot: Slot, pid: int, code: int, oom: bool) -> None:
        self._output.drain(slot)
        with self._changed:
            self._processes.pop(slot.id, None)
            self._dumps.pop(slot.id, None)
            leaving = slot.id in self._leaving
            self._changed.notify_all()
        lost = not self._server.alive
        if leaving or lost:
            self._give_back(slot.id)
        if not lost:
            self._events(Exited(slot, pid, code, oom))
        else:
            self._events(SlotLost(slot, "the process that workers are forked from was killed"))
        self._pids.pop(slot.id, None)  # last: until the event is out, the process counts as in doubt
