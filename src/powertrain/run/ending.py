"""The end of a run: requested by a person, a criterion or a scheduler, or because every function has returned.

::

    stop ─▶ boundary ─┐
    functions return ─┴▶ shut down ─▶ settle ─▶ dismiss ─▶ exits ─▶ finish ─▶ validations ─▶ end
    second request ─────▶ kill ─▶ settle briefly ─▶ end
"""

from __future__ import annotations

import contextlib
import signal

from powertrain.errors import FencedError
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.active_run import ActiveRun
from powertrain.run.checkpoints.settling import Settling
from powertrain.run.checkpoints.validating import Validating
from powertrain.run.deadlines import Deadline
from powertrain.run.debugging.sessions import place_of
from powertrain.run.health.clearing import Clearing
from powertrain.run.health.recovery import Recovery
from powertrain.run.inbox import LeaseLost
from powertrain.run.next_steps import DecideOnRetry, DismissRanks, EndRun, FinishRun
from powertrain.run.outcome import RunOutcome
from powertrain.run.scaling import preemption
from powertrain.run.workers import attempt as phases
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.run.workers.reports import Reports
from powertrain.run.workers.starting import Starting
from powertrain.wire.from_controller import Dismissed, Preemption
from powertrain.wire.from_worker import DebugQuit

#: Seconds that an interrupted run has to reach its boundary.
INTERRUPT_TIMEOUT_S = 15.0
#: Seconds for the backend's shutdown hooks, and for dismissed processes to exit.
HOOK_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 10.0


class Ending:
    """Requests to end, and the steps from the last report to the outcome. The controller's thread only."""

    def __init__(
        self,
        run: ActiveRun,
        settling: Settling,
        validating: Validating,
        reports: Reports,
        starting: Starting,
        clearing: Clearing,
        recovery: Recovery,
    ) -> None:
        self._run, self._settling, self._validating, self._reports = run, settling, validating, reports
        self._starting, self._clearing, self._recovery = starting, clearing, recovery

    # -- requests to stop

    @property
    def is_outcome_certain(self) -> bool:
        """True when it is certain how the run ends: only the rest of the ending can be cut short."""
        return self._validating.is_awaited or self._run.has_returned or self._run.stop.is_decided

    def stop(self, cause: str, reason: str, *, is_agreed: bool = False) -> None:
        """End the run at a boundary; one that is not training yet ends at once.

        Args:
            cause: "criterion", "interrupt", "notice", "asked" or "quit".
            reason: Why, for the journal and the result.
            is_agreed: True when every rank waits at the same row and will end there.
        """
        run, attempt = self._run, self._run.attempt
        if run.stop.request is not None or (run.has_returned and not is_agreed):
            return
        run.stop.request = ev.Stopping(
            time=run.clock.time(), attempt=max(0, run.state.attempt), cause=cause, reason=reason
        )
        run.record(run.stop.request)
        if cause != "criterion":
            run.debugging.end("the run is stopping")
        run.steering.take()  # a change of the number of workers does not matter any longer
        run.slots.reservation.cancel()
        run.deadlines.cancel(Deadline.RETRY)
        if is_agreed:
            return
        if attempt is None or attempt.phase in (phases.STARTING, phases.CLEARING):
            self.end_now()
        else:
            run.steering.stop(attempt, reason, self.preemption_of(attempt))

    def preemption_of(self, attempt: Attempt) -> Preemption | None:
        """Return what ranks are sent about the notice that has come, if any."""
        notice = self._run.notice
        return preemption.preemption_of(notice, attempt.placements) if notice is not None else None

    def on_end_early(self, reason: str) -> None:
        self.stop("criterion", reason)

    def on_interrupt(self) -> None:
        """Ctrl-C: gracefully the first time, at once the second."""
        run = self._run
        run.stop.interrupts += 1
        if self._validating.is_awaited:  # the training is over: only the ending is cut short
            self._validating.cut_short()
        elif self._settling.is_awaited and (run.has_returned or run.stop.is_decided):
            self._interrupt_settling()
        elif run.stop.interrupts == 1:
            self.stop("interrupt", "interrupted; a second Ctrl-C ends it at once")
            if run.attempt is not None and run.attempt.phase == phases.TRAINING:
                run.deadlines.set(Deadline.GRACE, INTERRUPT_TIMEOUT_S)
        elif run.stop.request is not None:
            self.end_now()
        elif run.attempt is not None:  # every function has returned: only the ending is cut short
            self._clearing.clear(run.attempt, FinishRun())

    def _interrupt_settling(self) -> None:
        """The training is over: the interrupt concerns the wait for storage."""
        if self._run.stop.interrupts == 1:
            waiting = len(self._run.checkpoints.pending)
            self._run.warn(
                f"Training is over; {waiting} checkpoint(s) are still on their way to the storage. A second Ctrl-C "
                "leaves them where they are."
            )
        else:
            self._run.stop.left_by_interrupt = True
            self._settling.on_overdue()

    def hurry(self, times: int) -> None:
        """Cut the rest of the ending short: asked for the first or the second time."""
        if self._validating.is_awaited:
            self._validating.cut_short()
        elif self._settling.is_awaited and times > 1:
            self._settling.on_overdue()
        else:
            self._settling.shorten(self._settling.patience)

    def on_debugger_quit(self, member: Member, message: DebugQuit) -> None:
        """The user has quit a debugger: the run does not wait for that rank any longer."""
        self.stop("quit", f"rank {member.rank} was quit in its debugger at {place_of(message.frame)}")
        if self._run.outcome is None and member.attempt.phase == phases.TRAINING:
            self.end_now()

    def on_grace_over(self) -> None:
        """The ranks did not reach a boundary in time."""
        run = self._run
        if run.stop.is_urgent and run.attempt is not None and not run.engine.restarts:
            for member in run.attempt.running():
                run.engine.signal(member.placement.slot, signal.SIGTERM)
        self.end_now()

    def end_now(self) -> None:
        """Kill the ranks, then end the run; or regroup where only some of the ranks had to leave."""
        run = self._run
        run.deadlines.cancel(Deadline.GRACE, Deadline.LAGGARDS)
        if run.attempt is None:
            run.flow.proceed(EndRun())
        elif run.stop.request is None and run.steering.regroup is not None:
            self._clearing.clear(run.attempt, DecideOnRetry())
        else:
            self._clearing.clear(run.attempt, EndRun())

    # -- another controller

    def on_lease_lost(self, lost: LeaseLost) -> None:
        self.lose_lease(FencedError(lost.reason))

    def lose_lease(self, error: BaseException) -> None:
        """Another controller has taken the run: end it, and commit nothing more."""
        run = self._run
        if run.outcome is not None or run.stop.is_fenced:
            return
        run.stop.is_fenced = True
        for pending in run.checkpoints.pending:
            run.checkpoints.fail(pending, str(error))
        end = EndRun(lifecycle.FAILED, str(error))
        if run.attempt is None:
            run.flow.proceed(end)
        else:
            self._clearing.clear(run.attempt, end)

    # -- the good end

    def shut_down(self, attempt: Attempt) -> None:
        """Every function has returned: run the backend's shutdown hooks."""
        run = self._run
        attempt.phase = phases.SHUTTING_DOWN
        run.slots.reservation.cancel()
        run.deadlines.cancel(
            Deadline.GRACE, Deadline.LAGGARDS, Deadline.WATCH, Deadline.RESIZE, Deadline.TOGETHER
        )
        for over in run.hangs.end_all():
            run.record(over)
        run.hangs.forget()
        run.deadlines.set(Deadline.HOOKS, HOOK_TIMEOUT_S)
        self._starting.run_hooks(attempt, "shutdown")

    def on_hooks_overdue(self) -> None:
        attempt = self._run.attempt
        if attempt is not None and attempt.phase == phases.SHUTTING_DOWN:
            self._run.warn(
                f"The backend's shutdown hook did not return within {HOOK_TIMEOUT_S:g} s; the run ends without it."
            )
            self.dismiss(attempt)

    def dismiss(self, attempt: Attempt) -> None:
        """Let the ranks exit once their checkpoints are in storage: some upload their own shares."""
        self._run.deadlines.cancel(Deadline.HOOKS)
        if attempt.failures:
            self._clearing.clear(attempt, DecideOnRetry())
        else:
            self._settling.wait(DismissRanks(), self._run.spec.sync_timeout)

    def dismiss_now(self, attempt: Attempt) -> None:
        """Send every rank its dismissal and wait for the processes to exit."""
        attempt.phase = phases.DISMISSED
        self._run.deadlines.set(Deadline.EXITS, EXIT_TIMEOUT_S)
        for member in attempt.members:
            self._run.send(member, Dismissed(summary=self._reports.summary()))
        self._clearing.on_exits_changed(attempt)

    def on_exits_overdue(self) -> None:
        attempt = self._run.attempt
        if attempt is not None and attempt.phase == phases.DISMISSED:
            slow = [m.rank for m in attempt.members if not m.exited]
            self._run.warn(
                f"Ranks {slow} did not exit within {EXIT_TIMEOUT_S:g} s after training had ended, and were killed."
            )
            self._clearing.clear(attempt, FinishRun())

    def finish(self) -> None:
        """End the run with what its functions returned, or as it was asked to stop."""
        if self._run.stop.request is not None:
            self.end(EndRun())
        else:
            self.end(EndRun(lifecycle.FINISHED, "every rank's function returned"))

    def end(self, step: EndRun) -> None:
        """Record the end and make the outcome, after the validations that are still running."""
        run = self._run
        state, reason = step.state, step.reason
        if not state:
            state, reason = run.stop.end_state(has_attempt=run.attempt is not None)
        if self._validating.wait(EndRun(state, reason)):
            return
        if state == lifecycle.FAILED:
            self._reports.value = b""  # rank 0 may have returned when another rank failed
        run.checkpoints.check_scores()
        self.record_end(state, reason)
        metrics, originals = self._reports.final_metrics()
        run.outcome = RunOutcome(
            state,
            reason,
            metrics,
            self._reports.value,
            self._recovery.failures,
            run.stop.was_interrupted or run.stop.left_by_interrupt,
            tuple(run.checkpoints.left),
            run.stop.should_exit,
            run.state,
            originals,
        )

    # -- the record of the end

    def record_end(self, state: str, reason: str) -> None:
        run = self._run
        run.startup.over()
        run.record(
            ev.Ended(
                time=run.clock.time(),
                state=state,
                reason=reason,
                rows=self._reports.rows_closed(),
                seconds=round(run.deadlines.now() - run.began, 3),
                returned=len(self._reports.value),
            )
        )

    def record_forced_end(self) -> None:
        """Record that the run ended where it was stuck. No callback is called: one of them may be what hangs."""
        run = self._run
        run.callbacks.close()
        reason = "it was asked twice to end, and was stuck"
        if run.stop.request is None:
            with contextlib.suppress(Exception):
                attempt = max(0, run.state.attempt)
                run.record(
                    ev.Stopping(time=run.clock.time(), attempt=attempt, cause="interrupt", reason=reason)
                )
        self.record_broken_end(lifecycle.STOPPED, reason)

    def record_broken_end(self, state: str, reason: str) -> None:
        """Record the end by an error that the caller will see: a second error here must not hide it."""
        self._reports.value = b""
        with contextlib.suppress(Exception):
            self.record_end(state, reason)
