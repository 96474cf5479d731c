"""The one side thread of a worker: wire, heartbeats, commands.

The training thread only appends to a queue. This thread sends the queue at once, then lets reports gather for a quarter
of a second before it sends again: where all cores train, each message takes one from a rank for up to a millisecond,
in several processes. Only reports that survive this process gather so; others wait for a few milliseconds, so that ten
thousand a second cost a few hundred messages. Heartbeats and telemetry ride with reports that are about as frequent. A
rank of thousands lets reports gather for seconds where no rank waits for them. When the controller does not keep up,
reports go to a file until it does: none is dropped, and memory stays bounded.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Union

import msgspec

from powertrain.errors import WireError
from powertrain.trace.stacks import stacks
from powertrain.wire.envelope import FromController, FromWorker
from powertrain.wire.from_controller import (
    CheckpointReply,
    CheckpointSettled,
    DebugEnd,
    DebugGrant,
    DebugLine,
    Dismissed,
    Drop,
    Goto,
    Hold,
    Inspect,
    MessageRefused,
    Opened,
    Profile,
    Reported,
    RowClosed,
    Train,
    Unstaged,
    UploadShare,
)
from powertrain.wire.from_worker import Arrived, AskCheckpoints, Beat, Held, Noted, Noticed, Profiled, Stacks
from powertrain.wire.keys import ConnectionInfo
from powertrain.wire.link import Link
from powertrain.wire.values import Point, ProcessStack, Where
from powertrain.worker import values
from powertrain.worker.progress import Gate, Progress
from powertrain.worker.service.beats import MOST_GATHERED, BeatTimes, SharedTimes, can_gather
from powertrain.worker.service.spill import BATCH, Spill
from powertrain.worker.service.standstill import StoodStill
from powertrain.worker.signals import SAME_NOTICE_INTERVAL_S, NoticedSignals

if TYPE_CHECKING:
    from powertrain.worker.tracing import Tracing


#: Seconds within which messages are gathered into one batch, once one has just been sent: if all may wait, and if not.
_REPORT_DELAY_S, _GATHER_DELAY_S = 0.25, 0.003
#: Reports kept in memory; more go to the spill file.
_MEMORY_LIMIT = 20_000
_BEAT_INTERVAL_S = 1.0
#: Seconds without a message of the run, and since its end, after which a process that was asked to end exits.
_SILENCE_TIMEOUT_S, _DISMISSAL_TIMEOUT_S = 10.0, 2.0
_NOTHING = Opened(sync=0)
#: Replies that the training thread can wait for.
Answer = Union[Opened, CheckpointSettled, Reported]


class Service:
    """Owns the link. Everything public here may be called from the training thread."""

    def __init__(
        self,
        connection: ConnectionInfo,
        rank: int,
        attempt: int,
        gate: Gate,
        progress: Progress,
        *,
        spill_directory: str | None = None,
        failed: Callable[[], None] = lambda: None,
        unreachable: Callable[[], None] = lambda: None,
        watch: int = -1,
        orphaned: Callable[[], None] = lambda: None,
        signals: NoticedSignals | None = None,
    ) -> None:
        """``failed`` is called, on this thread, should it fail: the rank can neither send nor receive and must exit.
        ``unreachable`` is called where the run has never answered and cannot be reached. ``watch`` is a descriptor
        whose readiness means the run is gone; then ``orphaned`` is called. ``signals`` that ask this process to end are
        forwarded to the run."""
        self._gate, self._progress = gate, progress
        self._watch, self._orphaned, self._broken = watch, orphaned, failed
        self._unreachable = unreachable
        self._signals, self._notices, self._noticed_at = signals, 0, 0.0
        self._dismissed_at = float("inf")
        #: Commands for the main thread, in order: Execute, Train, Dismissed.
        self.commands: queue.SimpleQueue[FromController] = queue.SimpleQueue()
        #: Called on this thread: with shares that this rank uploads itself, and with rows whose shares are not needed
        #: in the staging area any more.
        self.on_upload_order: Callable[[UploadShare | Drop], None] = lambda _: None
        self.on_share_freed: Callable[[CheckpointSettled | Unstaged], None] = lambda _: None
        #: Called on this thread: with replies for a debugger of this rank; and to see whether one holds it.
        self.on_debug: Callable[[FromController], None] = lambda _: None
        self.is_debugged: Callable[[], bool] = lambda: False
        #: Called on this thread: with the request for a profile. Until the rank is traced, there are no steps.
        self.on_profile: Callable[[Profile], None] = self._refuse_profile
        #: Called on this thread: returns the progress of reading data, as text.
        self.describe_data: Callable[[], str] = lambda: ""
        #: The recorder of the rank's time, while it is traced.
        self.tracing: Tracing | None = None
        self._ordered: deque[FromWorker] = deque()
        self._urgent: deque[FromWorker] = deque()
        self._spill = Spill(spill_directory)
        self._waiters: dict[tuple[str, int], _Waiter] = {}
        self._waiters_lock = threading.Lock()
        self._closed_rows = 0
        #: Why the function ends at the awaited row; "" where it continues.
        self.stop_at_row = ""
        self._asks = 0
        self._when_over: list[Callable[[], None]] = []
        self._beats: BeatTimes | SharedTimes = BeatTimes(_BEAT_INTERVAL_S)
        #: Seconds for which reports gather: see ``wire.Train``. And whether a message is queued that must not wait: set
        #: after it is in the queue, and cleared before the queue is emptied, so none is ever missed.
        self.gather = 0.0
        self._is_pressed = False
        #: Why the run no longer reads messages of this rank; "" while it does.
        self.refusal = ""
        #: The rank's newest row, for the envelope.
        self.row = 0
        self._rank = rank
        self._stood = StoodStill()
        self._awake = False
        self._closing = False
        self._deadline = 0.0
        self._has_warned_of_full, self._spill_again_at = False, 0.0
        self._link = Link(connection, rank, attempt)  # handed to the thread, which alone uses it from then on
        self._thread = threading.Thread(target=self._run, name="powertrain-service", daemon=True)
        self._thread.start()

    # -- the training thread's side

    def post(self, message: FromWorker, *, may_wait: bool = False) -> None:
        """Send in order after everything posted before. Returns at once.

        Args:
            message: The message.
            may_wait: True where it and all before it would be known should this process die now.
        """
        self._ordered.append(message)
        if self.gather:
            if can_gather(message) and len(self._ordered) < MOST_GATHERED:
                return  # sent with the next heartbeat
        elif may_wait and can_gather(message) and len(self._ordered) < BATCH:
            if not self._awake:
                self._awake = True
                self._link.wake()
            return
        if not (self._is_pressed and self._awake):
            self._is_pressed = self._awake = True
            self._link.wake()

    def send_now(self, message: FromWorker) -> None:
        """Send ahead of the queue. Returns at once."""
        self._urgent.append(message)
        self._awake = True
        self._link.wake()

    def meet(self, message: Arrived) -> Opened:
        """Send, and wait until every rank has arrived or one never will."""
        waiter = self._waiter("sync", message.sync)
        self.send_now(message)
        answer = self._wait(waiter, message.kind)
        return answer if isinstance(answer, Opened) else _NOTHING

    def wait_for_row(self, row: int) -> None:
        """Wait until row ``row`` is complete on every rank."""
        waiter = self._waiter("row", row)
        if self._closed_rows >= row:
            waiter.set(_NOTHING)
        self._wait(waiter, f"row {row}")

    def wait_settled(self, row: int) -> CheckpointSettled | None:
        """Wait until the checkpoint of ``row`` is committed or has failed; None when the run ends before that.

        Before the report of ``row`` is posted, call :meth:`expect_settled`.
        """
        answer = self._wait(self._waiter("settled", row), f"commit of row {row}")
        return answer if isinstance(answer, CheckpointSettled) else None

    def expect_settled(self, row: int) -> None:
        """Keep the reply for :meth:`wait_settled`, however early it comes."""
        self._waiter("settled", row)

    def query_checkpoints(self, row: int, validated: bool, timeout: float) -> list[CheckpointReply]:
        """Wait for the controller's list of checkpoints; see ``wire.AskCheckpoints``."""
        self._asks += 1
        waiter = self._waiter("ask", self._asks)
        self.post(AskCheckpoints(ask=self._asks, row=row, validated=validated, timeout=timeout))
        answer = self._wait(waiter, "checkpoints")
        return list(answer.checkpoints) if isinstance(answer, Reported) else []

    def _wait(self, waiter: _Waiter, what: str) -> Answer:
        """Return the waiter's reply; heartbeats show meanwhile that the rank waits for ``what``. Raises
        :class:`WireError` where none will come because the run could not read the rank's messages."""
        self._progress.awaits = what
        try:
            answer = _NOTHING if self.refusal else waiter.wait()
        finally:
            self._progress.awaits = ""
        self.check_refusal()
        return answer

    def check_refusal(self) -> None:
        """Raise :class:`WireError` where the run could not read a message of this rank."""
        if self.refusal:
            raise WireError(self.refusal)

    def close(self, timeout: float = 10.0) -> None:
        """Flush the queue, wait for its acknowledgement, end the thread."""
        self._closing = True
        self._deadline = time.monotonic() + timeout
        self._link.wake()
        self._thread.join(timeout + 1.0)

    # -- the thread

    def _run(self) -> None:
        if self._watch >= 0:
            self._link.watch(self._watch)
        if self._signals is not None:
            self._link.watch(self._signals.descriptor)
        last_send = 0.0
        try:
            while True:
                pause, asleep = self._pause(last_send), time.monotonic()
                commands, watched = self._link.poll(pause)
                self._stood.woke(asleep + pause, time.monotonic())
                if self._watch in watched:
                    self._orphaned()
                    return
                if watched:
                    self._forward_signals()
                if self._should_exit():
                    self._orphaned()
                    return
                if why := self._link.why_unreachable():
                    _log_unreachable(self._rank, self._link.endpoint, why)
                    self._unreachable()
                    return
                for command in commands:
                    self._handle(command)
                now = time.monotonic()
                rides = self._is_about_to_send(now, last_send)
                # Reports have a rhythm; replies and other urgent messages have none.
                if reports := rides and bool(self._ordered or self._spill):
                    self._beats.on_other_sent(now)
                if self._beats.is_due(now, rides=reports):
                    self._beats.sent(now)
                    self._urgent.append(self._beat(now))
                self._collect_telemetry(now, rides or bool(self._urgent))
                self._keep_memory_bounded()
                if self._is_about_to_send(now, last_send) and self._send_batch():
                    last_send = now
                if self._closing and (self._is_flushed() or now > self._deadline):
                    return
        except BaseException as error:
            self._failed(error)
        finally:
            self._release_waiters()
            self._link.close()
            self._spill.close()

    def _is_about_to_send(self, now: float, last_send: float) -> bool:
        if not (self._urgent or self._ordered or self._spill) or self._link.room <= 0:
            return False
        if self._urgent or self._closing:
            return True
        return now - last_send >= self._delay and not self._can_gather_queue()

    @property
    def _delay(self) -> float:
        """Seconds between two batches."""
        return _GATHER_DELAY_S if self._is_pressed or self._spill else _REPORT_DELAY_S

    def _can_gather_queue(self) -> bool:
        """Return True when all queued messages may wait for the next heartbeat."""
        return self.gather > 0 and not (self._is_pressed or self._spill or self._urgent)

    def _collect_telemetry(self, now: float, rides: bool) -> None:
        """Collect telemetry. Unsent records stay in the ring."""
        tracing = self.tracing
        if tracing is not None and (now >= tracing.due or (rides and now >= tracing.rides_from)):
            telemetry = tracing.collect(can_send=self._link.room > 0, rides=rides)
            if telemetry is not None:
                self._urgent.append(telemetry)

    def _forward_signals(self) -> None:
        """Forward signals to the run. A scheduler and a launcher may both send one for the same cause: simultaneous
        ones count once."""
        assert self._signals is not None
        for number in self._signals.take():
            now = time.monotonic()
            if now - self._noticed_at > SAME_NOTICE_INTERVAL_S:
                self._noticed_at = now
                self._notices += 1
                self._urgent.append(Noticed(signal=number.name, times=self._notices))

    def _should_exit(self) -> bool:
        """Return True for a process that was asked to end and whose run is over, or does not answer: nothing is left to
        wait for, and its main thread may wait for a rank that is gone."""
        # Where nothing is watched the engine ends the process, or it is the user's own.
        if not self._notices or self._watch < 0:
            return False
        return (
            self._link.silence > _SILENCE_TIMEOUT_S
            or time.monotonic() - self._dismissed_at > _DISMISSAL_TIMEOUT_S
        )

    def _failed(self, error: BaseException) -> None:
        """Log the failure of this thread and report it; otherwise the run would never learn of it."""
        self.refusal = (
            f"This rank can no longer talk to its run, because its service thread failed: {type(error).__name__}: "
            f"{error}. This is a fault of Powertrain."
        )
        traceback.print_exception(type(error), error, error.__traceback__)
        self._broken()

    def _pause(self, last_send: float) -> float:
        """Return the seconds to wait for a command. Leaves ``_awake`` set where the queue will be checked anyway."""
        now = time.monotonic()
        if self._closing:
            return 0.05
        self._awake = False
        if (self._ordered or self._urgent or self._spill) and not self._can_gather_queue():
            self._awake = True
            if self._link.room <= 0:
                return 0.05  # an acknowledgement ends the wait
            return max(0.0, last_send + self._delay - now)
        due = self._beats.alone_at if self.tracing is None else min(self._beats.alone_at, self.tracing.due)
        if now - last_send < self._delay:
            self._awake = True
            due = min(due, last_send + self._delay)
        return max(0.0, due - now)

    def _send_batch(self) -> bool:
        if self._link.room <= 0:
            return False
        batch: list[FromWorker] = []
        self._is_pressed = False
        while self._urgent:
            batch.append(self._urgent.popleft())
        batch += self._spill.take() if self._spill else []
        while not self._spill and self._ordered and len(batch) < BATCH:
            batch.append(_resolved(self._ordered.popleft()))
        if len(self._ordered) >= MOST_GATHERED or len(batch) >= BATCH:
            self._is_pressed = True  # the rest is sent too, and not with the next heartbeat
        if batch:
            self._link.send(batch, self._gate.passed, self.row)
        return bool(batch)

    def _keep_memory_bounded(self) -> None:
        """Move messages beyond the limit to the file; while the file has content, all new messages follow into it."""
        full = len(self._ordered) > _MEMORY_LIMIT or (self._spill and self._ordered)
        if not full or time.monotonic() < self._spill_again_at:
            return
        messages = [_resolved(self._ordered.popleft()) for _ in range(len(self._ordered))]
        try:
            self._spill.put(messages)
        except OSError as error:
            self._ordered.extendleft(reversed(messages))
            self._spill_again_at = time.monotonic() + 1.0
            if not self._has_warned_of_full:
                self._has_warned_of_full = True
                self._urgent.append(
                    Noted(message=f"Reports pile up in memory: they cannot be put on disk ({error}).")
                )

    def _is_flushed(self) -> bool:
        if self.refusal:  # no message is accepted any more
            return True
        return not (self._ordered or self._urgent or self._spill) and self._link.is_acknowledged

    def _beat(self, now: float) -> Beat:
        progress = self._progress
        reports, steps, batches = progress.snapshot()
        moved = progress.moved
        where, debugged = self._sample_main_thread()
        return Beat(
            reports=reports,
            steps=steps,
            batches=batches,
            idle=max(0.0, now - moved - self._stood.since(moved)),
            phase=progress.phase,
            row=self.row,
            collectives=progress.collectives(),
            awaits=progress.awaits,
            where=where,
            debugged=debugged or self.is_debugged(),
            data=self._data(),
        )

    def _data(self) -> str:
        try:
            return self.describe_data()
        except Exception:  # it changes on another thread; a heartbeat does without it
            return ""

    @staticmethod
    def _sample_main_thread() -> tuple[Where | None, bool]:
        """Return where the training thread is, and whether a debugger holds it. Errors are ignored."""
        try:
            main = stacks.main_frame()
            return stacks.own_where(main), stacks.own_debugged(main)
        except Exception:
            return None, False

    def _stacks(self, ask: int) -> Stacks:
        """Return the stacks of this process and of those that it has started."""
        title, pid = f"rank {self._rank}", os.getpid()
        try:
            found = [
                stacks.own_process(title),
                *stacks.children_stacks(pid, title, stacks.dump_path()),
            ]
        except Exception as error:
            remark = f"It could not look at itself: {type(error).__name__}: {error}."
            found = [ProcessStack(pid=pid, title=title, state="running", remark=remark)]
        return Stacks(ask=ask, processes=found)

    def _handle(self, command: FromController) -> None:
        if isinstance(command, Hold):
            can_save = self._gate.can_save()
            held = Held(hold=command.hold, boundary=self._gate.arm(command.hold), can_save=can_save)
            self._urgent.append(held)
        elif isinstance(command, Goto):
            self._gate.go_to(command)
        elif isinstance(command, Inspect):
            self._urgent.append(self._stacks(command.ask))
        elif isinstance(command, Profile):
            self.on_profile(command)
        elif isinstance(command, Opened):
            self._waiter("sync", command.sync).set(command)
        elif isinstance(command, RowClosed):
            self._close_row(command)
        elif isinstance(command, (UploadShare, Drop)):
            self.on_upload_order(command)
        elif isinstance(command, Unstaged):
            self.on_share_freed(command)
        elif isinstance(command, CheckpointSettled):
            self.on_share_freed(command)
            self._answer(("settled", command.row), command)
        elif isinstance(command, Reported):
            self._answer(("ask", command.ask), command)
        elif isinstance(command, MessageRefused):
            self.refusal = command.reason  # first: later waiters check it
            self._wake_waiters()
        elif isinstance(command, (DebugGrant, DebugLine, DebugEnd)):
            self.on_debug(command)
        else:
            if isinstance(command, Train) and command.gather > 0:
                self._beats = SharedTimes(command.gather, self._rank, time.monotonic())
                self.gather = command.gather
                self._is_pressed = bool(self._ordered)  # earlier messages were posted without this check
            if isinstance(command, Dismissed):
                self._dismissed_at = time.monotonic()
                self.on_debug(command)
            self.commands.put(command)

    def _refuse_profile(self, order: Profile) -> None:
        self.send_now(
            Profiled(ask=order.ask, error="the rank is not in its training function, or is not traced")
        )

    def _close_row(self, command: RowClosed) -> None:
        row, self.stop_at_row = command.row, command.stop
        self._closed_rows = row
        with self._waiters_lock:
            ready = [w for (kind, number), w in self._waiters.items() if kind == "row" and number <= row]
        for waiter in ready:
            waiter.set(_NOTHING)

    def _answer(self, key: tuple[str, int], answer: Answer) -> None:
        """Pass the reply to its waiter, if there is one."""
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
        """Call back, on this thread, when no more replies will come."""
        self._when_over.append(callback)

    def _release_waiters(self) -> None:
        self._gate.open()
        for callback in self._when_over:
            callback()
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        with self._waiters_lock:
            waiters = list(self._waiters.values())
        for waiter in waiters:
            waiter.set(_NOTHING)


def _log_unreachable(rank: int, endpoint: str, why: str) -> None:
    """Log that the run cannot be reached."""
    print(
        f"Rank {rank} cannot reach the run at {endpoint}: {why}. A firewall may be in between: open the port that "
        "RunConfig(port=...) names, from every node to the one on which the script runs.",
        file=sys.stderr,
        flush=True,
    )


def _resolved(message: FromWorker) -> FromWorker:
    """Return the message with all values resolved: this thread waits for those still on their way from a GPU."""
    if isinstance(message, Point) and values.is_pending(message.metrics):
        return msgspec.structs.replace(message, metrics=values.resolve(message.metrics))
    return message


class _Waiter:
    """One reply, awaited once."""

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
