"""The one loop of a run: wait, decide, act, journal.

It wakes when a message, an exit or a deadline arrives, and never polls. Policies decide (:mod:`failure_policy`,
:mod:`stopping`, :mod:`scaling_policy`); this acts. It knows engines only by their protocol and workers only by
their messages, and it unpickles nothing that either sends.

::

    request slots ─▶ fork ─▶ hooks ─▶ train ─▶ shut down ─▶ dismiss ─▶ end
          ▲                    │        │
          └── decide ◀── clear ◀────────┘   a death, an error, a loss
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.manifest import Manifest, Validation
from powertrain.checkpoint.saver import remove_share, sealed_reports
from powertrain.engine import base
from powertrain.errors import EngineError, FencedError, PowertrainError, ResourceError, WireError
from powertrain.run import events as ev
from powertrain.run import lifecycle, stopping
from powertrain.run.callbacks import Callbacks, RunContext
from powertrain.run.checkpoints.committer import Committer, Done, Trouble
from powertrain.run.checkpoints.pending import Pending
from powertrain.run.checkpoints.queries import Asks
from powertrain.run.checkpoints.tracker import Checkpoints
from powertrain.run.checkpoints.unsaved import error_text
from powertrain.run.checkpoints.uploads import Carriers
from powertrain.run.checkpoints.validations import PENDING, Task, Validations, asked_for, cut_off, task_of
from powertrain.run.debugging.keyboard import Typed
from powertrain.run.debugging.sessions import Debugging, place_of
from powertrain.run.forced_end import EndedAtOnce
from powertrain.run.health import failure_policy, failures
from powertrain.run.health.hangs import Hangs, Looked
from powertrain.run.inbox import Delivered, Interrupt, LeaseLost, Noticed, Parted, Said
from powertrain.run.metrics.points import PointRecord
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.outcome import RunOutcome
from powertrain.run.record.journal import Journal
from powertrain.run.remote import protocol, status
from powertrain.run.remote.inspections import Inspections, SeenFromOutside
from powertrain.run.scaling import preemption
from powertrain.run.scaling.policy import Elastic, in_words
from powertrain.run.scaling.preemption import Notice, Regroup
from powertrain.run.scaling.slots import Slots
from powertrain.run.scaling.steering import Steering
from powertrain.run.spec import RunSpec
from powertrain.run.startup.recorder import Startup
from powertrain.run.telemetry import Telemetry
from powertrain.run.workers import attempt as phases
from powertrain.run.workers import backend_hooks, launch, placement
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.run.workers.backend_hooks import HookDone
from powertrain.run.workers.rows import Row
from powertrain.run.workers.worker_group import WorkerCallError
from powertrain.storage import Storage, safety
from powertrain.text.errors import describe_error, message_of
from powertrain.values.exceptions import exceptions_of
from powertrain.wire import from_worker
from powertrain.wire.envelope import FromController, FromWorker
from powertrain.wire.from_controller import (
    Dismissed,
    Preemption,
    Refused,
    RowClosed,
    Settled,
    Train,
    Unstaged,
)
from powertrain.wire.from_worker import (
    Arrived,
    AskCheckpoints,
    Beat,
    Carried,
    CarryTrouble,
    DebugClosed,
    DebugOpened,
    DebugOutput,
    DebugPrompt,
    DebugQuit,
    Executed,
    FirstStep,
    Held,
    Hello,
    Noted,
    Outcome,
    Reached,
    Stacks,
    StagingFull,
)
from powertrain.wire.hub import Hub
from powertrain.wire.keys import Received
from powertrain.wire.values import ErrorReport, Point
from powertrain.worker.checkpoints.row_mark import marked_row
from powertrain.worker.signals import SAME_NOTICE

if TYPE_CHECKING:
    from powertrain.run.outcome import Observer


#: Seconds within which every forked process must have said its first word.
_START_WITHIN = 300.0
#: Seconds to wait for the cause when every failure seen so far reads like an echo of another.
_CAUSE_WITHIN = 1.0
#: Seconds a rank that has never reported is awaited by those that have.
_ABSENT_AFTER = 30.0
#: Seconds between two remarks about a rank that is behind.
_LATE_EVERY = 5.0
#: Seconds that a commit waits for the points before it to be on disk.
_SPOOLED_WITHIN = 2.0
#: Seconds that an interrupted run has to reach its boundary.
_INTERRUPT_GRACE = 15.0
#: Seconds for ranks without any report to end after the others have stopped; for hooks; for processes to leave.
_LAGGARD_GRACE = 5.0
_HOOK_GRACE = 10.0
_EXIT_GRACE = 10.0
#: Seconds after which a checkpoint that is not in storage yet is worth a word; then after twice as long each time.
_LAG_AFTER = 10.0
#: Seconds that a restart waits for checkpoints that are on their way, so as not to redo what they hold.
_SETTLE_WITHIN = 60.0
#: The same for somebody who has pressed Ctrl-C twice.
_CUT_SHORT = 2.0
#: Seconds for the last deletions.
_COMMITTER_GRACE = 10.0
#: Seconds for killed processes to be reported as gone before they are killed by other means; the same for a run that
#: was asked twice to end; and after that until they are left.
_KILL_TIMEOUT_S, _CUT_SHORT_KILL_TIMEOUT_S, _ABANDON_TIMEOUT_S = 20.0, 2.0, 4.0
#: Deadlines that wait while a debugger is open.
_PAUSED = ("late", "absent", "together", "laggards")
#: Seconds by which the loop may come late before it is clear that this process itself was not running.
_STOOD_STILL = 1.0

_LAUNCHER_DECIDES = failure_policy.Decision("give_up", "the launcher decides whether to start it again")


@dataclass(frozen=True)
class _EndEarly:
    reason: str


@dataclass(frozen=True)
class _Refused:
    """A message of a worker could not be read."""

    sender: bytes
    problem: str


class Controller:
    """Runs one run to its end. ``run`` may be called on any thread; ``interrupt`` from any other."""

    def __init__(
        self,
        spec: RunSpec,
        engine: base.Engine,
        storage: Storage,
        chain: Chain,
        state: lifecycle.RunState,
        observer: Observer,
        from_checkpoint: Manifest | None = None,
        is_displaced: Callable[[], bool] = lambda: False,
    ) -> None:
        """``is_displaced`` returns True when the run's directory was removed, or belongs to another start by now."""
        lease = chain.lease
        self._is_displaced, self._lease_identity = is_displaced, (lease, chain.token)
        self._spec, self._engine, self._storage, self._lease = spec, engine, storage, lease
        self._state = state
        self._observer = observer
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        #: Batches of workers that have come, and points of theirs that are not kept yet.
        self._batches: deque[Received] = deque()
        self._points_to_keep: list[PointRecord] = []
        with contextlib.ExitStack() as undone:  # closed again where a part of the controller cannot be made
            self._journal = Journal(storage, lease)
            undone.callback(self._journal.close)
            self._metrics = MetricsStore(storage, lease)
            undone.callback(self._metrics.close)
            self._make_parts(chain, from_checkpoint)
            undone.pop_all()

    def _make_parts(self, chain: Chain, from_checkpoint: Manifest | None) -> None:
        """Make what the loop works with, and its state before the first message."""
        spec, engine = self._spec, self._engine
        self._callbacks = Callbacks(
            spec.callbacks,
            RunContext(spec.name, spec.path, spec.storage_path, **spec.arguments, end_early=self.end_early),
            self._warn,
        )
        self._committer = Committer(self._inbox.put, spec.sync_timeout)
        self._checkpoints = self._make_checkpoints(chain, from_checkpoint)
        self._lag_told = 0.0
        self._after_settling: Callable[[], None] | None = None
        self._left_by_interrupt = False
        self._after_validations: Callable[[], None] | None = None
        #: Facts that storage has not taken yet.
        self._unwritten: list[ev.Event] = []
        self._told: set[str] = set()
        self._deadlines: dict[str, float] = {}
        self._startup = Startup(self._record, engine.name)
        self._startup.runs_script = spec.runs_scripts
        self._attempt: Attempt | None = None
        self._members: dict[bytes, Member] = {}
        self._ranks_by_slot: dict[str, int] = {}
        #: The (attempt, row) that some ranks have reached and others not, and since when.
        self._awaited, self._awaited_since = (-1, 0), 0.0
        self._interrupts = 0
        self._debugging = self._make_debugging()
        #: Timeouts that wait for debuggers to be left, and the seconds that are left of each.
        self._paused: dict[str, float] = {}
        #: When the newest row was complete (monotonic); 0 before the first.
        self._row_at = 0.0
        self._elastic = Elastic(spec.min_workers, spec.max_workers)
        self._slots = self._make_slots()
        self._steering = self._make_steering(has_committed=from_checkpoint is not None)
        self._asks = Asks(
            self._checkpoints, self._deadlines, self._send, lambda row: self._validations.awaited(row)
        )
        #: The newest notice; slots that one came for; and how often the driver itself was asked to end.
        self._notice: Notice | None = None
        self._noticed_slots: set[str] = set()
        self._signals, self._signalled_at = 0, float("-inf")
        #: True when the process that runs this was asked to end.
        self._is_to_leave = False
        #: True once it is decided that the run ends, and how.
        self._is_decided = False
        self._early_deaths = 0
        self._stopping: ev.Stopping | None = None
        self._after_clearing: Callable[[], None] | None = None
        #: What rows with checkpoints reported, for the callback that comes when they are settled.
        self._reports: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._fenced = False
        self._looked_at_space = False
        self._last_metrics = dict(from_checkpoint.metrics) if from_checkpoint is not None else None
        #: What rank 0 last reported outside rows.
        self._last_solo: dict[str, Any] | None = None
        #: Warnings of ranks that are not shown again.
        self._shown_once: set[str] = set()
        #: The objects among either.
        self._originals: dict[str, bytes] = {}
        self._solo_originals: dict[str, bytes] = {}
        self._value = b""
        self._failures: tuple[ev.WorkerFailure, ...] = ()
        self._began = time.monotonic()
        self._outcome: RunOutcome | None = None

    def _make_checkpoints(self, chain: Chain, from_checkpoint: Manifest | None) -> Checkpoints:
        return Checkpoints(
            self._storage,
            chain,
            self._spec.checkpoints,
            from_checkpoint,
            tag=self._spec.checkpoint_tag,
            committer=self._committer,
            # Who resumes from it relies on the rows before it: they must not die with this process.
            before_commit=lambda: self._metrics.wait_spooled(_SPOOLED_WITHIN),
            settled=self._settled,
            unstaged=self._tell_unstaged,
            tell=self._warn,
        )

    def _make_slots(self) -> Slots:
        return Slots(
            self._spec,
            self._engine,
            self._elastic,
            self._deadlines,
            state=lambda: self._state,
            record=self._record,
            ready=self._start_attempt,
        )

    def _make_steering(self, *, has_committed: bool) -> Steering:
        return Steering(
            self._elastic,
            self._checkpoints,
            self._deadlines,
            send=self._send,
            tell_once=self._tell_once_recorded,
            has_committed=has_committed,
        )

    # ------------------------------------------------------------------ the loop

    def run(self) -> RunOutcome:
        """From the first request to the end. Afterwards nothing of the run is alive."""
        with contextlib.ExitStack() as closing:  # from the last to the first, each even if another fails
            closing.callback(self._journal.close)
            closing.callback(self._close_metrics)
            with self._engine_closed_on_error():
                self._telemetry = Telemetry(self._spec, self._storage, self._lease, self._tell_once)
                closing.callback(self._close_telemetry)
                self._hub = self._open_hub()
                closing.callback(self._hub.close)
                self._carriers = self._make_carriers()
                closing.callback(self._carriers.remove_empty_log)
            closing.callback(self._engine.close)
            closing.callback(self._dismiss_who_is_left)
            closing.callback(self._close_committer)
            closing.callback(self._carriers.close)
            self._checkpoints.carried_by(self._carriers)
            self._validations = self._make_validations()
            closing.callback(self._validations.close)
            self._hangs = Hangs(
                self._spec, self._engine, self._storage, self._send, self._inbox.put, self.say
            )
            closing.callback(self._hangs.close)
            closing.callback(self._debugging.close)
            self._inspections = Inspections(self._engine, self._send, self._inbox.put)
            closing.callback(self._inspections.close)
            self._engine.connect(self._hub)
            self._engine.start(self._inbox.put, self._output)
            self._record(self._run_started())
            return self._run_to_its_end()

    def _run_to_its_end(self) -> RunOutcome:
        try:
            self._startup.slots_asked()
            self._slots.look()
            while self._outcome is None:
                item = self._next()
                self._take_in_batches()  # they came before it
                self._handle(item)
            return self._outcome
        except (ResourceError, EngineError) as error:
            # The caller's to handle; a reader of the journal must find it too.
            self._record_end(lifecycle.FAILED, str(error))
            raise
        except EndedAtOnce:
            self._record_forced_end()
            raise
        except BaseException as error:
            # A fault of our own, or of storage: the journal must not look as if the run went on.
            self._record_broken_end(lifecycle.FAILED, describe_error(error))
            raise

    @contextlib.contextmanager
    def _engine_closed_on_error(self) -> Iterator[None]:
        """Close the engine where the block fails: an inline rank waits in its thread until then."""
        try:
            yield
        except BaseException:
            self._engine.close()
            raise

    def _make_carriers(self) -> Carriers:
        return Carriers(
            self._engine,
            self._hub,
            self._spec.storage or pickle.dumps(self._storage),
            self._spec.sync_timeout,
            launch.log_path(self._spec, "uploader.log"),
            self._inbox.put,
            self._lease_identity,
        )

    def _open_hub(self) -> Hub:
        return Hub(
            self._engine.wire_address(),
            self._batches.append,
            lambda problem: self._inbox.put(Noted(message=problem)),
            delivered=lambda: self._inbox.put(Delivered()),
            parted=lambda key: self._inbox.put(Parted(key)),
            refused=lambda key, problem: self._inbox.put(_Refused(key, problem)),
            directory=self._spec.runtime_dir,
            port=self._spec.port,
            listen_on=self._spec.bind_host,
        )

    def interrupt(self) -> None:
        """Ask for an end: gracefully the first time, at once the second. Any thread, also a signal handler."""
        self._inbox.put(Interrupt())

    def end_early(self, reason: str) -> None:
        """End the run at the next boundary, as if its stop criterion had been met. Any thread."""
        self._inbox.put(_EndEarly(str(reason)))

    def notify(self, reason: str) -> None:
        """The process that runs this will be ended soon. A second time means at once. Any thread, a signal handler."""
        self._inbox.put(Noticed(reason))

    def launched(self, at: float, parts: Mapping[str, float]) -> None:
        """The run began ``at`` the call of ``fit``; see :meth:`Startup.launched`. Before ``run``."""
        self._startup.launched(at, parts)

    def visit(self, question: protocol.Question, visitor: protocol.Visitor) -> None:
        """Somebody asks from outside; the visitor is told and answered. Any thread."""
        self._inbox.put(status.Asked(question, visitor))

    def say(self, message: str) -> None:
        """Have a warning recorded, as soon as the run has begun. Any thread."""
        self._inbox.put(Said(message))

    def _said(self, said: Said) -> None:
        self._warn(said.message)

    def _next(self) -> Any:
        """The next message, or the name of a deadline that has passed."""
        while True:
            due = min(self._deadlines.items(), key=lambda item: item[1], default=None)
            asked = time.monotonic()
            timeout = None if due is None else max(0.0, due[1] - asked)
            try:
                return self._inbox.get(timeout=timeout)
            except queue.Empty:
                assert due is not None
                del self._deadlines[due[0]]
                return due[0]
            finally:
                late = 0.0 if timeout is None else time.monotonic() - asked - timeout
                if late > _STOOD_STILL:  # this machine was: nobody hangs because of that
                    self._hangs.stood_still(late)

    def _handle(self, item: Any) -> None:
        if item in _PAUSED and self._debugging.is_open:
            self._paused[item] = _LAGGARD_GRACE
            return
        handler = _HANDLERS.get(item if isinstance(item, str) else type(item))
        if handler is not None:
            handler(self, item)

    def _record(self, event: ev.Event) -> None:
        """Make a fact of it: state, journal, terminal, callbacks."""
        self._state = lifecycle.apply(self._state, event)
        self._unwritten.append(event)
        try:
            while self._unwritten:
                self._journal.append(self._unwritten[0])
                self._unwritten.pop(0)
        except OSError as error:
            self._tell_once(
                f"The journal cannot be written ({error}); the run goes on, and it is tried again."
            )
        self._observer.event(event)
        self._callbacks.call("on_event", event)

    def _tell_once_recorded(self, message: str) -> None:
        """A warning that is as true the next time, and need not be said again."""
        if message not in self._told:
            self._told.add(message)
            self._warn(message)

    def _tell_once(self, message: str) -> None:
        """Something about the record itself, which therefore cannot be recorded."""
        if message not in self._told:
            self._told.add(message)
            self._observer.event(ev.Warned(time=time.time(), message=message))

    def _warn(self, message: str, rank: int = -1) -> None:
        self._record(
            ev.Warned(time=time.time(), message=message, attempt=max(0, self._state.attempt), rank=rank)
        )

    def _dismiss_who_is_left(self) -> None:
        """Only after an error of our own: a rank in this very process waits to be dismissed."""
        for member in self._attempt.members if self._attempt is not None else ():
            if not member.exited:
                self._send(member, Dismissed())

    def _close_committer(self) -> None:
        self._committer.close(_CUT_SHORT if self.is_ending_at_once else _COMMITTER_GRACE)

    def _close_telemetry(self) -> None:
        if self._is_displaced():
            self._telemetry.abandon()
        else:
            self._telemetry.close()

    def _close_metrics(self) -> None:
        """A run that has ended well is not made a failure by points that could not be put in their last place."""
        if self._is_displaced():
            self._metrics.abandon()
            return
        try:
            self._metrics.close()
        except (PowertrainError, OSError) as error:
            self._observer.event(ev.Warned(time=time.time(), message=message_of(error)))

    def _run_started(self) -> ev.RunStarted:
        newest = self._checkpoints.newest
        return ev.RunStarted(
            time=time.time(),
            name=self._spec.name,
            lease=self._lease,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=self._spec.version,
            engine=self._engine.name,
            min_workers=self._spec.min_workers,
            max_workers=self._spec.max_workers,
            row=newest.row if newest else 0,
            checkpoint=newest.name if newest else "",
        )

    # ------------------------------------------------------------------ slots

    def _capacity_changed(self, event: base.Capacity) -> None:
        self._elastic.tell_capacity(event.count, time.monotonic())
        self._capacity_known("")
        self._consider_resize()

    def _capacity_known(self, _: str) -> None:
        if self._stopping is None and self._outcome is None:
            self._slots.capacity_known()

    def _granted(self, event: base.Granted) -> None:
        if not self._validations.granted(event):
            self._slots.granted(event)

    def _slots_waited(self, event: base.Waiting) -> None:
        if not self._validations.slot_awaited(event):
            self._slots.waited(event)

    def _slots_overdue(self, _: str) -> None:
        self._slots.overdue()

    def _slots_refused(self, event: base.Refused) -> None:
        if self._validations.slot_refused(event) or not self._slots.refused(event):
            return
        if not self._elastic.is_elastic or len(self._slots.held) < self._spec.min_workers:
            raise ResourceError(event.reason)
        self._warn(event.reason)
        self._slots.overdue()

    def _queued_too_long(self, _: str) -> None:
        raise ResourceError(self._slots.waited_long_enough())

    # ------------------------------------------------------------------ start of an attempt

    def _start_attempt(self) -> None:
        """All slots are there."""
        if self._stopping is not None:
            return
        placements = placement.arrange(self._slots.held)
        first_row = self._checkpoints.newest.row + 1 if self._checkpoints.newest else 1
        attempt = self._attempt = Attempt(self._state.attempt + 1, placements, first_row)
        self._record(
            ev.AttemptStarted(
                time=time.time(),
                attempt=attempt.number,
                world_size=attempt.world_size,
                first_row=first_row,
                checkpoint=self._checkpoints.newest.name if self._checkpoints.newest else "",
                hosts=tuple(p.slot.host for p in placements),
            )
        )
        self._startup.attempt_began(attempt.number, attempt.world_size, self._slots.reason)
        self._deadlines["start"] = time.monotonic() + _START_WITHIN
        self._hangs.forget()
        start = self._start()
        for place in placements:
            self._fork(attempt, place, start)
        self._validations.begin(placements[0].slot)

    def _start_overdue(self, _: str) -> None:
        """Ranks that have not said a word by now never will."""
        attempt = self._attempt
        if attempt is None or attempt.phase != phases.STARTING:
            return
        for member in attempt.members:
            if not member.greeted:
                why = f"did not come up within {_START_WITHIN:g} s; its log may say why"
                self._fail(member, failures.silent(member, why))

    def _fork(self, attempt: Attempt, place: placement.Placement, start: launch.Start) -> None:
        door = self._hub.admit(place.slot.key, speaks_as=(place.rank, attempt.number))
        member = Member(place, door.keys.public, attempt)
        attempt.members.append(member)
        self._members[member.key] = member
        self._ranks_by_slot[place.slot.id] = place.rank
        self._engine.fork(place.slot, launch.process_of(self._spec, attempt, place, door, start))

    def _start(self) -> launch.Start:
        """What the next attempt goes on from."""
        own = self._checkpoints.newest_path()
        return launch.Start(
            checkpoint=own or self._spec.begin_from,
            filesystem=self._spec.filesystem if own else self._spec.begin_from_filesystem,
            names=self._checkpoints.given_names(),
            host=socket.gethostname(),
            storage=self._spec.storage or pickle.dumps(self._storage),
            data_positions=self._checkpoints.data_positions(),
            data_gaps=self._checkpoints.data_gaps(),
        )

    def _started(self, event: base.Started) -> None:
        member = self._attempt and self._attempt.by_slot(event.slot.id)
        if member:
            member.pid = event.pid
            self._startup.started(member.rank, event)

    def _hello(self, member: Member, message: Hello) -> None:
        member.greeted, member.pid = True, message.pid
        self._startup.greeted(member.rank)
        self._record(
            ev.WorkerStarted(
                time=time.time(),
                attempt=member.attempt.number,
                rank=member.rank,
                pid=message.pid,
                host=message.host,
            )
        )
        if member.attempt.phase == phases.STARTING and member.attempt.all_greeted():
            self._deadlines.pop("start", None)
            self._run_hooks(member.attempt, "start")

    def _first_step(self, member: Member, message: FirstStep) -> None:
        self._startup.first_step(member.rank, message)

    # ------------------------------------------------------------------ the backend's hooks

    def _run_hooks(self, attempt: Attempt, hook: str) -> None:
        attempt.shut_down |= hook == "shutdown"
        if attempt.group is None:
            attempt.group = backend_hooks.group_of(attempt, self._hub)
        backend_hooks.run(self._spec.backend, attempt, hook, self._inbox.put)

    def _hook_done(self, done: HookDone) -> None:
        attempt = self._attempt
        if done.hook == "shutdown" and done.error is not None:
            self._tell_once(f"The backend's on_shutdown raised {describe_error(done.error)}.")
        if attempt is None or attempt.number != done.attempt:
            return
        if done.hook == "shutdown":
            if attempt.phase == phases.SHUTTING_DOWN:
                self._dismiss(attempt)
        elif attempt.phase == phases.STARTING:
            if done.error is not None:
                self._hook_failed(attempt, done.error)
            else:
                self._train(attempt)

    def _hook_failed(self, attempt: Attempt, error: BaseException) -> None:
        """A start hook's error is the failure of the rank it happened in, or of the run as a whole (rank 0)."""
        if isinstance(error, WorkerCallError):
            member = attempt.members[error.rank]
            self._fail(member, failures.raised(member, error.report, "start"))
        elif not attempt.failures and not attempt.losses:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            report = ErrorReport(type=type(error).__name__, message=message_of(error), traceback=text)
            self._fail(attempt.members[0], failures.raised(attempt.members[0], report, "start"))

    def _train(self, attempt: Attempt) -> None:
        attempt.phase = phases.TRAINING
        self._startup.trained()
        self._record(ev.TrainingStarted(time=time.time(), attempt=attempt.number))
        for member in attempt.members:
            # Rank 0's reports are the ones that people look at, and it is only one.
            self._send(member, Train(gather=attempt.gather if member.rank else 0.0))
        self._hangs.begin(attempt)
        self._watch()
        self._consider_resize()

    # ------------------------------------------------------------------ what workers say

    def _send(self, member: Member, message: FromController) -> None:
        self._hub.send(member.key, message)

    def _take_in_batches(self) -> None:
        """Deal with what has come. Points are kept together, and batches acknowledged when theirs are."""
        batches = [self._batches.popleft() for _ in range(len(self._batches))]
        for received in batches:
            self._received(received)
        self._keep_points()
        for received in batches:
            self._hub.acknowledge(received)

    def _keep_points(self) -> None:
        if self._points_to_keep:
            points, self._points_to_keep = self._points_to_keep, []
            self._metrics.add(points)

    def _received(self, received: Received) -> None:
        member = self._members.get(received.sender)
        if member is None:
            self._from_uploader(received)
            return
        if received.envelope.boundary:
            member.attempt.has_trained = True
        points: list[Point] = []
        for message in received.envelope.messages:
            if isinstance(message, Point):
                if self._can_be_next(member, message, points):
                    points.append(message)
            else:
                self._points(member, points)
                points = []
                handler = _MESSAGE_HANDLERS.get(type(message))
                if handler is not None and member.attempt is self._attempt:
                    handler(self, member, message)
        self._points(member, points)

    def _can_be_next(self, member: Member, point: Point, before: list[Point]) -> bool:
        """Rows follow each other. One far ahead would have everything in between waited for.

        Of an attempt that is over nothing is waited for any more, and its points are only kept."""
        if point.solo or member.attempt is not self._attempt:
            return True
        last = max(member.attempt.rows.last_row(member.rank), member.attempt.first_row - 1)
        if point.row <= last + len(before) + 1:
            return True
        self._tell_once_recorded(
            f"Rank {member.rank} sent a report of row {point.row} after row {last + len(before)}, which no loop can "
            "make: it is not kept."
        )
        return False

    def _from_uploader(self, received: Received) -> None:
        if self._validations.heard(received):
            return
        if not self._carriers.is_uploader(received.sender):
            return
        for message in received.envelope.messages:
            if isinstance(message, Carried):
                self._checkpoints.carried(message)
            elif isinstance(message, CarryTrouble):
                self._checkpoints.trouble(message)

    def _points(self, member: Member, points: list[Point]) -> None:
        """Keep every point; those of the current attempt also move rows on."""
        if member.recovered:  # what was found after the rank's death may still arrive by the usual way
            points = [point for point in points if point.solo or point.row not in member.recovered]
        if not points:
            return
        number, rank = member.attempt.number, member.rank
        self._points_to_keep += [
            PointRecord(rank=rank, attempt=number, row=p.row, at=p.at, solo=p.solo, metrics=p.metrics)
            for p in points
        ]
        attempt = self._attempt
        if attempt is None or member.attempt is not attempt:
            return
        rows: list[Row] = []
        for point in points:
            if point.solo and rank == 0:
                self._last_solo, self._solo_originals = point.metrics, point.originals
            if point.solo or (member.exited and point.row <= attempt.rows.last_row(rank)):
                continue
            if rank == 0:
                self._last_metrics, self._originals = point.metrics, point.originals
            if point.barrier:
                attempt.barrier_rows.setdefault(point.row, set()).add(rank)
            rows += attempt.rows.add(rank, point)
        self._hangs.moved(rank, attempt.rows.last_row(rank))
        self._rows_closed(attempt, rows)
        self._watch_for_late_ranks(attempt)

    def _rows_closed(self, attempt: Attempt, rows: list[Row]) -> None:
        if rows and not attempt.first_row_seen:
            attempt.first_row_seen = True
            self._consider_resize()  # from here on it is known whether the loop can save when it is told to
        if rows:
            self._row_at = time.monotonic()
        for row in rows:
            if row.metrics:
                self._observer.row(row.number, row.metrics, time.time())
                if self._spec.callbacks and row.parts:
                    self._reports[(attempt.number, row.number)] = [m or {} for m in row.metrics]
                elif self._spec.callbacks:
                    self._callbacks.call("after_report", [m or {} for m in row.metrics], None)
                running = attempt.phase in (phases.TRAINING, phases.SHUTTING_DOWN)
                is_looked_at = self._stopping is None or self._spec.stop_sees_all
                if running and is_looked_at and row.metrics[0] is not None:
                    self._stop_if_reached(attempt, row, row.metrics[0])
            if row.parts:
                self._keep_points()  # whoever resumes from the checkpoint relies on them
                self._checkpoints.begin(attempt, row)
                self._watch_lag()
            if row.complete:
                stop = attempt.stops_at.pop(row.number, "")
                for rank in attempt.barrier_rows.pop(row.number, ()):
                    self._send(attempt.members[rank], RowClosed(row=row.number, stop=stop))
        if rows:
            self._asks.answer()
        self._steering.look_at_commits(attempt)

    def _watch_for_late_ranks(self, attempt: Attempt) -> None:
        if self._debugging.is_open:
            return
        if attempt.rows.newest <= attempt.rows.closed:
            self._deadlines.pop("late", None)
            self._deadlines.pop("absent", None)
            return
        now, awaited = time.monotonic(), (attempt.number, attempt.rows.closed + 1)
        if awaited != self._awaited:
            self._awaited, self._awaited_since = awaited, now
            self._deadlines["late"] = now + _LATE_EVERY + attempt.gather
        self._deadlines.setdefault("late", now + _LATE_EVERY + attempt.gather)
        # A global barrier waits for every rank, however long it takes to its first report.
        if attempt.rows.waits_for_first_reports and not self._spec.report_barrier:
            self._deadlines.setdefault("absent", now + _ABSENT_AFTER)

    def _say_who_is_late(self, _: str) -> None:
        attempt = self._attempt
        if attempt is None or not (behind := attempt.rows.behind()):
            return
        waited = time.monotonic() - self._awaited_since
        self._observer.waiting(attempt.rows.closed + 1, behind, waited)
        self._deadlines["late"] = time.monotonic() + _LATE_EVERY

    def _declare_absent(self, _: str) -> None:
        attempt = self._attempt
        if attempt is None or not (ranks := attempt.rows.never_reported()):
            return
        row = attempt.rows.closed + 1
        self._record(ev.RanksAbsent(time=time.time(), attempt=attempt.number, row=row, ranks=tuple(ranks)))
        self._rows_closed(attempt, attempt.rows.declare_absent(ranks))

    def _beat(self, member: Member, message: Beat) -> None:
        member.beat = message
        if message.steps:
            member.attempt.has_trained = True
        hold = member.attempt.hold
        if hold is not None and member.rank in hold.reached:
            self._hangs.moved(member.rank)  # it stands still because it was told to
        self._hangs.beat(member, message)
        self._watch()
        self._tell_data(member, message.data)

    def _tell_data(self, member: Member, text: str) -> None:
        """How far data have been read is the same on every rank, so rank 0's word will do."""
        if member.rank == 0 and text:
            self._observer.data(text)

    def _telemetry_came(self, member: Member, message: from_worker.Telemetry) -> None:
        self._telemetry.heard(member, message)

    def _arrived(self, member: Member, message: Arrived) -> None:
        member.attempt.arrive(member.rank, message)
        self._open_collectives(member.attempt)

    def _open_collectives(self, attempt: Attempt) -> None:
        for opened, members in attempt.settled_collectives():
            for member in members:
                self._send(member, opened)

    def _executed(self, member: Member, message: Executed) -> None:
        if member.attempt.group is not None:
            member.attempt.group.answered(member.rank, message)

    def _noted(self, member: Member, message: Noted) -> None:
        if message.once and message.message in self._shown_once:
            return
        if message.once:
            self._shown_once.add(message.message)
        self._warn(message.message, member.rank)

    def _ended(self, member: Member, message: Outcome) -> None:
        """A rank's function is over."""
        attempt = member.attempt
        if member.outcome is not None:
            return
        attempt.end(member, message)
        error = message.error
        is_timeout = error is not None and failures.is_collective_timeout(error)
        hung = self._hangs.behind_timeout(member) if is_timeout else []
        self._hangs.ended(member)
        self._tell_data(member, message.data)
        if error is not None:
            kind = "exit" if message.status == "exited" else "raised"
            self._fail(member, failures.raised(member, error, kind, is_echo=bool(hung)))
            self._hung(hung)
            return
        if member.rank == 0:
            self._value = message.value
        self._rows_closed(attempt, attempt.rows.end(member.rank))
        self._watch_for_late_ranks(attempt)
        self._open_collectives(attempt)
        self._steering.rank_ended(member)
        regroups = self._steering.regroup is not None
        if attempt.phase == phases.TRAINING and attempt.all_done():
            if regroups and any(m.was_stopped for m in attempt.members):
                self._clear(attempt, self._decide)
            else:
                self._shut_down(attempt)
        elif (self._stopping is not None or regroups) and all(
            attempt.rows.last_row(m.rank) == 0 for m in attempt.running()
        ):
            grace = self._spec.signal_grace if self._spec.runs_scripts else _LAGGARD_GRACE
            self._deadlines.setdefault("laggards", time.monotonic() + grace)

    # ------------------------------------------------------------------ checkpoints

    def _settled(self, pending: Pending, manifest: Manifest | None, reason: BaseException | str) -> None:
        """A reported checkpoint is committed, or never will be: say so to everybody it concerns."""
        value = None
        if manifest is not None:
            value = self._checkpoints.value(manifest)
            self._record(
                ev.Committed(
                    time=time.time(),
                    attempt=pending.attempt,
                    row=pending.row,
                    checkpoint=manifest.name,
                    bytes=manifest.bytes,
                    files=len(manifest.files),
                )
            )
            self._validate(manifest)
            self._look_at_space(manifest)
            self._discard_old()
            if self._steering.committed(time.monotonic() - pending.since):
                self._consider_resize()
        else:
            self._record(
                ev.CheckpointFailed(
                    time=time.time(),
                    attempt=pending.attempt,
                    row=pending.row,
                    checkpoint=pending.name,
                    reason=message_of(reason),
                    place=self._checkpoints.place_of(pending),
                )
            )
        self._tell_settled(pending, value.address if value is not None else "", message_of(reason))
        if (metrics := self._reports.pop(pending.key, None)) is not None:
            self._callbacks.call("after_report", metrics, value)
        if isinstance(reason, FencedError):
            self._taken_over(reason)
        self._watch_lag()
        self._asks.answer()
        if self._attempt is not None:
            self._steering.look_at_commits(self._attempt)
        self._go_on_if_settled()

    def _look_at_space(self, manifest: Manifest) -> None:
        """After the first checkpoint it is known what those to come will take."""
        path = self._storage.local_path("checkpoints")
        if path is None or self._looked_at_space:
            return
        self._looked_at_space = True
        with contextlib.suppress(OSError):
            kept = self._spec.checkpoints.num_to_keep
            remark = safety.space_remark(safety.free_bytes(path), manifest.bytes, kept)
            if remark:
                self._warn(remark)

    def _tell_settled(self, pending: Pending, path: str, error: str) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.number == pending.attempt:
            for rank in pending.parts:
                if not attempt.members[rank].exited:
                    self._send(attempt.members[rank], Settled(row=pending.row, path=path, error=error))

    def _tell_unstaged(self, pending: Pending, rank: int) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.number == pending.attempt and not attempt.members[rank].exited:
            self._send(attempt.members[rank], Unstaged(row=pending.row))

    def _discard_old(self) -> None:
        """Retention, but for what somebody may be reading: a rank that has not come to its first report, say."""
        attempt, pinned = self._attempt, set(self._validations.names)
        if attempt is not None and attempt.rows.silent():
            pinned |= {m.name for m in self._checkpoints.kept if m.row == attempt.first_row - 1}
        self._checkpoints.discard_old(pinned)

    def _share_carried(self, member: Member, message: Carried) -> None:
        self._checkpoints.carried(message)

    def _carry_trouble(self, member: Member, message: CarryTrouble) -> None:
        self._checkpoints.trouble(message)

    def _staging_full(self, member: Member, message: StagingFull) -> None:
        if self._spec.checkpoints.on_full == "replace":
            self._checkpoints.yield_to(message.row, member.rank)
        else:
            self._warn(
                f"The staging area of rank {member.rank} is full ({message.limit:,} bytes); report waits until the "
                "storage has taken an older checkpoint.",
                member.rank,
            )

    def _work_done(self, done: Done) -> None:
        done.then(done.result, done.error)

    def _work_troubled(self, trouble: Trouble) -> None:
        trouble.say(trouble.reason, trouble.place)

    def _watch_lag(self) -> None:
        pending = self._checkpoints.pending
        if not pending:
            self._deadlines.pop("lag", None)
            self._lag_told = 0.0
        else:
            self._deadlines["lag"] = pending[0].since + max(_LAG_AFTER, 2 * self._lag_told)

    def _say_lag(self, _: str) -> None:
        pending = self._checkpoints.pending
        if not pending:
            return
        self._lag_told = time.monotonic() - pending[0].since
        self._record(
            ev.UploadLagged(
                time=time.time(),
                attempt=pending[0].attempt,
                row=pending[0].row,
                seconds=round(self._lag_told, 1),
                waiting=len(pending),
                bytes=sum(checkpoint.bytes for checkpoint in pending),
                reason=next((p.trouble for p in pending if p.trouble), ""),
            )
        )
        self._watch_lag()

    def _asked_for_checkpoints(self, member: Member, ask: AskCheckpoints) -> None:
        self._asks.ask(member, ask)

    def _answer_asks(self, _: str) -> None:
        self._asks.answer()

    # ------------------------------------------------------------------ validations

    def _make_validations(self) -> Validations:
        """The run's validations, with those that an earlier start did not bring to an end."""
        validations = Validations(
            self._spec,
            self._engine,
            self._hub,
            post=self._inbox.put,
            over=self._validation_over,
            idle=self._validations_idle,
            remind=self._remind_of_validation,
            tell=self._warn,
        )
        if self._spec.validation is not None:
            for manifest in cut_off(self._checkpoints.kept, self._checkpoints.status):
                validations.ask(self._validation_of(manifest))
        return validations

    def _validate(self, manifest: Manifest) -> None:
        """Have a committed checkpoint validated, if that was asked for."""
        if asked_for(manifest) is not None and self._spec.validation is not None:
            self._checkpoints.validated(manifest.name, PENDING)
            self._validations.ask(self._validation_of(manifest))

    def _validation_of(self, manifest: Manifest) -> Task:
        config, asked = self._spec.validation, asked_for(manifest)
        assert config is not None
        assert asked is not None
        return task_of(config, asked, manifest, self._checkpoints.value(manifest))

    def _validation_over(self, task: Task, found: Validation) -> None:
        """Its metrics join the checkpoint, which may change what is worth keeping."""
        if self._fenced:
            return
        self._checkpoints.validated(task.checkpoint, found)
        self._record(
            ev.ValidationEnded(
                time=time.time(),
                checkpoint=task.checkpoint,
                row=task.row,
                status=found.status,
                metrics=found.metrics,
                reason=found.error,
                seconds=found.seconds,
            )
        )
        self._discard_old()
        self._asks.answer()

    def _remind_of_validation(self, when: float) -> None:
        self._deadlines.pop("validation", None)
        if when != float("inf"):
            self._deadlines["validation"] = when

    def _validation_overdue(self, _: str) -> None:
        self._validations.overdue()

    def _wait_for_validations(self, then: Callable[[], None]) -> bool:
        """Call ``then`` when all are over. False where there is none to wait for, or nobody who would."""
        if not self._validations.busy or self._fenced or self._is_hurried():
            return False
        self._after_validations = then
        self._slots.want_no_more()
        if self._validations.wants_slot:  # it may be one that the ranks had, who are gone
            self._slots.release()
        self._validations.training_over()
        return True

    def _validations_idle(self) -> None:
        if self._after_validations is not None:
            then, self._after_validations = self._after_validations, None
            then()

    def _cut_validations_short(self) -> None:
        if names := ", ".join(self._validations.names):
            self._warn(f"The validation of {names} was cut off. It is started again when the run is resumed.")
        self._validations.cut_short()

    # ------------------------------------------------------------------ what a dead rank had reported

    def _rank_is_gone(self, member: Member, event: base.Exited | None = None) -> None:
        """Nothing more comes from a rank: what it had reported counts, what it had to carry itself is lost."""
        self._recover_reports(member, event)
        self._telemetry.rank_is_gone(member, event)
        self._checkpoints.rank_ended(member.attempt.number, member.rank)
        self._checkpoints.will_never_come(
            self._carriers.rank_ended(member),
            f"rank {member.rank} ended while it carried its share to the storage",
        )

    def _recover_reports(self, member: Member, event: base.Exited | None) -> None:
        """Take into account the reports of a rank that had returned and whose messages did not arrive.

        They lie on the rank's node: on another machine than this the engine has looked, where there was one to ask."""
        attempt, rank = member.attempt, member.rank
        last = attempt.rows.last_row(rank)
        sealed = sealed_reports(launch.staging_root(self._spec), attempt.number, rank)
        if event is not None:
            sealed |= {point.row: point for point in event.reports}
        found = [point for row, point in sorted(sealed.items()) if row > max(last, attempt.first_row - 1)]
        if found:
            self._points(member, found)
            self._keep_points()
            member.recovered |= {point.row for point in found}
        marked = marked_row(launch.mark_path(self._spec, attempt.number, rank))
        marked = max(marked, event.row if event is not None else 0)
        attempt.has_trained |= marked > 0
        self._rows_closed(attempt, attempt.rows.reach(rank, marked))

    # ------------------------------------------------------------------ waiting for what is on its way

    @property
    def _patience(self) -> float:
        """Seconds for storage to take what is on its way when an attempt is over."""
        if self._cut_short:
            return _CUT_SHORT
        if self._notice is not None and self._notice.deadline:
            return min(_SETTLE_WITHIN, max(_CUT_SHORT, self._notice.deadline - time.time() - 1.0))
        return _SETTLE_WITHIN

    def _settle(self, then: Callable[[], None], within: float, *, goes_on: bool = False) -> None:
        """Go on once every reported checkpoint is committed or has failed, at the latest after ``within`` seconds.

        What is not taken by then stays where it is; but a run that ``goes_on`` comes to the same rows again.
        """
        self._after_settling, self._checkpoints.last_chance = then, not goes_on
        self._deadlines["settle"] = time.monotonic() + within
        self._go_on_if_settled()

    def _go_on_if_settled(self) -> None:
        if self._after_settling is not None and not self._checkpoints.pending:
            self._deadlines.pop("settle", None)
            then, self._after_settling = self._after_settling, None
            then()

    def _settling_overdue(self, _: str) -> None:
        """Storage has not taken what is on its way."""
        self._deadlines.pop("settle", None)
        for checkpoint in self._checkpoints.pending:
            why = f" ({checkpoint.trouble})" if checkpoint.trouble else ""
            if self._checkpoints.last_chance:
                self._checkpoints.leave(checkpoint, f"the storage did not take it in time{why}")
            else:
                self._checkpoints.fail(
                    checkpoint, f"the storage did not take it before the run was started again{why}"
                )

    @property
    def _cut_short(self) -> bool:
        """True when nobody wants to wait for storage any more."""
        return self._fenced or self.is_ending_at_once

    @property
    def is_ending_at_once(self) -> bool:
        """True when the run was asked twice to end, and the controller has taken note of it. Any thread."""
        return self._interrupts > 1 or self._signals > 1

    def _give_up_open_rows(self, attempt: Attempt) -> None:
        """Shares of rows that some rank never reached: there is no whole checkpoint in them."""
        for row, parts in sorted(attempt.rows.abandon().items()):
            for part in parts.values():
                if part.staged:
                    remove_share(part.staged)
            missing = [m.rank for m in attempt.members if attempt.rows.last_row(m.rank) < row]
            self._record(
                ev.CheckpointFailed(
                    time=time.time(),
                    attempt=attempt.number,
                    row=row,
                    checkpoint=next((p.checkpoint for p in parts.values() if p.checkpoint), ""),
                    reason=f"ranks {missing} never made that report",
                )
            )

    def _taken_over(self, error: BaseException) -> None:
        """Another controller has the run now: end, and commit nothing more."""
        if self._outcome is not None or self._fenced:
            return
        self._fenced = True
        for pending in self._checkpoints.pending:
            self._checkpoints.fail(pending, str(error))
        if self._attempt is None:
            self._end(lifecycle.FAILED, str(error))
        else:
            self._clear(self._attempt, lambda: self._end(lifecycle.FAILED, str(error)))

    def lost_the_lease(self, reason: str) -> None:
        """Another controller has taken the run. Any thread."""
        self._inbox.put(LeaseLost(reason))

    def _lease_lost(self, lost: LeaseLost) -> None:
        self._taken_over(FencedError(lost.reason))

    # ------------------------------------------------------------------ stopping early

    def _stop_if_reached(self, attempt: Attempt, row: Row, metrics: Mapping[str, Any]) -> None:
        try:
            reason = stopping.reason_to_stop(
                self._spec.stop,
                self._spec.name,
                row.number,
                metrics,
                time.monotonic() - self._began,
                bool(row.parts) if self._spec.stop_sees_all else None,
            )
        except EndedAtOnce:
            raise
        except BaseException as error:  # also SystemExit: only what it returns ends the run
            self._warn(f"RunConfig(stop=...) raised {describe_error(error)}. The run goes on.")
            return
        if not reason or self._stopping is not None:
            return
        if isinstance(reason, stopping.StopHere) and self._can_stop_at(attempt, row, reason):
            attempt.stops_at[row.number] = str(reason)
            self._begin_to_stop("criterion", str(reason))
        else:
            self._stop("criterion", str(reason))

    def _can_stop_at(self, attempt: Attempt, row: Row, reason: stopping.StopHere) -> bool:
        """Whether every rank waits at this row, and what the reason needs of it is there."""
        waiting = attempt.barrier_rows.get(row.number, set())
        is_saved = reason.is_final or bool(row.parts)
        running = {member.rank for member in attempt.running()}
        return row.complete and is_saved and attempt.phase == phases.TRAINING and running <= waiting

    def _ended_early(self, end: _EndEarly) -> None:
        self._stop("criterion", end.reason)

    def _interrupted(self, _: Interrupt) -> None:
        self._interrupts += 1
        if self._after_validations is not None:  # the training is over: only the ending is cut short
            self._cut_validations_short()
        elif self._after_settling is not None and self._ends_well():
            self._interrupted_while_settling()
        elif self._interrupts == 1:
            self._stop("interrupt", "interrupted; a second Ctrl-C ends it at once")
            if self._stopping is not None:
                self._deadlines["grace"] = time.monotonic() + _INTERRUPT_GRACE
        elif self._stopping is not None:
            self._end_now("")
        elif self._attempt is not None:  # every function has returned: only the ending is cut short
            self._clear(self._attempt, self._finish)

    def _ends_well(self) -> bool:
        """True when every function has returned and only the ending is left."""
        attempt = self._attempt
        return attempt is not None and attempt.phase in (phases.SHUTTING_DOWN, phases.DISMISSED)

    def _interrupted_while_settling(self) -> None:
        """The training is over; what is interrupted is the wait for storage."""
        if self._interrupts == 1:
            waiting = len(self._checkpoints.pending)
            self._warn(
                f"Training is over; {waiting} checkpoint(s) are still on their way to the storage. A second Ctrl-C "
                "leaves them where they are."
            )
        else:
            self._left_by_interrupt = True
            self._settling_overdue("")

    def _stop(self, cause: str, reason: str) -> None:
        """Ask every rank to end at a boundary they agree on; a run that is not training yet ends at once."""
        attempt = self._attempt
        if self._stopping is not None or self._ends_well():
            return
        self._begin_to_stop(cause, reason)
        if attempt is None or attempt.phase in (phases.STARTING, phases.CLEARING):
            self._end_now("")
            return
        self._steering.stop(attempt, reason, self._preemption(attempt))

    def _begin_to_stop(self, cause: str, reason: str) -> None:
        self._stopping = ev.Stopping(
            time=time.time(), attempt=max(0, self._state.attempt), cause=cause, reason=reason
        )
        self._record(self._stopping)
        if cause != "criterion":
            self._debugging.end("the run is stopping")
        self._steering.take()  # with how many the run would have gone on does not matter any more
        self._deadlines.pop("retry", None)

    def _preemption(self, attempt: Attempt) -> Preemption | None:
        """What ranks are told of the notice that has come, if any."""
        return (
            preemption.preemption_of(self._notice, attempt.placements) if self._notice is not None else None
        )

    def _held(self, member: Member, message: Held) -> None:
        self._steering.held(member, message)

    def _reached(self, member: Member, message: Reached) -> None:
        self._steering.reached(member, message)

    def _end_now(self, _: str) -> None:
        """End what still runs, whatever it does, and the run with it; or go on with those who may stay."""
        for name in ("grace", "laggards"):
            self._deadlines.pop(name, None)
        if self._attempt is None:
            self._end(*self._stopped_state())
        elif self._stopping is None and self._steering.regroup is not None:
            self._clear(self._attempt, self._decide)
        else:
            self._clear(self._attempt, lambda: self._end(*self._stopped_state()))

    def _stopped_state(self) -> tuple[str, str]:
        stop = self._stopping
        if stop is None:
            return lifecycle.STOPPED, "it was asked to end"
        reason = stop.reason.partition(";")[0]
        if stop.cause == "notice":
            return lifecycle.PREEMPTED, reason
        trained = self._attempt is not None and stop.cause == "criterion"
        return (lifecycle.FINISHED if trained else lifecycle.STOPPED), reason

    # ------------------------------------------------------------------ notices

    def _driver_noticed(self, noticed: Noticed) -> None:
        now = time.monotonic()
        if now - self._signalled_at > SAME_NOTICE:
            self._signalled_at = now
            self._signals += 1
            self._take_notice(Notice(noticed.reason, time.time() + self._spec.signal_grace), self._signals)

    def _rank_noticed(self, member: Member, message: from_worker.Noticed) -> None:
        """A rank's process was asked to end. Where its engine starts none again, that means the whole run."""
        slots = frozenset({member.placement.slot.id}) if self._engine.restarts else frozenset[str]()
        reason = f"rank {member.rank} was asked to end by {message.signal}"
        self._take_notice(Notice(reason, time.time() + self._spec.signal_grace, slots), message.times)

    def _draining(self, event: base.Drain) -> None:
        """A slot will be taken away."""
        reason = f"{event.slot.host} will be taken away: {event.reason}"
        deadline = event.deadline or time.time() + self._spec.signal_grace
        self._take_notice(Notice(reason, deadline, frozenset({event.slot.id})), 1)

    def _take_notice(self, notice: Notice, times: int) -> None:
        """Save and end at the next boundary, or go on with who may stay; told for the second time, end at once."""
        attempt = self._attempt
        ranks = [p.rank for p in attempt.placements if p.slot.id in notice.slots] if attempt else []
        self._record(
            ev.Notified(
                time=time.time(),
                attempt=max(0, self._state.attempt),
                ranks=tuple(ranks),
                reason=notice.reason,
                deadline=notice.deadline,
            )
        )
        self._notice = preemption.merged(self._notice, notice)
        self._noticed_slots |= notice.slots
        self._is_to_leave |= not notice.slots
        if self._after_validations is not None or self._ends_well() or self._is_decided:
            self._hurry(times)
        elif times > 1:
            self._end_at_once(notice)
        elif self._stopping is None:
            self._save_and_leave(notice)

    def _hurry(self, times: int) -> None:
        """How the run ends is settled already: only what is left of the ending is cut short."""
        if self._after_validations is not None:
            self._cut_validations_short()
        elif self._after_settling is not None and times > 1:
            self._settling_overdue("")
        elif "settle" in self._deadlines:
            until = time.monotonic() + self._patience
            self._deadlines["settle"] = min(until, self._deadlines["settle"])

    def _end_at_once(self, notice: Notice) -> None:
        """Told for the second time. Where the others may go on without the rank that was told, only its part ends."""
        regroups = self._steering.regroup is not None and self._steering.regroup.cause == "notice"
        if self._stopping is None and not (notice.slots and regroups):
            self._signals = max(self._signals, 2)
            self._stop("notice", f"{notice.reason}; asked for the second time")
        if self._outcome is None and self._attempt is not None:
            self._end_now("")

    def _grace_over(self, _: str) -> None:
        """The ranks did not come to a boundary in time."""
        if self._is_hurried() and self._attempt is not None and not self._engine.restarts:
            for member in self._attempt.running():
                self._engine.signal(member.placement.slot, signal.SIGTERM)
        self._end_now("")

    def _save_and_leave(self, notice: Notice) -> None:
        """Bring the ranks to a boundary; who is left goes on from there, if that is enough."""
        before = self._steering.regroup
        workers = preemption.workers_after(
            notice,
            before.workers if before is not None and before.cause == "notice" else self._slots.wanted,
            self._spec.min_workers,
            self._spec.max_workers,
            restarts=self._engine.restarts,
            replaces=self._engine.replaces,
        )
        if self._attempt is not None and self._attempt.phase in (phases.STARTING, phases.TRAINING):
            self._deadlines["grace"] = time.monotonic() + preemption.boundary_within(notice, time.time())
        if workers:
            self._leave_behind(notice, workers)
        else:
            self._stop("notice", f"{notice.reason}; the run can be resumed")

    def _leave_behind(self, notice: Notice, workers: int) -> None:
        """Go on without the slots that the notice came for."""
        attempt, before = self._attempt, self._steering.regroup
        drop = notice.slots | (before.drop if before is not None else frozenset())
        ranks = tuple(p.rank for p in attempt.placements if p.slot.id in drop) if attempt else ()
        self._steering.regroup = Regroup("notice", notice.reason, workers, drop, ranks)
        if not self._engine.replaces:
            self._elastic.set_limit(workers, notice.reason, time.monotonic())
        if attempt is None:
            self._retry()
        elif attempt.phase == phases.STARTING:
            self._clear(attempt, self._decide)
        elif attempt.phase == phases.TRAINING:
            self._steering.stop(attempt, notice.reason, self._preemption(attempt))

    # ------------------------------------------------------------------ another number of workers

    def _consider_resize(self) -> None:
        self._steering.consider(self._attempt, is_free=self._stopping is None)

    def _resize_due(self, _: str) -> None:
        self._steering.resize(self._attempt, is_free=self._stopping is None)

    def _not_together(self, _: str) -> None:
        self._steering.not_together(self._attempt)

    # ------------------------------------------------------------------ visitors

    def _asked(self, asked: status.Asked) -> None:
        _QUESTIONS[type(asked.question)](self, asked.question, asked.visitor)

    def _asked_to_resize(self, question: protocol.Resize, visitor: protocol.Visitor) -> None:
        """To go on with another number of workers: what will come of it, or why nothing does."""
        name, lowest, highest = self._spec.name, self._spec.min_workers, self._spec.max_workers
        if not self._elastic.is_elastic or not self._engine.restarts:
            visitor.answer(
                f"The run {name!r} has a fixed number of workers. Start it with "
                "ScalingConfig(num_workers=(min, max)) to be able to change it.",
                False,
            )
        elif not lowest <= question.workers <= highest:
            visitor.answer(f"The run {name!r} trains with {lowest} to {highest} workers.", False)
        elif self._stopping is not None or self._ends_well():
            visitor.answer(f"The run {name!r} is ending.", False)
        else:
            reason = f"{in_words(question.workers)} {'was' if question.workers == 1 else 'were'} asked for"
            self._elastic.set_limit(question.workers, reason, time.monotonic())
            self._slots.watch()
            self._consider_resize()
            size = self._attempt.world_size if self._attempt is not None else self._slots.wanted
            visitor.answer(self._elastic.prospect(question.workers, size))

    def _asked_to_stop(self, question: protocol.Stop, visitor: protocol.Visitor) -> None:
        """End as Ctrl-C does, but without its hurry; with ``now`` as the second Ctrl-C does."""
        over = self._after_validations is not None or self._ends_well() or self._is_decided
        can_end = self._engine.name not in ("inline", "torchrun")
        visitor.answer(
            status.stop_prospect(
                self._state, self._attempt, question, ends_in_place=over, can_be_ended=can_end
            )
        )
        if question.now and (over or can_end):
            self._interrupts = max(self._interrupts, 2)
        if over:
            self._hurry(2 if question.now else 1)
            return
        self._stop("asked", status.stop_reason(question.by))
        if not can_end or self._outcome is not None:
            return
        if question.now:
            self._end_now("")
        elif question.within:
            until = time.monotonic() + question.within
            self._deadlines["grace"] = min(until, self._deadlines.get("grace", until))

    def _asked_to_look(self, question: protocol.LookAround, visitor: protocol.Visitor) -> None:
        attempt = self._attempt
        if attempt is None or attempt.phase in (phases.DISMISSED, phases.CLEARING):
            visitor.answer(f"The run {self._spec.name!r} has no ranks now: it is {self._state.state}.", False)
            return
        visitor.tell(self._description())
        self._inspections.begin(attempt, question.ranks, visitor)
        self._watch_visits()

    def _asked_to_describe(self, question: protocol.Describe, visitor: protocol.Visitor) -> None:
        visitor.tell(self._description())
        visitor.answer("")

    def _description(self) -> protocol.Description:
        now, row_at = time.monotonic(), self._row_at
        return status.describe(
            self._state,
            self._attempt,
            self._checkpoints.pending,
            row_age=now - row_at if row_at else -1.0,
            now=now,
        )

    def _watch_visits(self) -> None:
        self._deadlines.pop("visits", None)
        if (due := self._inspections.due()) != float("inf"):
            self._deadlines["visits"] = due

    def _visits_due(self, _: str) -> None:
        self._inspections.look(time.monotonic())
        self._watch_visits()

    def _rank_seen(self, seen: SeenFromOutside) -> None:
        self._inspections.seen(seen)
        self._watch_visits()

    # ------------------------------------------------------------------ hangs

    def _watch(self) -> None:
        """Look again when the watchdog says so."""
        due = self._hangs.due()
        if due is None or due == float("inf"):
            self._deadlines.pop("watch", None)
        else:
            self._deadlines["watch"] = due

    def _watch_due(self, _: str) -> None:
        for found in self._hangs.look(time.monotonic()):
            if isinstance(found, (ev.HangNoticed, ev.HangOver)):
                self._record(found)
            else:
                self._hung(found)
        self._watch()

    def _connection_ended(self, parted: Parted) -> None:
        """A rank's link connects again by itself; if its process has ended, the engine says so."""
        if (member := self._members.get(parted.key)) is not None:
            self._hangs.parted(member)
            self._watch()

    def _stacks_came(self, member: Member, message: Stacks) -> None:
        self._hangs.answered(member, message)
        self._watch()
        self._inspections.answered(member, message)
        self._watch_visits()

    def _looked(self, looked: Looked) -> None:
        self._hangs.looked(looked)
        self._watch()

    def _hung(self, hung: list[ev.WorkerFailure]) -> None:
        """A rank hangs for too long: that is a failure of it."""
        attempt = self._attempt
        if attempt is None or attempt.phase != phases.TRAINING or self._engine.name == "inline":
            return
        for failure in hung:
            self._fail(attempt.members[failure.rank], failure)

    # ------------------------------------------------------------------ debuggers

    def _make_debugging(self) -> Debugging:
        return Debugging(
            self._engine.name,
            self._observer,
            send=self._send,
            post=self._inbox.put,
            tell_once=self._tell_once_recorded,
            begun=self._pause,
            over=self._go_on_after_debugging,
        )

    def _debugger_says(self, member: Member, message: FromWorker) -> None:
        if isinstance(message, DebugOpened):
            self._hangs.debugger_opened(member)
        self._debugging.heard(member, message)
        self._watch_debuggers()

    def _debugger_answered(self, typed: Typed) -> None:
        self._debugging.typed(typed)
        self._watch_debuggers()

    def _watch_debuggers(self) -> None:
        self._deadlines.pop("turn", None)
        if self._debugging.due != float("inf"):
            self._deadlines["turn"] = self._debugging.due

    def _turn_over(self, _: str) -> None:
        self._debugging.share()
        self._watch_debuggers()

    def _quit(self, member: Member, message: DebugQuit) -> None:
        """The user has quit a debugger: nobody is to wait for that rank any more."""
        self._stop("quit", f"rank {member.rank} was quit in its debugger at {place_of(message.frame)}")
        if self._outcome is None and member.attempt.phase == phases.TRAINING:
            self._end_now("")

    def _pause(self) -> None:
        """A debugger holds a rank: the others wait for it, and nobody is to blame."""
        now = time.monotonic()
        self._paused = {n: self._deadlines.pop(n) - now for n in _PAUSED if n in self._deadlines}

    def _go_on_after_debugging(self, seconds: float) -> None:
        now = time.monotonic()
        self._awaited_since += seconds
        for name, left in self._paused.items():
            self._deadlines.setdefault(name, now + left)
        self._paused = {}
        if self._attempt is not None and self._attempt.phase == phases.TRAINING:
            self._watch_for_late_ranks(self._attempt)
            self._act_on_failures(self._attempt)

    # ------------------------------------------------------------------ the good end

    def _shut_down(self, attempt: Attempt) -> None:
        attempt.phase = phases.SHUTTING_DOWN
        for name in ("grace", "laggards", "watch", "resize", "together"):
            self._deadlines.pop(name, None)
        for over in self._hangs.all_ended():
            self._record(over)
        self._hangs.forget()
        self._deadlines["hooks"] = time.monotonic() + _HOOK_GRACE
        self._run_hooks(attempt, "shutdown")

    def _hooks_overdue(self, _: str) -> None:
        if self._attempt is not None and self._attempt.phase == phases.SHUTTING_DOWN:
            self._warn(f"The backend's shutdown took more than {_HOOK_GRACE:g} s and was left.")
            self._dismiss(self._attempt)

    def _dismiss(self, attempt: Attempt) -> None:
        self._deadlines.pop("hooks", None)
        if attempt.failures:
            self._clear(attempt, self._decide)
        else:
            # Ranks that carry their own shares must live until those are out.
            self._settle(lambda: self._let_go(attempt), self._spec.sync_timeout)

    def _let_go(self, attempt: Attempt) -> None:
        attempt.phase = phases.DISMISSED
        self._deadlines["exits"] = time.monotonic() + _EXIT_GRACE
        for member in attempt.members:
            self._send(member, Dismissed(summary=self._summary()))
        self._exits_changed(attempt)

    def _exits_overdue(self, _: str) -> None:
        if self._attempt is not None and self._attempt.phase == phases.DISMISSED:
            slow = [m.rank for m in self._attempt.members if not m.exited]
            self._warn(f"Ranks {slow} did not leave within {_EXIT_GRACE:g} s of their end and were killed.")
            self._clear(self._attempt, self._finish)

    def _finish(self) -> None:
        if self._stopping is not None:
            self._end(*self._stopped_state())
        else:
            self._end(lifecycle.FINISHED, "every rank's function returned")

    def _summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {"metrics": self._metrics_at_end(), "rows": self._rows()}
        if self._state.lost_last is not None:
            summary["unsaved"] = error_text(self._state.unsaved, self._state.newest_commit[1])
        if self._stopping is not None and self._stopping.cause == "notice":
            summary["preempted"] = self._stopping.reason
        elif self._stopping is not None and self._stopping.cause == "asked":
            summary["stopped"] = self._stopping.reason
        return summary

    def _metrics_at_end(self) -> dict[str, Any] | None:
        """Rank 0's last report; one outside rows only where there is no other."""
        return self._last_metrics if self._last_metrics is not None else self._last_solo

    def _rows(self) -> int:
        return self._attempt.rows.closed if self._attempt is not None else 0

    def _end(self, state: str, reason: str) -> None:
        if self._wait_for_validations(lambda: self._end(state, reason)):
            return
        if state == lifecycle.FAILED:
            self._value = b""  # rank 0 may have been through when another rank failed
        self._checkpoints.check_scores()
        self._record_end(state, reason)
        self._outcome = RunOutcome(
            state,
            reason,
            self._metrics_at_end(),
            self._value,
            self._failures,
            self._was_interrupted() or self._left_by_interrupt,
            tuple(self._checkpoints.left),
            self._is_to_leave,
            self._state,
            self._originals if self._last_metrics is not None else self._solo_originals,
        )

    def _record_end(self, state: str, reason: str) -> None:
        self._startup.over()
        self._record(
            ev.Ended(
                time=time.time(),
                state=state,
                reason=reason,
                rows=self._rows(),
                seconds=round(time.monotonic() - self._began, 3),
                returned=len(self._value),
            )
        )

    def _record_forced_end(self) -> None:
        """Record that the run ended where it was stuck. No callback is called: one of them may be what hangs."""
        self._callbacks.close()
        reason = "it was asked twice to end, and was stuck"
        if self._stopping is None:
            with contextlib.suppress(Exception):
                attempt = max(0, self._state.attempt)
                self._record(ev.Stopping(time=time.time(), attempt=attempt, cause="interrupt", reason=reason))
        self._record_broken_end(lifecycle.STOPPED, reason)

    def _record_broken_end(self, state: str, reason: str) -> None:
        """Record the end by an error that the caller will see: what fails here must not hide it."""
        self._value = b""
        with contextlib.suppress(Exception):
            self._record_end(state, reason)

    def _was_interrupted(self) -> bool:
        return self._stopping is not None and self._stopping.cause == "interrupt"

    def _is_hurried(self) -> bool:
        """True when somebody waits for this process to end."""
        return self._stopping is not None and self._stopping.cause in ("interrupt", "notice", "asked")

    # ------------------------------------------------------------------ failures and losses

    def _exited(self, event: base.Exited) -> None:
        if self._attendant_ended(event):
            return
        attempt = self._attempt
        member = attempt.by_slot(event.slot.id) if attempt is not None else None
        if attempt is None or member is None or member.exited:
            return
        member.exited = True
        self._debugging.gone(member)
        self._rank_is_gone(member, event)
        if attempt.group is not None:
            attempt.group.gone(member.rank, "has ended")
        expected = attempt.phase in (phases.DISMISSED, phases.CLEARING)
        if expected or member.outcome is not None:
            self._exits_changed(attempt)
        elif event.code == 0 and self._spec.runs_scripts and attempt.phase == phases.TRAINING:
            self._ended(member, Outcome(status="returned"))  # by os._exit(0)
        elif event.code < 0 and member.placement.slot.id in self._noticed_slots:
            self._lost(member, f"rank {member.rank} was ended after it had been asked to end")
        else:
            self._fail(member, failures.died(member, event, self._hub.endpoint))

    def _attendant_ended(self, event: base.Exited | base.SlotLost) -> bool:
        """True when it was a process beside the ranks; an uploader is replaced."""
        return self._validations.ended(event) or self._carriers.uploader_ended(
            event.slot,
            lambda share: self._checkpoints.will_never_come(
                [share], "the uploader of its node died again and again; its log may say why"
            ),
        )

    def _slot_lost(self, event: base.SlotLost) -> None:
        if self._attendant_ended(event):
            return
        attempt = self._attempt
        lost = self._slots.lose(event.slot)
        if attempt is None:
            if lost:
                self._lost_before_start(event)
            return
        member = attempt.by_slot(event.slot.id)
        if member is None or member.exited:
            return
        member.exited = True
        self._debugging.gone(member)
        self._rank_is_gone(member)
        if attempt.group is not None:
            attempt.group.gone(member.rank, "has lost its slot")
        self._lost(member, event.reason)

    def _lost(self, member: Member, reason: str) -> None:
        """The rank is gone, and not by a fault of its own."""
        attempt = member.attempt
        attempt.losses.append((member.rank, reason))
        if attempt.phase in (phases.STARTING, phases.TRAINING) and member.outcome is None:
            self._clear(attempt, self._decide)
        else:
            self._exits_changed(attempt)

    def _lost_before_start(self, event: base.SlotLost) -> None:
        """A slot went while others were still awaited: give the rest back and ask anew."""
        decision = self._record_loss(max(0, self._state.attempt), (), event.reason)
        if self._stopping is not None:
            self._end(*self._stopped_state())
        elif decision.retry:
            self._retry()
        else:
            self._end(lifecycle.FAILED, decision.reason)

    def _fail(self, member: Member, failure: ev.WorkerFailure) -> None:
        """Note a failure; act at once when its cause is known, otherwise give the cause a moment to arrive."""
        attempt = member.attempt
        if member.failure is None:
            member.failure = failure
            attempt.failures.append(failure)
        if attempt.phase == phases.CLEARING:
            self._exits_changed(attempt)
        else:
            self._act_on_failures(attempt)

    def _act_on_failures(self, attempt: Attempt) -> None:
        """Not while somebody looks into a rank: what he looks at would be gone."""
        if not attempt.failures or self._debugging.is_open:
            return
        if failure_policy.cause_is_known(attempt.failures):
            self._end_failed(attempt)
        elif "cause" not in self._deadlines:
            attempt.failing_since = time.monotonic()
            self._deadlines["cause"] = attempt.failing_since + _CAUSE_WITHIN

    def _cause_overdue(self, _: str) -> None:
        attempt = self._attempt
        if attempt is None or not attempt.failures or self._debugging.is_open:
            return
        if self._engine.is_in_doubt(attempt.failing_since):  # who is gone is about to be told as lost
            self._deadlines["cause"] = time.monotonic() + _CAUSE_WITHIN / 2
        else:
            self._end_failed(attempt)

    def _end_failed(self, attempt: Attempt) -> None:
        """End a failed attempt. A lone rank that has raised is stuck with nobody, and inline its process lives on:
        the backend takes down there what it set up."""
        if (
            attempt.world_size == 1
            and attempt.phase == phases.TRAINING
            and attempt.members[0].outcome is not None
        ):
            self._shut_down(attempt)
        else:
            self._clear(attempt, self._decide)

    def _clear(self, attempt: Attempt, then: Callable[[], None]) -> None:
        """End every process of the attempt; ``then`` is called when all are gone.

        Ranks that carry their own shares of checkpoints first get the time to do so.
        """
        self._startup.over()
        if self._carriers.ranks_carry and not self._cut_short:
            self._settle(lambda: self._end_processes(attempt, then), _SETTLE_WITHIN)
        else:
            self._end_processes(attempt, then)

    def _end_processes(self, attempt: Attempt, then: Callable[[], None]) -> None:
        self._after_clearing = then
        attempt.phase = phases.CLEARING  # first, so that what waits for debuggers to be left is not acted on
        self._debugging.forget("the ranks are being ended")
        for name in (
            "start", "cause", "late", "absent", "hooks", "exits", "watch", "resize", "together", "laggards", "grace",
            "retry",
        ):  # fmt: skip
            self._deadlines.pop(name, None)
        self._hangs.forget()
        summary = self._summary()
        if attempt.failures:
            summary["failed"] = failure_policy.order_by_cause(attempt.failures)[0].summary
        for member in attempt.members:
            if not member.exited:
                self._send(member, Dismissed(summary=summary))
                self._engine.signal(member.placement.slot, signal.SIGKILL)
        within = _CUT_SHORT_KILL_TIMEOUT_S if self.is_ending_at_once else _KILL_TIMEOUT_S
        self._deadlines["killed"] = time.monotonic() + within
        self._deadlines.pop("abandoned", None)
        self._exits_changed(attempt)

    def _kill_overdue(self, _: str) -> None:
        """Killed processes are not reported as gone: the one that they were forked from may hang. The engine takes the
        second SIGKILL for that."""
        for member in self._left_to_clear():
            self._engine.signal(member.placement.slot, signal.SIGKILL)
            self._deadlines["abandoned"] = time.monotonic() + _ABANDON_TIMEOUT_S

    def _abandon_processes(self, _: str) -> None:
        """Go on without processes that no signal ends, such as those that hang in the kernel or on a lost node."""
        if left := self._left_to_clear():
            ranks = [member.rank for member in left]
            self._warn(f"Ranks {ranks} were killed and did not end; the run no longer waits for them.")
            for member in left:
                self._slot_lost(
                    base.SlotLost(member.placement.slot, "its process did not end when it was killed")
                )

    def _left_to_clear(self) -> list[Member]:
        attempt = self._attempt
        if attempt is None or attempt.phase != phases.CLEARING:
            return []
        return [member for member in attempt.members if not member.exited]

    def _exits_changed(self, attempt: Attempt) -> None:
        """Go on once all processes are gone; where somebody else ends them, without waiting for it."""
        gone = attempt.all_exited() or (attempt.phase == phases.CLEARING and not self._engine.restarts)
        if not gone:
            return
        for name in ("killed", "abandoned"):
            self._deadlines.pop(name, None)
        if attempt.phase == phases.DISMISSED:
            self._deadlines.pop("exits", None)
            attempt.phase = phases.CLEARING
            self._finish()
        elif attempt.phase == phases.CLEARING and self._after_clearing is not None:
            then, self._after_clearing = self._after_clearing, None
            self._give_up_open_rows(attempt)
            if then == self._decide:  # which knows whether the run goes on
                then()
            else:
                self._settle(then, self._patience)

    def _decide(self) -> None:
        """All processes of a failed attempt are gone: try again or give up."""
        self._startup.over()
        attempt = self._attempt
        assert attempt is not None
        regroup = self._steering.regroup
        self._early_deaths = 0 if attempt.has_trained else self._early_deaths + 1
        if attempt.losses and not failure_policy.cause_is_known(attempt.failures):
            attempt.failures.clear()  # they only echo what was lost
        if attempt.failures:
            decision = self._after_failure(attempt)
        elif attempt.losses or (regroup is not None and regroup.cause == "notice"):
            decision = self._after_loss(attempt, regroup)
        else:
            decision = failure_policy.Decision("retry", "the ranks were brought to a boundary for it")
        if attempt.group is not None and not attempt.shut_down:
            # Its workers are gone: what is left is the driver's own part.
            self._run_hooks(attempt, "shutdown")
        if decision.retry and self._stopping is None:
            self._settle(lambda: self._retry_in(decision.delay), self._patience, goes_on=True)
            return
        self._is_decided = True
        if not attempt.failures and self._stopping is None and regroup is not None:
            self._settle(lambda: self._end(lifecycle.PREEMPTED, decision.reason), self._patience)
        elif not self._is_excused(attempt) and (attempt.failures or self._stopping is None):
            self._settle(lambda: self._end(lifecycle.FAILED, decision.reason), self._patience)
        else:
            self._settle(lambda: self._end(*self._stopped_state()), self._patience)

    def _is_excused(self, attempt: Attempt) -> bool:
        """True when the end that was asked for counts, whatever became of ranks on the way: one may be killed."""
        if self._stopping is None or self._stopping.cause not in ("interrupt", "notice"):
            return False
        return self._was_interrupted() or all(failures.may_follow_a_notice(f) for f in attempt.failures)

    def _after_failure(self, attempt: Attempt) -> failure_policy.Decision:
        self._failures = tuple(failure_policy.order_by_cause(attempt.failures))
        decision = failure_policy.after_failure(
            self._state.failures, self._spec.max_failures, self._spec.fail_fast, self._early_deaths
        )
        if self._spec.on_hang == "fail" and any(failure.kind == "hung" for failure in self._failures):
            decision = failure_policy.Decision(
                "give_up", 'FailureConfig(on_hang="fail") ends a run that hangs'
            )
        if not self._engine.restarts:
            decision = _LAUNCHER_DECIDES
        self._record(
            ev.Failed(
                time=time.time(),
                attempt=attempt.number,
                failures=self._failures,
                decision=decision.action,
                reason=decision.reason,
                delay=decision.delay,
            )
        )
        self._callbacks.call("after_exception", exceptions_of(self._failures))
        return decision

    def _after_loss(self, attempt: Attempt, regroup: Regroup | None) -> failure_policy.Decision:
        """Slots were lost, or given up before that because a notice had come for them."""
        if attempt.losses:
            ranks = tuple(rank for rank, _ in attempt.losses)
            lost = {attempt.placements[rank].slot.id for rank in ranks}
            return self._record_loss(
                attempt.number, ranks, attempt.losses[0][1], preempted=bool(lost & self._noticed_slots)
            )
        assert regroup is not None
        return self._record_loss(attempt.number, regroup.ranks, regroup.reason, preempted=True)

    def _record_loss(
        self, attempt: int, ranks: tuple[int, ...], why: str, *, preempted: bool = False
    ) -> failure_policy.Decision:
        decision = failure_policy.after_loss(
            self._state.losses_since_commit,
            preempted=preempted,
            preemptions_before=self._state.preemptions,
            max_preemptions=self._spec.max_preemptions,
        )
        if not self._engine.restarts:
            decision = _LAUNCHER_DECIDES
        self._record(
            ev.Lost(
                time=time.time(),
                attempt=attempt,
                ranks=ranks,
                decision=decision.action,
                reason=f"{why}: {decision.reason}",
                preempted=preempted,
            )
        )
        return decision

    def _retry_in(self, delay: float) -> None:
        if delay > 0:
            self._deadlines["retry"] = time.monotonic() + delay
        else:
            self._retry()

    def _retry(self, _: str = "") -> None:
        """Start again from the newest commit: on the slots that are left, or on new ones where some are gone."""
        attempt, regroup, newest = self._attempt, self._steering.take(), self._checkpoints.newest
        self._startup.slots_asked()
        self._attempt = self._notice = None
        self._deadlines.pop("grace", None)
        self._last_metrics = dict(newest.metrics) if newest is not None else None
        self._originals = {}
        self._value = b""
        if regroup is not None:
            self._slots.drop(regroup.drop)
        if not (self._elastic.is_elastic and self._slots.held):
            self._slots.again()
            return
        workers = max(len(self._slots.held), self._spec.min_workers)
        reason = attempt.losses[0][1] if attempt is not None and attempt.losses else ""
        if regroup is not None:
            workers, reason = regroup.workers, regroup.reason
        if workers != self._state.world_size or (regroup is not None and regroup.cause == "resize"):
            self._record(
                ev.Resized(time=time.time(), attempt=self._state.attempt, world_size=workers, reason=reason)
            )
        self._slots.change_to(workers)

    # ------------------------------------------------------------------ output

    def _output(self, slot: base.Slot, data: bytes) -> None:
        """A piece of a process's output; that of processes beside the ranks is in their logs. Engine's thread."""
        rank = self._ranks_by_slot.get(slot.id)
        if rank is not None and not self._debugging.printed(rank, data):
            self._observer.output(rank, data)

    def _wire_problem(self, message: Noted) -> None:
        self._warn(message.message)

    def _message_refused(self, refused: _Refused) -> None:
        """Fail a rank whose messages cannot be read: it would wait for an answer for ever."""
        member = self._members.get(refused.sender)
        if (
            member is None
            or member.attempt is not self._attempt
            or member.exited
            or member.outcome is not None
        ):
            self._warn(refused.problem)
            return
        self._send(
            member, Refused(reason=refused.problem)
        )  # a process that is not ours to end ends by itself
        report = ErrorReport(type=WireError.__name__, message=refused.problem, traceback="")
        self._fail(member, failures.raised(member, report, "raised"))


_HANDLERS: dict[Any, Callable[[Controller, Any], None]] = {
    Parted: Controller._connection_ended,
    _Refused: Controller._message_refused,
    Noted: Controller._wire_problem,
    base.Granted: Controller._granted,
    base.Waiting: Controller._slots_waited,
    base.Refused: Controller._slots_refused,
    base.Started: Controller._started,
    base.Exited: Controller._exited,
    base.SlotLost: Controller._slot_lost,
    base.Drain: Controller._draining,
    base.Capacity: Controller._capacity_changed,
    base.Remark: lambda controller, remark: controller._warn(remark.text),
    Interrupt: Controller._interrupted,
    _EndEarly: Controller._ended_early,
    Noticed: Controller._driver_noticed,
    status.Asked: Controller._asked,
    SeenFromOutside: Controller._rank_seen,
    Looked: Controller._looked,
    Said: Controller._said,
    LeaseLost: Controller._lease_lost,
    Done: Controller._work_done,
    Trouble: Controller._work_troubled,
    Carried: lambda controller, carried: controller._checkpoints.carried(carried),
    CarryTrouble: lambda controller, trouble: controller._checkpoints.trouble(trouble),
    HookDone: Controller._hook_done,
    Typed: Controller._debugger_answered,
    "start": Controller._start_overdue,
    "cause": Controller._cause_overdue,
    "late": Controller._say_who_is_late,
    "absent": Controller._declare_absent,
    "grace": Controller._grace_over,
    "laggards": Controller._end_now,
    "hooks": Controller._hooks_overdue,
    "exits": Controller._exits_overdue,
    "killed": Controller._kill_overdue,
    "abandoned": Controller._abandon_processes,
    "lag": Controller._say_lag,
    "asks": Controller._answer_asks,
    "settle": Controller._settling_overdue,
    "validation": Controller._validation_overdue,
    "capacity": Controller._capacity_known,
    "slots": Controller._slots_overdue,
    "queue": Controller._queued_too_long,
    "resize": Controller._resize_due,
    "together": Controller._not_together,
    "watch": Controller._watch_due,
    "turn": Controller._turn_over,
    "visits": Controller._visits_due,
    "retry": Controller._retry,
}
_QUESTIONS: dict[type, Callable[[Controller, Any, protocol.Visitor], None]] = {
    protocol.Resize: Controller._asked_to_resize,
    protocol.Stop: Controller._asked_to_stop,
    protocol.LookAround: Controller._asked_to_look,
    protocol.Describe: Controller._asked_to_describe,
}
_MESSAGE_HANDLERS: dict[type, Callable[[Controller, Member, Any], None]] = {
    Hello: Controller._hello,
    FirstStep: Controller._first_step,
    Beat: Controller._beat,
    from_worker.Telemetry: Controller._telemetry_came,
    Held: Controller._held,
    Reached: Controller._reached,
    from_worker.Noticed: Controller._rank_noticed,
    Stacks: Controller._stacks_came,
    Arrived: Controller._arrived,
    Executed: Controller._executed,
    Noted: Controller._noted,
    Outcome: Controller._ended,
    Carried: Controller._share_carried,
    CarryTrouble: Controller._carry_trouble,
    StagingFull: Controller._staging_full,
    AskCheckpoints: Controller._asked_for_checkpoints,
    DebugOpened: Controller._debugger_says,
    DebugOutput: Controller._debugger_says,
    DebugPrompt: Controller._debugger_says,
    DebugClosed: Controller._debugger_says,
    DebugQuit: Controller._quit,
}
