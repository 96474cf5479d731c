"""The parts of a controller, one for each concern, and the events that each of them handles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.manifest import Manifest
from powertrain.engine import base
from powertrain.run.active_run import ActiveRun
from powertrain.run.checkpoints.committer import Committer, Done, Trouble
from powertrain.run.checkpoints.manager import CheckpointManager
from powertrain.run.checkpoints.queries import CheckpointQueries
from powertrain.run.checkpoints.settling import Settling
from powertrain.run.checkpoints.validating import Validating
from powertrain.run.deadlines import Deadline
from powertrain.run.debugging.attaching import DebuggerAttachment
from powertrain.run.debugging.keyboard import Typed
from powertrain.run.ending import Ending
from powertrain.run.health.clearing import Clearing
from powertrain.run.health.hangs import StacksSampled
from powertrain.run.health.recovery import Recovery
from powertrain.run.health.watching import HangWatch
from powertrain.run.inbox import (
    Disconnected,
    EndEarly,
    EndNoticed,
    Interrupt,
    LeaseLost,
    UnreadableMessage,
    WarningPosted,
)
from powertrain.run.remote import status
from powertrain.run.remote.inspections import StacksFromOutside
from powertrain.run.remote.requests import Requests
from powertrain.run.scaling.notices import Notices
from powertrain.run.scaling.slots import Slots
from powertrain.run.scaling.steering import Steering
from powertrain.run.workers.attempt import Member
from powertrain.run.workers.backend_hooks import HookDone
from powertrain.run.workers.engine_events import EngineEvents
from powertrain.run.workers.messages import RankHandlers, WorkerMessages
from powertrain.run.workers.reports import Reports
from powertrain.run.workers.starting import Starting
from powertrain.wire import from_worker

#: Seconds that a commit waits for the points before it to be on disk.
_SPOOL_TIMEOUT_S = 2.0


class Parts:
    """All parts of one controller: each knows those above it in the constructor, and the others by ``run.flow``."""

    def __init__(self, run: ActiveRun, chain: Chain, from_checkpoint: Manifest | None) -> None:
        self._run = run
        self.validating = Validating(run)
        self.settling = Settling(run, self.validating)
        self.committer = Committer(run.post, run.spec.sync_timeout)
        run.checkpoints = self._make_checkpoints(chain, from_checkpoint)
        run.queries = CheckpointQueries(
            run.checkpoints, run.deadlines, run.send, lambda row: run.validations.awaited(row)
        )
        run.slots = Slots(run.spec, run.engine, run.elastic, run.deadlines, run.facts)
        run.steering = Steering(
            run.elastic,
            run.checkpoints,
            run.deadlines,
            run.slots,
            send=run.send,
            warn_once=run.warn_once,
            has_committed=from_checkpoint is not None,
        )
        self.watch = HangWatch(run)
        self.starting = Starting(run, self.watch)
        run.slots.on_complete = self.starting.start_attempt
        run.slots.reservation.on_changed = run.consider_resize
        self.reports = Reports(run, self.settling, self.watch, from_checkpoint)
        self.clearing = Clearing(run, self.settling, self.reports)
        self.recovery = Recovery(run, self.settling, self.reports, self.starting, self.clearing)
        self.debuggers = DebuggerAttachment(run, self.reports, self.recovery)
        run.debugging = self.debuggers.open()
        self.ending = Ending(
            run,
            self.settling,
            self.validating,
            self.reports,
            self.starting,
            self.clearing,
            self.recovery,
        )
        self.notices = Notices(run, self.ending, self.clearing, self.recovery)
        self.requests = Requests(run, self.reports, self.ending, self._submit_optional)
        self.engine_events = EngineEvents(run, self.recovery)
        self.messages = WorkerMessages(run, self.reports, self._message_handlers())

    def _make_checkpoints(self, chain: Chain, from_checkpoint: Manifest | None) -> CheckpointManager:
        run = self._run
        return CheckpointManager(
            run.storage,
            chain,
            run.spec.checkpoints,
            from_checkpoint,
            tag=run.spec.saving.tag,
            committer=self.committer,
            # A resume from it relies on the rows before it: they must not die with this process.
            before_commit=lambda: run.metrics.wait_spooled(_SPOOL_TIMEOUT_S),
            settled=self.settling.on_settled,
            unstaged=self.settling.on_unstaged,
            warn=run.warn,
            clock=run.clock.monotonic,
        )

    def _submit_optional(
        self, do: Callable[[], Any], then: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Do something on the thread for storage, once: checkpoints must not wait for it."""
        self.committer.submit(do, then, persist=False)

    def deadline_handlers(self) -> dict[Deadline, Callable[[], None]]:
        """Return what to do when each deadline has passed."""
        run = self._run
        return {
            Deadline.START: self.starting.on_overdue,
            Deadline.CAUSE: self.recovery.on_cause_overdue,
            Deadline.LATE: self.reports.on_late,
            Deadline.ABSENT: self.reports.on_absent,
            Deadline.GRACE: self.ending.on_grace_over,
            Deadline.LAGGARDS: self.ending.end_now,
            Deadline.HOOKS: self.ending.on_hooks_overdue,
            Deadline.EXITS: self.ending.on_exits_overdue,
            Deadline.KILLED: self.clearing.on_kill_overdue,
            Deadline.ABANDONED: self.recovery.on_abandoned,
            Deadline.LAG: self.settling.on_lag,
            Deadline.QUERIES: run.queries.answer,
            Deadline.SETTLED: self.settling.on_overdue,
            Deadline.VALIDATION: self.validating.on_overdue,
            Deadline.CAPACITY: self.engine_events.on_capacity_known,
            Deadline.SLOTS: run.slots.on_overdue,
            Deadline.QUEUE: self.engine_events.on_queue_timeout,
            Deadline.RESERVATION: run.slots.on_reservation_overdue,
            Deadline.RESIZE: lambda: run.steering.resize(run.attempt, is_free=run.stop.request is None),
            Deadline.TOGETHER: lambda: run.steering.on_late_ranks(run.attempt),
            Deadline.WATCH: self.watch.on_due,
            Deadline.TURN: self.debuggers.on_turn_over,
            Deadline.INSPECTIONS: self.requests.on_inspections_due,
            Deadline.PROFILES: self.requests.on_profiles_due,
            Deadline.RETRY: self.recovery.retry,
        }

    def event_handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return what handles each type of event in the inbox."""
        run = self._run
        return {
            base.Granted: self.engine_events.on_granted,
            base.Waiting: self.engine_events.on_waiting,
            base.ClaimRefused: self.engine_events.on_refused,
            base.Started: self.starting.on_process_started,
            base.Exited: self.engine_events.on_exited,
            base.SlotLost: self.engine_events.on_slot_lost,
            base.Drain: self.notices.on_drain,
            base.Capacity: self.engine_events.on_capacity,
            base.Remark: lambda remark: run.warn(remark.text),
            Disconnected: self.watch.on_disconnect,
            UnreadableMessage: self.messages.on_unreadable,
            from_worker.Noted: lambda problem: run.warn(problem.message),
            Interrupt: lambda _: self.ending.on_interrupt(),
            EndEarly: lambda end: self.ending.on_end_early(end.reason),
            EndNoticed: self.notices.on_driver_notice,
            LeaseLost: self.ending.on_lease_lost,
            status.ControlRequest: self.requests.on_request,
            StacksFromOutside: self.requests.on_stacks_from_outside,
            StacksSampled: self.watch.on_stacks_sampled,
            WarningPosted: lambda posted: run.warn(posted.message),
            Done: lambda done: done.then(done.result, done.error),
            Trouble: lambda trouble: trouble.say(trouble.reason, trouble.place),
            from_worker.ShareUploaded: run.checkpoints.on_share_uploaded,
            from_worker.UploadTrouble: run.checkpoints.trouble,
            HookDone: self.starting.on_hook_done,
            Typed: self.debuggers.on_typed,
        }

    def _message_handlers(self) -> RankHandlers:
        """Return what handles each type of message of a rank."""
        run = self._run

        def on_stacks(member: Member, message: from_worker.Stacks) -> None:
            self.watch.on_stacks(member, message)
            self.requests.on_stacks(member, message)

        return {
            from_worker.Hello: self.starting.on_hello,
            from_worker.FirstStep: self.starting.on_first_step,
            from_worker.Executed: self.starting.on_executed,
            from_worker.Beat: self.watch.on_beat,
            from_worker.Stacks: on_stacks,
            from_worker.Profiled: self.requests.on_profiled,
            from_worker.Telemetry: lambda member, message: run.telemetry.on_telemetry(member, message),
            from_worker.Held: run.steering.on_held,
            from_worker.Reached: run.steering.on_reached,
            from_worker.Arrived: self.reports.on_arrival,
            from_worker.Outcome: self.reports.on_outcome,
            from_worker.Noticed: self.notices.on_rank_notice,
            from_worker.Noted: lambda member, message: self.messages.on_noted(member, message),
            from_worker.ShareUploaded: lambda member, message: run.checkpoints.on_share_uploaded(message),
            from_worker.UploadTrouble: lambda member, message: run.checkpoints.trouble(message),
            from_worker.StagingFull: self.settling.on_staging_full,
            from_worker.AskCheckpoints: run.queries.add,
            from_worker.DebugOpened: self.debuggers.on_message,
            from_worker.DebugOutput: self.debuggers.on_message,
            from_worker.DebugPrompt: self.debuggers.on_message,
            from_worker.DebugClosed: self.debuggers.on_message,
            from_worker.DebugQuit: self.ending.on_debugger_quit,
        }
