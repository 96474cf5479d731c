"""Ending the processes of an attempt, and going on once they are gone."""

from __future__ import annotations

import signal

from powertrain.run.active_run import ActiveRun
from powertrain.run.checkpoints.settling import SETTLE_TIMEOUT_S, Settling
from powertrain.run.deadlines import Deadline
from powertrain.run.health import failure_policy
from powertrain.run.next_steps import AfterClearing, DecideOnRetry, FinishRun, KillRanks
from powertrain.run.workers import attempt as phases
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.run.workers.reports import Reports
from powertrain.wire.from_controller import Dismissed

#: Seconds for killed processes to be gone before they are killed by other means; the same for a run that was asked
#: twice to end; and after that until they are given up.
KILL_TIMEOUT_S, CUT_SHORT_KILL_TIMEOUT_S, ABANDON_TIMEOUT_S = 20.0, 2.0, 4.0
#: Deadlines that mean nothing once the ranks are being killed.
_OF_RUNNING_RANKS = (
    Deadline.START,
    Deadline.CAUSE,
    Deadline.LATE,
    Deadline.ABSENT,
    Deadline.HOOKS,
    Deadline.EXITS,
    Deadline.WATCH,
    Deadline.RESIZE,
    Deadline.TOGETHER,
    Deadline.LAGGARDS,
    Deadline.GRACE,
    Deadline.RETRY,
)


class Clearing:
    """Kills the ranks of an attempt. The controller's thread only."""

    def __init__(self, run: ActiveRun, settling: Settling, reports: Reports) -> None:
        self._run, self._settling, self._reports = run, settling, reports
        #: What follows once all processes are gone; None while none is being ended.
        self._next: AfterClearing | None = None

    def clear(self, attempt: Attempt, then: AfterClearing) -> None:
        """End every process of the attempt; ``then`` follows when all are gone.

        Ranks that upload their own shares of checkpoints first get the time to do so.
        """
        self._run.startup.over()
        if self._run.uploaders.has_rank_uploads and not self._run.stop.is_cut_short:
            self._settling.wait(KillRanks(then), SETTLE_TIMEOUT_S)
        else:
            self.kill(attempt, then)

    def kill(self, attempt: Attempt, then: AfterClearing) -> None:
        """End every process of the attempt now."""
        run = self._run
        self._next = then
        attempt.phase = phases.CLEARING  # first, so that what waits for debuggers to close is not acted on
        run.debugging.forget("the ranks are being ended")
        run.deadlines.cancel(*_OF_RUNNING_RANKS)
        run.hangs.forget()
        summary = self._reports.summary()
        if attempt.failures:
            summary["failed"] = failure_policy.order_by_cause(attempt.failures)[0].summary
        for member in attempt.members:
            if not member.exited:
                run.send(member, Dismissed(summary=summary))
                run.engine.signal(member.placement.slot, signal.SIGKILL)
        run.deadlines.set(
            Deadline.KILLED, CUT_SHORT_KILL_TIMEOUT_S if run.stop.is_at_once else KILL_TIMEOUT_S
        )
        run.deadlines.cancel(Deadline.ABANDONED)
        self.on_exits_changed(attempt)

    def remaining(self) -> list[Member]:
        """Return the ranks that were killed and are not gone."""
        attempt = self._run.attempt
        if attempt is None or attempt.phase != phases.CLEARING:
            return []
        return [member for member in attempt.members if not member.exited]

    def on_kill_overdue(self) -> None:
        """Kill once more: the process that they were forked from may hang, and the engine ends that one then."""
        for member in self.remaining():
            self._run.engine.signal(member.placement.slot, signal.SIGKILL)
            self._run.deadlines.set(Deadline.ABANDONED, ABANDON_TIMEOUT_S)

    def on_exits_changed(self, attempt: Attempt) -> None:
        """Go on once all processes are gone; where a launcher ends them, without waiting for that."""
        is_gone = attempt.all_exited() or (attempt.phase == phases.CLEARING and not self._run.engine.restarts)
        if not is_gone:
            return
        self._run.deadlines.cancel(Deadline.KILLED, Deadline.ABANDONED)
        if attempt.phase == phases.DISMISSED:
            self._run.deadlines.cancel(Deadline.EXITS)
            attempt.phase = phases.CLEARING
            self._run.flow.proceed(FinishRun())
        elif attempt.phase == phases.CLEARING and self._next is not None:
            then, self._next = self._next, None
            self._settling.abandon_open_rows(attempt)
            if isinstance(then, DecideOnRetry):  # it decides how long to wait for storage
                self._run.flow.proceed(then)
            else:
                self._settling.wait(then, self._settling.patience)
