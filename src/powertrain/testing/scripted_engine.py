"""An engine without processes: a script says what is granted, lost and drained, and small functions play the workers.

Each fork is one thread that plays a process. A process whose entry is a training worker's speaks the real wire:
it decodes its spec, greets the controller, answers calls, reports, crosses boundaries and sends its outcome, so a real
controller can be driven from its first request to its end in milliseconds::

    def play(worker):
        worker.report({"loss": 1.0})
        if worker.rank == 1 and worker.attempt == 0:
            worker.die(-signal.SIGSEGV)
        return "done"

    engine = ScriptedEngine(play)

By default every request is granted whole and at once. ``on_request`` changes that: it is called with the engine
and the claim, and may ``grant`` in parts, ``say_waiting``, or keep the claim for later. How many slots could be had is
said by ``tell_capacity``, before the run begins to watch or later; a script that never calls it has an engine whose
capacity does not change.
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal as _signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import msgspec

from powertrain import wire
from powertrain.checkpoint import uploader
from powertrain.checkpoint.saver import Staging
from powertrain.engine.base import (
    Capacity,
    Claim,
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
from powertrain.errors import CollectiveError, EngineError, ResourceError
from powertrain.worker import failure
from powertrain.worker.main import ENTRY, WorkerSpec
from powertrain.worker.checkpoints.row_mark import RowMark
from powertrain.worker.progress import Boundaries, Gate, Progress, StopRun
from powertrain.worker.service.service import Service

#: Seconds that ``close`` waits for a played process; one that plays on longer is a fault of its script.
_PATIENCE = 10.0


class Ended(BaseException):
    """Unwinds the thread of a played process that has ended. Not an ``Exception``: a play must not catch it."""

    def __init__(self, code: int, out_of_memory: bool = False) -> None:
        super().__init__(code)
        self.code, self.out_of_memory = code, out_of_memory


@dataclass
class ScriptedClaim:
    """One request and what it has been given so far."""

    id: str
    count: int
    shape: SlotShape
    slots: list[Slot] = field(default_factory=list)
    #: True when the run no longer waits for the rest.
    withdrawn: bool = False


class ScriptedProcess:
    """A process that is played by a thread. ``die`` and ``kill`` end it; blocking calls notice that."""

    _pids = itertools.count(5_000_001)  # above the largest pid a system gives

    def __init__(self, slot: Slot, spec: ProcessSpec, output: Callable[[bytes], None]) -> None:
        self.slot, self.spec, self.pid = slot, spec, next(self._pids)
        self._output = output
        self._ending = threading.Event()
        self._end = Ended(0)
        self._lock = threading.Lock()
        self._when_ended: list[Callable[[], None]] = []
        #: What is seen of it from outside while it lives; a script may change these.
        self.state, self.debugged = "running", False
        self.stacks: tuple[wire.ProcessStack, ...] = ()
        #: Becomes readable when the process ends, for code that waits on descriptors.
        self.ended_descriptor, self._ended_write = os.pipe()

    def write(self, text: str) -> None:
        """Standard output: to the log and to whoever the engine delivers to."""
        self.check()
        data = text.encode()
        if self.spec.log_path:
            os.makedirs(os.path.dirname(self.spec.log_path), exist_ok=True)
            with open(self.spec.log_path, "ab") as log:
                log.write(data)
        self._output(data)

    def kill(self, code: int, out_of_memory: bool = False) -> None:
        """End it from outside. Any thread; the first call counts."""
        with self._lock:
            if self._ending.is_set():
                return
            self._end = Ended(code, out_of_memory)
            self._ending.set()
            os.write(self._ended_write, b"x")
            callbacks = list(self._when_ended)
        for callback in callbacks:
            callback()

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call back when it is killed, at once if it has been: for what waits on neither event nor descriptor."""
        with self._lock:
            self._when_ended.append(callback)
            ended = self._ending.is_set()
        if ended:
            callback()

    def check(self) -> None:
        """Go no further if the process has ended."""
        if self._ending.is_set():
            raise self._end

    def wait_for(self, event: threading.Event | None = None) -> None:
        """Wait for ``event``, or for nothing but the end; never longer than the process lives."""
        if event is None:
            self._ending.wait()
        while event is not None and not event.wait(0.002):
            self.check()
        self.check()

    def forget(self) -> None:
        """Give back what it holds. Its thread has ended, and a later ``kill`` has no effect."""
        with self._lock:
            self._ending.set()
            os.close(self.ended_descriptor)
            os.close(self._ended_write)


#: Made here, because msgspec looks at a class when it is decoded first, and crashes where two threads do that at once.
_decode_worker_spec = msgspec.msgpack.Decoder(WorkerSpec).decode


class ScriptedWorker:
    """A training worker as a play sees it. It speaks the wire as a real one does."""

    def __init__(self, process: ScriptedProcess) -> None:
        self.process = process
        self.spec = _decode_worker_spec(process.spec.payload)
        place = self.place = self.spec.place
        self.rank, self.world_size, self.attempt = place.rank, place.world_size, place.attempt
        #: Path of the checkpoint to go on from; "" for none.
        self.checkpoint = place.checkpoint
        #: The newest row this rank has reported; the attempt goes on after the restored one.
        self.row = place.first_row - 1
        self.gate, self.progress = Gate(), Progress()
        self._syncs = 0
        self._boundaries = Boundaries(self.gate, arrived=self._stands_at)
        self.service = Service(
            self.spec.door,
            place.rank,
            place.attempt,
            self.gate,
            self.progress,
            watch=process.ended_descriptor,
        )
        process.when_ended(lambda: self.service.commands.put(wire.Dismissed()))
        self._mark = RowMark(place.mark)
        self._staging = Staging(place.staging, place.attempt, place.rank, limit=place.staging_bytes)
        self._carrier = uploader.Carrier(
            lambda: pickle.loads(self.spec.storage), self.service.say, self.spec.sync_timeout
        )
        self.service.on_carry = self._carry
        self.service.on_settled = lambda settled: self._staging.settled(settled.row)

    # -- what a play calls

    def report(
        self,
        metrics: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] | None = None,
        name: str = "",
        barrier: bool = False,
        solo: bool = False,
    ) -> None:
        """As ``powertrain.report``; ``files`` is the content of a checkpoint, ``name`` its ``checkpoint_dir_name``."""
        self.process.check()
        if solo:
            self.service.post(wire.Point(row=0, at=time.time(), metrics=dict(metrics), solo=True))
            return
        self._boundaries.enter_report()
        self.row += 1
        part = None if files is None else self._stage(files, name)
        self.progress.report()
        point = wire.Point(row=self.row, at=time.time(), metrics=dict(metrics), barrier=barrier, part=part)
        if part is not None:
            self._staging.seal(point)
        self._mark.set(self.row)
        self.service.post(point)
        if barrier:
            self.service.wait_for_row(self.row)
        self.process.check()
        self._boundaries.leave_report()

    def should_checkpoint(self) -> bool:
        """As ``powertrain.should_checkpoint``."""
        told = self._boundaries.ask()
        self.process.check()
        return told

    def preemption(self) -> wire.Preemption | None:
        """As ``powertrain.get_preemption_info``."""
        known = self._boundaries.look()
        self.process.check()
        return known

    @property
    def resize_to(self) -> int:
        """The number of workers that the run is about to go on with; 0 for no change."""
        return self._boundaries.resize_to

    def notice(self, signal: str = "SIGTERM", times: int = 1) -> None:
        """Say that this rank's process was asked to end."""
        self.service.say(wire.Noticed(signal=signal, times=times))

    def meet(self, data: bytes = b"") -> bytes:
        """Wait for all ranks at the next collective; returns what rank 0 brought."""
        self._syncs += 1
        received = self.service.meet(wire.Arrived(sync=self._syncs, kind="barrier", data=data))
        self.process.check()
        if received.error:
            raise CollectiveError(received.error)
        return received.data

    def wait_for(self, event: threading.Event) -> None:
        """Wait for the test."""
        self.process.wait_for(event)

    def hang(self) -> NoReturn:
        """Do nothing until killed."""
        self.process.wait_for()
        raise AssertionError("a hang ends only with the process")

    def die(self, code: int, out_of_memory: bool = False) -> NoReturn:
        """End at once with this exit code, negative for a signal, and say nothing more."""
        self.process.kill(code, out_of_memory)
        self.process.check()
        raise AssertionError("a process that was ended goes no further")

    # -- how it lives

    def live(self, play: Callable[[ScriptedWorker], Any]) -> int:
        """From hello to dismissal."""
        try:
            self.service.say(wire.Hello(pid=self.process.pid, host=self.process.slot.host))
            code = 0
            while True:
                command = self._next_command()
                if isinstance(command, wire.Execute):
                    self.service.post(_executed(command))
                elif isinstance(command, wire.Train):
                    code = self._train(play)
                elif isinstance(command, wire.Dismissed):
                    return code
        finally:
            self.service.close()
            self._carrier.close()
            self._mark.close()

    def _carry(self, order: wire.Carry | wire.Drop) -> None:
        if isinstance(order, wire.Carry):
            self._carrier.carry(order)
        else:
            self._carrier.drop(order)

    def _next_command(self) -> wire.FromController:
        command = self.service.commands.get()
        self.process.check()
        return command

    def _train(self, play: Callable[[ScriptedWorker], Any]) -> int:
        self.progress.startup.begin(self.service.say)
        try:
            return self._play(play)
        finally:
            self.progress.startup.over()

    def _play(self, play: Callable[[ScriptedWorker], Any]) -> int:
        try:
            value = play(self)
        except StopRun:
            self.service.post(wire.Outcome(status="stopped"))
            return 0
        except SystemExit as error:
            self.service.post(wire.Outcome(status="exited", error=failure.describe(error)))
            return error.code if isinstance(error.code, int) else 1
        except Exception as error:
            self.service.post(wire.Outcome(status="raised", error=failure.describe(error)))
            return 1
        self.process.check()
        data = b"" if value is None or self.rank else cloudpickle.dumps(value)
        self.service.post(wire.Outcome(status="returned", value=data))
        return 0

    def _stands_at(self, hold: int, boundary: int) -> None:
        self.service.say(wire.Reached(hold=hold, boundary=boundary, row=self.row))

    def _stage(self, files: Mapping[str, bytes], name: str) -> wire.Part:
        directory = self._staging.new_directory()
        for file, content in files.items():
            Path(directory, file).write_bytes(content)
        return msgspec.structs.replace(self._staging.stage(self.row, directory), checkpoint=name)


def _executed(command: wire.Execute) -> wire.Executed:
    try:
        function, args, kwargs = pickle.loads(command.function)
        return wire.Executed(call=command.call, value=cloudpickle.dumps(function(*args, **kwargs)))
    except Exception as error:
        return wire.Executed(call=command.call, error=failure.describe(error))


Play = Callable[[ScriptedWorker], Any]
Program = Callable[[ScriptedProcess], int]


def play_uploader(process: ScriptedProcess) -> int:
    """The real uploader in the thread of a played process."""
    spec = msgspec.msgpack.decode(process.spec.payload, type=uploader.UploaderSpec)
    uploader.Uploader(spec, watch=process.ended_descriptor).serve()
    process.check()
    return 0


def grant_all(engine: ScriptedEngine, claim: ScriptedClaim) -> None:
    """The usual answer to a request: all of it, at once."""
    engine.grant(claim, claim.count)


class ScriptedEngine:
    """Slots and processes that exist only in this process. See the module's docstring."""

    name = "scripted"

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
        attends: bool = True,
    ) -> None:
        """``most`` slots exist, on ``hosts`` in turn; ``programs`` plays entries other than a training worker's.
        Without ``attends`` the ranks carry their own checkpoints."""
        self.restarts, self.replaces, self._attends = restarts, replaces, attends
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
        #: The shape whose capacity the run watches, None while it watches none; and each number it would use of it.
        self.watched: SlotShape | None = None
        self.wanted: list[int] = []
        #: Every claim that was requested, oldest first.
        self.claims: list[ScriptedClaim] = []
        #: Every process that was forked, oldest first.
        self.forked: list[ScriptedProcess] = []

    # -- the protocol

    def connect(self, hub: wire.Hub) -> None:
        """Its workers are functions."""

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
        """Tells at once what the script has said, if anything."""
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
        """Play the process on a slot of its own; an uploader is played by the real one."""
        if not self._attends:
            return None
        slot = Slot(f"attendants/{next(self._numbers)}", beside.host, beside.address)
        self._held[slot.id] = slot
        self.fork(slot, spec)
        return slot

    def signal(self, slot: Slot, number: _signal.Signals) -> None:
        """Any signal ends a played process: none of them handles one."""
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
        """Give ``count`` more slots to a claim; none to one that was withdrawn."""
        with self._lock:
            if claim.withdrawn:
                return ()
            slots = tuple(self._new_slot(claim) for _ in range(count))
            self._tell(Granted(claim.id, slots))
            return slots

    def say_waiting(self, claim: ScriptedClaim, reason: str) -> None:
        """Say what a claim still waits for."""
        self._tell(Waiting(claim.id, len(claim.slots), reason))

    def lose(self, slot: Slot, reason: str = "the script took it away") -> None:
        """Withdraw a slot, and end its process without another word."""
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

    def tell_capacity(self, count: int) -> None:
        """From now on so many slots could be had, those that are held included: told if the run watches, else kept."""
        with self._lock:
            changed, self._capacity = count != self._capacity, count
            if changed and self.watched is not None:
                self._tell(Capacity(count))

    def end(self, slot: Slot, code: int, out_of_memory: bool = False) -> None:
        """End a slot's process from outside."""
        process = self._processes.get(slot.id)
        if process is not None:
            process.kill(code, out_of_memory)

    # -- how it works

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
