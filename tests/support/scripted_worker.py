"""A worker that follows a script, for tests of the controller."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import msgspec

from powertrain.checkpoint import uploader
from powertrain.checkpoint.staging import Staging
from powertrain.engine.base import ProcessSpec, Slot
from powertrain.errors import CollectiveError
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import Dismissed, Drop, Execute, Preemption, Train, UploadShare
from powertrain.wire.from_worker import Arrived, Executed, Hello, Noticed, Outcome, Reached
from powertrain.wire.values import CheckpointPart, Point, ProcessStack
from powertrain.worker import failure
from powertrain.worker.checkpoints.newest_reports import NewestReports
from powertrain.worker.main import WorkerSpec
from powertrain.worker.progress import Boundaries, Gate, Progress, StopRun
from powertrain.worker.service.service import Service


class Ended(BaseException):
    """Raised to unwind the thread of an ended process. Not an ``Exception``: a script must not catch it."""

    def __init__(self, code: int, out_of_memory: bool = False) -> None:
        super().__init__(code)
        self.code, self.out_of_memory = code, out_of_memory


class ScriptedProcess:
    """A process simulated by a thread. ``die`` and ``kill`` end it; blocking calls detect that."""

    _pids = itertools.count(5_000_001)  # above the largest pid a system gives

    def __init__(self, slot: Slot, spec: ProcessSpec, output: Callable[[bytes], None]) -> None:
        self.slot, self.spec, self.pid = slot, spec, next(self._pids)
        self._output = output
        self._ending = threading.Event()
        self._end = Ended(0)
        self._lock = threading.Lock()
        self._when_ended: list[Callable[[], None]] = []
        #: Its state as seen from outside; a script may change it.
        self.state, self.debugged = "running", False
        self.stacks: tuple[ProcessStack, ...] = ()
        #: Becomes readable when the process exits, for code that waits on descriptors.
        self.ended_descriptor, self._ended_write = os.pipe()

    def write(self, text: str) -> None:
        """Write to standard output: the log and the engine's receiver."""
        self.check()
        data = text.encode()
        if self.spec.log_path:
            os.makedirs(os.path.dirname(self.spec.log_path), exist_ok=True)
            with open(self.spec.log_path, "ab") as log:
                log.write(data)
        self._output(data)

    def kill(self, code: int, out_of_memory: bool = False) -> None:
        """Kill the process from outside. Any thread; the first call counts."""
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
        """Call back when it is killed, immediately if it has been; for waits on neither event nor descriptor."""
        with self._lock:
            self._when_ended.append(callback)
            ended = self._ending.is_set()
        if ended:
            callback()

    def check(self) -> None:
        """Raise if the process has ended."""
        if self._ending.is_set():
            raise self._end

    def wait_for(self, event: threading.Event | None = None) -> None:
        """Wait for ``event``, or for the end of the process."""
        if event is None:
            self._ending.wait()
        while event is not None and not event.wait(0.002):
            self.check()
        self.check()

    def forget(self) -> None:
        """Release its resources. Its thread has ended, and a later ``kill`` has no effect."""
        with self._lock:
            self._ending.set()
            os.close(self.ended_descriptor)
            os.close(self._ended_write)


#: Created here, because msgspec inspects a class at its first decoding, and crashes if two threads do so at once.
_decode_worker_spec = msgspec.msgpack.Decoder(WorkerSpec).decode


class ScriptedWorker:
    """A training worker for scripts. It uses the real wire protocol."""

    def __init__(self, process: ScriptedProcess) -> None:
        self.process = process
        self.spec = _decode_worker_spec(process.spec.payload)
        place = self.place = self.spec.place
        self.rank, self.world_size, self.attempt = place.rank, place.world_size, place.attempt
        #: Path of the checkpoint to resume from; "" for none.
        self.checkpoint = place.start.checkpoint
        #: The newest row of this rank; the attempt continues after the restored one.
        self.row = place.first_row - 1
        self.gate, self.progress = Gate(), Progress()
        self._syncs = 0
        self._boundaries = Boundaries(self.gate, arrived=self._stands_at)
        self.service = Service(
            self.spec.connection,
            place.rank,
            place.attempt,
            self.gate,
            self.progress,
            watch=process.ended_descriptor,
        )
        process.when_ended(lambda: self.service.commands.put(Dismissed()))
        self._newest_reports = NewestReports(place.files.mark)
        self._staging = Staging(
            place.saving.staging, place.attempt, place.rank, limit=place.saving.staging_bytes
        )
        self._uploader = uploader.ShareUploader(
            lambda: pickle.loads(self.spec.storage), self.service.send_now, self.spec.sync_timeout
        )
        self.service.on_upload_order = self._handle_upload_order
        self.service.on_share_freed = lambda message: self._staging.free_share(message.row)

    # -- for scripts

    def report(
        self,
        metrics: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] | None = None,
        name: str = "",
        barrier: bool = False,
        solo: bool = False,
    ) -> None:
        """Report as ``powertrain.report`` does; ``files`` is the content of a checkpoint, ``name`` its
        ``checkpoint_dir_name``."""
        self.process.check()
        if solo:
            self.service.post(Point(row=0, at=time.time(), metrics=dict(metrics), solo=True))
            return
        self._boundaries.enter_report()
        self.row += 1
        part = None if files is None else self._stage(files, name)
        self.progress.report()
        point = Point(row=self.row, at=time.time(), metrics=dict(metrics), barrier=barrier, part=part)
        if part is not None:
            self._staging.seal(point)
        self._newest_reports.add(point)
        self.service.post(point)
        if barrier:
            self.service.wait_for_row(self.row)
        self.process.check()
        self._boundaries.leave_report()

    def should_checkpoint(self) -> bool:
        """Return as ``powertrain.should_checkpoint`` does."""
        told = self._boundaries.check_save()
        self.process.check()
        return told

    def preemption(self) -> Preemption | None:
        """Return as ``powertrain.get_preemption_info`` does."""
        known = self._boundaries.check_preemption()
        self.process.check()
        return known

    @property
    def resize_to(self) -> int:
        """Return the number of workers of the pending resize; 0 for none."""
        return self._boundaries.resize_to

    def notice(self, signal: str = "SIGTERM", times: int = 1) -> None:
        """Send a preemption notice for this rank's process."""
        self.service.send_now(Noticed(signal=signal, times=times))

    def meet(self, data: bytes = b"") -> bytes:
        """Wait for all ranks at the next collective; return the value of rank 0."""
        self._syncs += 1
        received = self.service.meet(Arrived(sync=self._syncs, kind="barrier", data=data))
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
        """Exit immediately with this code, negative for a signal, without a message."""
        self.process.kill(code, out_of_memory)
        self.process.check()
        raise AssertionError("a process that was ended goes no further")

    # -- life cycle

    def live(self, play: Callable[[ScriptedWorker], Any]) -> int:
        """Run the protocol from handshake to dismissal."""
        try:
            self.service.send_now(Hello(pid=self.process.pid, host=self.process.slot.host))
            code = 0
            while True:
                command = self._next_command()
                if isinstance(command, Execute):
                    self.service.post(_executed(command))
                elif isinstance(command, Train):
                    code = self._train(play)
                elif isinstance(command, Dismissed):
                    return code
        finally:
            self.service.close()
            self._uploader.close()
            self._newest_reports.close()

    def _handle_upload_order(self, order: UploadShare | Drop) -> None:
        if isinstance(order, UploadShare):
            self._uploader.upload(order)
        else:
            self._uploader.drop(order)

    def _next_command(self) -> FromController:
        command = self.service.commands.get()
        self.process.check()
        return command

    def _train(self, play: Callable[[ScriptedWorker], Any]) -> int:
        self.progress.startup.begin(self.service.send_now)
        try:
            return self._play(play)
        finally:
            self.progress.startup.over()

    def _play(self, play: Callable[[ScriptedWorker], Any]) -> int:
        try:
            value = play(self)
        except StopRun:
            self.service.post(Outcome(status="stopped"))
            return 0
        except SystemExit as error:
            self.service.post(Outcome(status="exited", error=failure.describe(error)))
            return error.code if isinstance(error.code, int) else 1
        except Exception as error:
            self.service.post(Outcome(status="raised", error=failure.describe(error)))
            return 1
        self.process.check()
        data = b"" if value is None or self.rank else cloudpickle.dumps(value)
        self.service.post(Outcome(status="returned", value=data))
        return 0

    def _stands_at(self, hold: int, boundary: int) -> None:
        self.service.send_now(Reached(hold=hold, boundary=boundary, row=self.row))

    def _stage(self, files: Mapping[str, bytes], name: str) -> CheckpointPart:
        directory = self._staging.new_directory()
        for file, content in files.items():
            Path(directory, file).write_bytes(content)
        return msgspec.structs.replace(self._staging.stage(self.row, directory), checkpoint=name)


def _executed(command: Execute) -> Executed:
    try:
        function, args, kwargs = pickle.loads(command.function)
        return Executed(call=command.call, value=cloudpickle.dumps(function(*args, **kwargs)))
    except Exception as error:
        return Executed(call=command.call, error=failure.describe(error))
