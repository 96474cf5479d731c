"""Notices that ranks, or the whole run, will be taken away: the run saves and leaves, or goes on without them."""

from __future__ import annotations

from powertrain.engine import base
from powertrain.run import events as ev
from powertrain.run.active_run import ActiveRun
from powertrain.run.deadlines import Deadline
from powertrain.run.ending import Ending
from powertrain.run.health.clearing import Clearing
from powertrain.run.health.recovery import Recovery
from powertrain.run.inbox import EndNoticed
from powertrain.run.next_steps import DecideOnRetry
from powertrain.run.scaling import preemption
from powertrain.run.scaling.preemption import PreemptionNotice, Regroup
from powertrain.run.workers import attempt as phases
from powertrain.run.workers.attempt import Member
from powertrain.wire import from_worker
from powertrain.worker.signals import SAME_NOTICE_INTERVAL_S


class Notices:
    """Acts on notices of preemption. The controller's thread only."""

    def __init__(self, run: ActiveRun, ending: Ending, clearing: Clearing, recovery: Recovery) -> None:
        self._run, self._ending, self._clearing, self._recovery = run, ending, clearing, recovery
        #: When this process was last asked to end (monotonic).
        self._signalled_at = float("-inf")

    def on_driver_notice(self, noticed: EndNoticed) -> None:
        """The process that runs the controller was asked to end; two signals within a moment are one."""
        run, now = self._run, self._run.deadlines.now()
        if now - self._signalled_at > SAME_NOTICE_INTERVAL_S:
            self._signalled_at = now
            run.stop.signals += 1
            self._act(
                PreemptionNotice(noticed.reason, run.clock.time() + run.spec.signal_grace), run.stop.signals
            )

    def on_rank_notice(self, member: Member, message: from_worker.Noticed) -> None:
        """A rank's process was asked to end. Where its engine cannot start another, that concerns the whole run."""
        run = self._run
        slots = frozenset({member.placement.slot.id}) if run.engine.restarts else frozenset[str]()
        reason = f"rank {member.rank} was asked to end by {message.signal}"
        self._act(PreemptionNotice(reason, run.clock.time() + run.spec.signal_grace, slots), message.times)

    def on_drain(self, event: base.Drain) -> None:
        """The engine announces that a slot will be withdrawn."""
        if self._run.slots.reservation.forget(event.slot, is_lost=False):
            return
        reason = f"{event.slot.host} will be taken away: {event.reason}"
        deadline = event.deadline or self._run.clock.time() + self._run.spec.signal_grace
        self._act(PreemptionNotice(reason, deadline, frozenset({event.slot.id})), 1)

    def _act(self, notice: PreemptionNotice, times: int) -> None:
        """Save and end at the next boundary, or go on with the ranks that may stay; the second time, end at once."""
        run = self._run
        placements = run.attempt.placements if run.attempt is not None else []
        run.record(
            ev.Notified(
                time=run.clock.time(),
                attempt=max(0, run.state.attempt),
                ranks=tuple(p.rank for p in placements if p.slot.id in notice.slots),
                reason=notice.reason,
                deadline=notice.deadline,
            )
        )
        run.notice = preemption.merged(run.notice, notice)
        run.noticed_slots |= notice.slots
        run.stop.should_exit |= not notice.slots
        if self._ending.is_outcome_certain:
            self._ending.hurry(times)
        elif times > 1:
            self._end_at_once(notice)
        elif run.stop.request is None:
            self._save_and_leave(notice)

    def _end_at_once(self, notice: PreemptionNotice) -> None:
        """The second notice. Where the others may go on without the rank that got it, only that rank ends."""
        run = self._run
        regroups = run.steering.regroup is not None and run.steering.regroup.cause == "notice"
        if run.stop.request is None and not (notice.slots and regroups):
            run.stop.signals = max(run.stop.signals, 2)
            self._ending.stop("notice", f"{notice.reason}; asked for the second time")
        if run.outcome is None and run.attempt is not None:
            self._ending.end_now()

    def _save_and_leave(self, notice: PreemptionNotice) -> None:
        """Bring the ranks to a boundary; the remaining ones go on from there, if they are enough."""
        run, before = self._run, self._run.steering.regroup
        workers = preemption.workers_after(
            notice,
            before.workers if before is not None and before.cause == "notice" else run.slots.wanted,
            run.spec.min_workers,
            run.spec.max_workers,
            restarts=run.engine.restarts,
            replaces=run.engine.replaces,
        )
        if run.attempt is not None and run.attempt.phase in (phases.STARTING, phases.TRAINING):
            run.deadlines.set(Deadline.GRACE, preemption.boundary_within(notice, run.clock.time()))
        if workers:
            self._leave_behind(notice, workers)
        else:
            self._ending.stop("notice", f"{notice.reason}; the run can be resumed")

    def _leave_behind(self, notice: PreemptionNotice, workers: int) -> None:
        """Go on without the slots that the notice came for."""
        run = self._run
        attempt, before = run.attempt, run.steering.regroup
        drop = notice.slots | (before.drop if before is not None else frozenset())
        ranks = tuple(p.rank for p in attempt.placements if p.slot.id in drop) if attempt else ()
        run.steering.regroup = Regroup("notice", notice.reason, workers, drop, ranks)
        if not run.engine.replaces:
            run.elastic.set_limit(workers, notice.reason, run.deadlines.now())
        if attempt is None:
            self._recovery.retry()
        elif attempt.phase == phases.STARTING:
            self._clearing.clear(attempt, DecideOnRetry())
        elif attempt.phase == phases.TRAINING:
            run.steering.stop(attempt, notice.reason, self._ending.preemption_of(attempt))
