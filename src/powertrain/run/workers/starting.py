"""The start of an attempt: from its slots to the message that lets every rank train."""

from __future__ import annotations

import pickle
import socket
import traceback

from powertrain.engine import base
from powertrain.run import events as ev
from powertrain.run.active_run import ActiveRun
from powertrain.run.deadlines import Deadline
from powertrain.run.health import failures
from powertrain.run.health.watching import HangWatch
from powertrain.run.workers import attempt as phases
from powertrain.run.workers import backend_hooks, launch, placement
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.run.workers.backend_hooks import HookDone
from powertrain.run.workers.worker_group import WorkerCallError
from powertrain.text.errors import describe_error, message_of
from powertrain.wire.from_controller import Train
from powertrain.wire.from_worker import Executed, FirstStep, Hello
from powertrain.wire.values import ErrorReport
from powertrain.worker.place import AttemptStart

#: Seconds within which every forked process must have sent its first message.
START_TIMEOUT_S = 300.0


class Starting:
    """Forks the ranks, waits for their handshake, runs the backend's hooks. The controller's thread only."""

    def __init__(self, run: ActiveRun, watch: HangWatch) -> None:
        self._run, self._watch = run, watch
        #: By slot id the rank whose output it is. Read by the engine's threads.
        self.ranks_by_slot: dict[str, int] = {}

    def start_attempt(self) -> None:
        """Fork a process on every slot; all of them are held."""
        run = self._run
        if run.stop.request is not None:
            return
        placements, newest = placement.arrange(run.slots.held), run.checkpoints.newest
        first_row = newest.row + 1 if newest else 1
        attempt = run.attempt = Attempt(
            run.state.attempt + 1, placements, first_row, clock=run.clock.monotonic
        )
        run.record(
            ev.AttemptStarted(
                time=run.clock.time(),
                attempt=attempt.number,
                world_size=attempt.world_size,
                first_row=first_row,
                checkpoint=newest.name if newest else "",
                hosts=tuple(p.slot.host for p in placements),
            )
        )
        run.startup.attempt_began(attempt.number, attempt.world_size, run.slots.reason)
        run.deadlines.set(Deadline.START, START_TIMEOUT_S)
        run.hangs.forget()
        origin = self._origin()
        for place in placements:
            self._fork(attempt, place, origin)
        run.validations.begin(placements[0].slot)

    def _origin(self) -> launch.AttemptOrigin:
        """Return what the next attempt continues from, the newest checkpoint if there is one."""
        run = self._run
        own = run.checkpoints.newest_path()
        start = AttemptStart(
            checkpoint=own or run.spec.begin_from,
            filesystem=run.spec.run.filesystem if own else run.spec.begin_from_filesystem,
            names=run.checkpoints.given_names(),
            data_positions=run.checkpoints.data_positions(),
            data_gaps=run.checkpoints.data_gaps(),
        )
        return launch.AttemptOrigin(
            start, socket.gethostname(), run.spec.storage or pickle.dumps(run.storage)
        )

    def _fork(self, attempt: Attempt, place: placement.Placement, origin: launch.AttemptOrigin) -> None:
        run = self._run
        connection = run.hub.admit(place.slot.key, speaks_as=(place.rank, attempt.number))
        member = Member(place, connection.keys.public, attempt)
        attempt.members.append(member)
        run.members[member.key] = member
        self.ranks_by_slot[place.slot.id] = place.rank
        run.engine.fork(place.slot, launch.process_of(run.spec, attempt, place, connection, origin))

    def on_process_started(self, event: base.Started) -> None:
        attempt = self._run.attempt
        member = attempt.by_slot(event.slot.id) if attempt is not None else None
        if member is not None:
            member.pid = event.pid
            self._run.startup.started(member.rank, event)

    def on_hello(self, member: Member, message: Hello) -> None:
        """A rank has connected; after the last one the backend's start hooks run."""
        run = self._run
        member.greeted, member.pid = True, message.pid
        run.startup.greeted(member.rank)
        run.record(
            ev.WorkerStarted(
                time=run.clock.time(),
                attempt=member.attempt.number,
                rank=member.rank,
                pid=message.pid,
                host=message.host,
            )
        )
        if member.attempt.phase == phases.STARTING and member.attempt.all_greeted():
            run.deadlines.cancel(Deadline.START)
            self.run_hooks(member.attempt, "start")

    def on_overdue(self) -> None:
        """Fail the ranks that have not connected: they never will."""
        attempt = self._run.attempt
        if attempt is None or attempt.phase != phases.STARTING:
            return
        for member in attempt.members:
            if not member.greeted:
                why = f"did not connect within {START_TIMEOUT_S:g} s; its log may show why"
                self._run.flow.fail(member, failures.silent(member, why))

    def on_first_step(self, member: Member, message: FirstStep) -> None:
        self._run.startup.first_step(member.rank, message)

    # -- the backend's hooks

    def run_hooks(self, attempt: Attempt, hook: str) -> None:
        """Begin to run the hooks of one kind, "start" or "shutdown"."""
        attempt.shut_down |= hook == "shutdown"
        if attempt.group is None:
            attempt.group = backend_hooks.group_of(attempt, self._run.hub)
        backend_hooks.run(self._run.spec.backend, attempt, hook, self._run.post)

    def on_executed(self, member: Member, message: Executed) -> None:
        """A rank has returned from a call of a hook."""
        if member.attempt.group is not None:
            member.attempt.group.answered(member.rank, message)

    def on_hook_done(self, done: HookDone) -> None:
        attempt = self._run.attempt
        if done.hook == "shutdown" and done.error is not None:
            self._run.show_once(f"The backend's on_shutdown raised {describe_error(done.error)}.")
        if attempt is None or attempt.number != done.attempt:
            return
        if done.hook == "shutdown":
            if attempt.phase == phases.SHUTTING_DOWN:
                self._run.flow.dismiss(attempt)
        elif attempt.phase == phases.STARTING:
            if done.error is not None:
                self._on_hook_failed(attempt, done.error)
            else:
                self._train(attempt)

    def _on_hook_failed(self, attempt: Attempt, error: BaseException) -> None:
        """Fail the rank that the hook failed in; rank 0 where it failed in the driver."""
        if isinstance(error, WorkerCallError):
            member = attempt.members[error.rank]
            self._run.flow.fail(member, failures.raised(member, error.report, "start"))
        elif not attempt.failures and not attempt.losses:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            report = ErrorReport(type=type(error).__name__, message=message_of(error), traceback=text)
            self._run.flow.fail(attempt.members[0], failures.raised(attempt.members[0], report, "start"))

    def _train(self, attempt: Attempt) -> None:
        """Let every rank call the user's function."""
        run = self._run
        attempt.phase = phases.TRAINING
        run.startup.trained()
        run.record(ev.TrainingStarted(time=run.clock.time(), attempt=attempt.number))
        for member in attempt.members:
            # Rank 0's reports are the ones that people look at, and it is only one.
            run.send(member, Train(gather=attempt.gather if member.rank else 0.0))
        run.hangs.begin(attempt)
        self._watch.schedule()
        run.consider_resize()
