"""The one side thread of a worker: wire, beats, commands.

The training thread only appends to a queue. This thread sends what is there at once, then lets more gather for a
few milliseconds before it sends again, so that ten thousand reports a second cost a few hundred messages. When the
controller does not keep up, reports go to a file until it does: none is dropped, and memory stays bounded.
"""

from __future__ import annotations

import contextlib
import os
import queue
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Union

import msgspec

from powertrain import wire
from powertrain.worker import values
from powertrain.worker.progress import Gate, Progress

#: Seconds within which messages are gathered into one batch, once one has just been sent.
_GATHER = 0.003
#: Messages in one batch; bounds how long the interpreter is held while encoding.
_BATCH = 256
#: Reports kept in memory; more go to the spill file.
_MEMORY_LIMIT = 20_000
_BEAT_EVERY = 1.0
_NOTHING = wire.Opened(sync=0)
#: What the training thread can wait for.
Answer = Union[wire.Opened, wire.Settled, wire.Reported]


class Service:
    """Owns the link. Everything public here may be called from the training thread."""

    def __init__(
        self,
        door: wire.Door,
        rank: int,
        attempt: int,
        gate: Gate,
        progress: Progress,
        *,
        spill_directory: str | None = None,
        failed: Callable[[], None] = lambda: None,
        watch: int = -1,
        orphaned: Callable[[], None] = lambda: None,
    ) -> None:
        """``failed`` is called, on this thread, should it break: the rank is deaf and dumb then, and must end.
        ``watch`` is a descriptor whose readiness means the run is gone; then ``orphaned`` is called."""
        self._gate, self._progress = gate, progress
        self._watch, self._orphaned, self._broken = watch, orphaned, failed
        #: Commands for the main thread, in order: Execute, Train, Dismissed.
        self.commands: queue.SimpleQueue[wire.FromController] = queue.SimpleQueue()
        #: Called on this thread: with what is to be carried by this rank itself, and with each settled checkpoint.
        self.on_carry: Callable[[wire.Carry | wire.Drop], None] = lambda _: None
        self.on_settled: Callable[[wire.Settled | wire.Unstaged], None] = lambda _: None
        self._ordered: deque[wire.FromWorker] = deque()
        self._urgent: deque[wire.FromWorker] = deque()
        self._spill = _Spill(spill_directory)
        self._waiters: dict[tuple[str, int], _Waiter] = {}
        self._waiters_lock = threading.Lock()
        self._closed_rows = 0
        self._asks = 0
        self._when_over: list[Callable[[], None]] = []
        #: The rank's newest row, for the envelope.
        self.row = 0
        self._last_counts, self._moved = (0, 0, 0), time.monotonic()
        self._awake = False
        self._closing = False
        self._deadline = 0.0
        self._told_full, self._spill_again_at = False, 0.0
        self._link = wire.Link(door, rank, attempt)  # handed to the thread, which alone uses it from then on
        self._thread = threading.Thread(target=self._run, name="powertrain-service", daemon=True)
        self._thread.start()

    # -- the training thread's side

    def post(self, message: wire.FromWorker) -> None:
        """Send in order after everything posted before. Returns at once."""
        self._ordered.append(message)
        if not self._awake:
            self._awake = True
            self._link.wake()

    def say(self, message: wire.FromWorker) -> None:
        """Send ahead of what waits in the queue. Returns at once."""
        self._urgent.append(message)
        self._awake = True
        self._link.wake()

    def meet(self, message: wire.Arrived) -> wire.Opened:
        """Send, and wait until every rank has arrived or one never will."""
        waiter = self._waiter("sync", message.sync)
        self.say(message)
        answer = waiter.wait()
        return answer if isinstance(answer, wire.Opened) else _NOTHING

    def wait_for_row(self, row: int) -> None:
        """Wait until row ``row`` is complete on every rank."""
        waiter = self._waiter("row", row)
        if self._closed_rows >= row:
            waiter.set(_NOTHING)
        waiter.wait()

    def wait_settled(self, row: int) -> wire.Settled | None:
        """Wait until the checkpoint of ``row`` is committed or has failed; None when the run ends before that.

        Before the report of ``row`` is posted, call :meth:`expect_settled`.
        """
        answer = self._waiter("settled", row).wait()
        return answer if isinstance(answer, wire.Settled) else None

    def expect_settled(self, row: int) -> None:
        """Keep the answer for :meth:`wait_settled`, however early it comes."""
        self._waiter("settled", row)

    def ask_checkpoints(self, row: int, validated: bool, timeout: float) -> list[wire.ReportedCheckpoint]:
        """Wait for the controller's list of checkpoints; see ``wire.AskCheckpoints``."""
        self._asks += 1
        waiter = self._waiter("ask", self._asks)
        self.post(wire.AskCheckpoints(ask=self._asks, row=row, validated=validated, timeout=timeout))
        answer = waiter.wait()
        return list(answer.checkpoints) if isinstance(answer, wire.Reported) else []

    def close(self, timeout: float = 10.0) -> None:
        """Send what is queued, wait for its acknowledgement, end the thread."""
        self._closing = True
        self._deadline = time.monotonic() + timeout
        self._link.wake()
        self._thread.join(timeout + 1.0)

    # -- the thread

    def _run(self) -> None:
        if self._watch >= 0:
            self._link.watch(self._watch)
        last_send = last_beat = 0.0
        try:
            while True:
                commands, watched = self._link.poll(self._pause(last_send, last_beat))
                if watched:
                    self._orphaned()
                    return
                for command in commands:
                    self._handle(command)
                now = time.monotonic()
                if now - last_beat >= _BEAT_EVERY:
                    last_beat = now
                    self._urgent.append(self._beat(now))
                self._keep_memory_bounded()
                due = self._urgent or now - last_send >= _GATHER or self._closing
                if due and self._send_batch():
                    last_send = now
                if self._closing and (self._all_out() or now > self._deadline):
                    return
        except BaseException as error:
            self._failed(error)
        finally:
            self._release_waiters()
            self._link.close()
            self._spill.close()

    def _failed(self, error: BaseException) -> None:
        """A fault of ours; without this thread nobody would ever learn of it."""
        traceback.print_exception(type(error), error, error.__traceback__)
        self._broken()

    def _pause(self, last_send: float, last_beat: float) -> float:
        """Seconds to wait for a command. Leaves ``_awake`` set where the queue will be looked at anyway."""
        now = time.monotonic()
        if self._closing:
            return 0.05
        self._awake = False
        if self._ordered or self._urgent or self._spill:
            self._awake = True
            if self._link.room <= 0:
                return 0.05  # an acknowledgement ends the wait
            return max(0.0, last_send + _GATHER - now)
        if now - last_send < _GATHER:
            self._awake = True
            return _GATHER
        return max(0.0, last_beat + _BEAT_EVERY - now)

    def _send_batch(self) -> bool:
        if self._link.room <= 0:
            return False
        batch: list[wire.FromWorker] = []
        while self._urgent:
            batch.append(self._urgent.popleft())
        batch += self._spill.take() if self._spill else []
        while not self._spill and self._ordered and len(batch) < _BATCH:
            batch.append(_finished(self._ordered.popleft()))
        if batch:
            self._link.send(batch, self._gate.passed, self.row)
        return bool(batch)

    def _keep_memory_bounded(self) -> None:
        """Move what exceeds the limit to the file; while the file has content, all new messages follow into it."""
        full = len(self._ordered) > _MEMORY_LIMIT or (self._spill and self._ordered)
        if not full or time.monotonic() < self._spill_again_at:
            return
        messages = [_finished(self._ordered.popleft()) for _ in range(len(self._ordered))]
        try:
            self._spill.put(messages)
        except OSError as error:
            self._ordered.extendleft(reversed(messages))
            self._spill_again_at = time.monotonic() + 1.0
            if not self._told_full:
                self._told_full = True
                self._urgent.append(
                    wire.Noted(message=f"Reports pile up in memory: they cannot be put on disk ({error}).")
                )

    def _all_out(self) -> bool:
        return not (self._ordered or self._urgent or self._spill) and self._link.settled

    def _beat(self, now: float) -> wire.Beat:
        reports, steps, batches = counts = self._progress.snapshot()
        if counts != self._last_counts:
            self._last_counts, self._moved = counts, now
        return wire.Beat(
            reports=reports,
            steps=steps,
            batches=batches,
            idle=now - self._moved,
            phase=self._progress.phase,
        )

    def _handle(self, command: wire.FromController) -> None:
        if isinstance(command, wire.Hold):
            self._urgent.append(wire.Held(hold=command.hold, boundary=self._gate.arm(command.hold)))
        elif isinstance(command, wire.Goto):
            self._gate.go_to(command.hold, command.boundary, command.action, command.reason)
        elif isinstance(command, wire.Opened):
            self._waiter("sync", command.sync).set(command)
        elif isinstance(command, wire.RowClosed):
            self._close_row(command.row)
        elif isinstance(command, (wire.Carry, wire.Drop)):
            self.on_carry(command)
        elif isinstance(command, wire.Unstaged):
            self.on_settled(command)
        elif isinstance(command, wire.Settled):
            self.on_settled(command)
            self._answer(("settled", command.row), command)
        elif isinstance(command, wire.Reported):
            self._answer(("ask", command.ask), command)
        else:
            self.commands.put(command)

    def _close_row(self, row: int) -> None:
        self._closed_rows = row
        with self._waiters_lock:
            ready = [w for (kind, number), w in self._waiters.items() if kind == "row" and number <= row]
        for waiter in ready:
            waiter.set(_NOTHING)

    def _answer(self, key: tuple[str, int], answer: Answer) -> None:
        """Tell who waits, if anybody does."""
        with self._waiters_lock:
            waiter = self._waiters.get(key)
        if waiter is not None:
            waiter.set(answer)

    def _waiter(self, kind: str, number: int) -> _Waiter:
        with self._waiters_lock:
            return self._waiters.setdefault((kind, number), _Waiter(self, (kind, number)))

    def forget(self, key: tuple[str, int]) -> None:
        with self._waiters_lock:
            self._waiters.pop(key, None)

    def when_over(self, callback: Callable[[], None]) -> None:
        """Call back, on this thread, when nothing will be answered any more."""
        self._when_over.append(callback)

    def _release_waiters(self) -> None:
        self._gate.open()
        for callback in self._when_over:
            callback()
        with self._waiters_lock:
            waiters = list(self._waiters.values())
        for waiter in waiters:
            waiter.set(_NOTHING)


def _finished(message: wire.FromWorker) -> wire.FromWorker:
    """The message with all values at hand: those still on their way from a GPU are waited for, on this thread."""
    if isinstance(message, wire.Point) and values.is_pending(message.metrics):
        return msgspec.structs.replace(message, metrics=values.resolve(message.metrics))
    return message


class _Waiter:
    """One answer, waited for once."""

    def __init__(self, service: Service, key: tuple[str, int]) -> None:
        self._service, self._key = service, key
        self._event = threading.Event()
        self._answer: Answer = _NOTHING

    def set(self, answer: Answer) -> None:
        self._answer = answer
        self._event.set()

    def wait(self) -> Answer:
        self._event.wait()
        self._service.forget(self._key)
        return self._answer


class _Spill:
    """Messages on disk, first in first out. True while it holds any."""

    _decode = msgspec.msgpack.Decoder(list[wire.FromWorker]).decode

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._file: Any = None
        self._read_at = 0

    def __bool__(self) -> bool:
        return self._file is not None

    def put(self, messages: list[wire.FromWorker]) -> None:
        """Append all of them, or none and raise ``OSError``."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 (closed by close)
            self._read_at = 0
        end = self._file.seek(0, os.SEEK_END)
        chunks = (
            wire.encode_messages(messages[start : start + _BATCH])
            for start in range(0, len(messages), _BATCH)
        )
        try:
            for chunk in chunks:
                self._write(len(chunk).to_bytes(4, "little") + chunk)
        except OSError:
            self._file.truncate(end)
            if end == self._read_at:
                self.close()
            raise

    def _write(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]

    def take(self) -> list[wire.FromWorker]:
        """The oldest messages: one chunk as it was put."""
        self._file.seek(self._read_at)
        size = int.from_bytes(self._file.read(4), "little")
        messages: list[wire.FromWorker] = self._decode(self._file.read(size)) if size else []
        self._read_at += 4 + size if size else 0
        self._file.seek(0, os.SEEK_END)
        if self._read_at >= self._file.tell():
            self.close()
        return messages

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
