"""Stops at a boundary in order to continue with other workers: resizes, and the agreements behind them.

A resize waits until the ranks can be stopped where nothing is redone. A loop that can save on request saves at the next
boundary. Any other is sent from report to report until it stands at one whose checkpoint is committed. A run that never
commits is left as it is, with one warning. A loop shows whether it can save only at its first boundary, and that may
change later: it is asked again then, and every few seconds. A run that grows trains until it has all slots for its new
size.
"""

from __future__ import annotations

from collections.abc import Callable

from powertrain.run.checkpoints.manager import CheckpointManager
from powertrain.run.deadlines import Deadline, Deadlines
from powertrain.run.scaling.boundaries import Holds
from powertrain.run.scaling.policy import Elastic
from powertrain.run.scaling.preemption import Regroup
from powertrain.run.scaling.slots import Slots
from powertrain.run.workers import attempt as phases
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import Preemption
from powertrain.wire.from_worker import Held, Reached

#: Seconds for all ranks to answer and reach the same boundary before a resize is postponed.
_TOGETHER_TIMEOUT_S = 5.0
#: Seconds that ranks stand still for a commit before a resize is postponed: so many times the last commit's time, and
#: this much more, at most the third.
_COMMITTED_TIMES, _COMMITTED_MORE, _COMMITTED_TIMEOUT_S = 2.0, 2.0, 60.0
#: Seconds until a postponed resize is retried.
_RETRY_INTERVAL_S = 30.0
#: Seconds until a loop that could not save on request is asked again.
_ASK_INTERVAL_S = 3.0


class Steering:
    """Steers ranks to boundaries, and decides on resizes. The controller's thread only."""

    def __init__(
        self,
        elastic: Elastic,
        checkpoints: CheckpointManager,
        deadlines: Deadlines,
        slots: Slots,
        *,
        send: Callable[[Member, FromController], None],
        warn_once: Callable[[str], None],
        has_committed: bool,
    ) -> None:
        self.holds = Holds(send)
        self._elastic, self._checkpoints, self._deadlines = elastic, checkpoints, deadlines
        self._slots = slots
        self._warn_once = warn_once
        self._has_committed, self._commit_seconds = has_committed, 0.0
        #: The reason the attempt is being brought to a boundary; ``None`` while it continues as it is.
        self.regroup: Regroup | None = None
        #: When the ranks were last asked to come together for a resize.
        self._asked_at = float("-inf")

    # -- agreeing on a boundary

    def stop(self, attempt: Attempt, reason: str, preemption: Preemption | None = None) -> None:
        """Bring all ranks to a boundary where they end, for good or to be regrouped.

        Ranks that are on their way to one already end there: some may have reached it, and all must end at the same.
        """
        self._deadlines.cancel(Deadline.TOGETHER)
        if attempt.hold is not None and attempt.hold.stops:
            return
        workers = self.regroup.workers if self.regroup is not None else 0
        self.holds.begin(attempt, reason, preemption=preemption, resize_to=workers)

    def on_held(self, member: Member, message: Held) -> None:
        if self.holds.on_held(member, message):
            self._send_on(member.attempt)

    def on_rank_ended(self, member: Member) -> None:
        """Note that a function has ended: the others need not wait for it. Where it has returned, a resize is
        pointless."""
        attempt = member.attempt
        if not member.was_stopped:  # it has returned: the run does not grow any more
            self._slots.reservation.cancel()
        others_may_have_ended = attempt.hold is not None and attempt.hold.stops
        if self._is_resizing() and not member.was_stopped and not others_may_have_ended:
            self._put_off(attempt)
            return
        if self.holds.is_ready(attempt):
            self._send_on(attempt)
        self.check_commits(attempt)

    def _send_on(self, attempt: Attempt) -> None:
        """Send the running ranks, which all have answered, to the first boundary that none has passed."""
        assert attempt.hold is not None
        self._deadlines.cancel(Deadline.TOGETHER)
        can_stop = attempt.hold.can_save or not attempt.hold.needs_commit or self._has_committed
        if can_stop and self._lacks_slots(attempt):
            self._postpone(attempt)
        elif attempt.hold.can_save or not attempt.hold.needs_commit:
            self.holds.send_on(attempt, "stop")
        elif self._has_committed:
            self.holds.send_on(attempt, "step")
        else:
            self._postpone(attempt)
            self._deadlines.set(Deadline.RESIZE, _ASK_INTERVAL_S)
            if attempt.first_row_seen:  # before that it is unknown whether the loop can save
                self._warn_once(
                    "The number of workers is to change, but this run has not committed a checkpoint yet: it is "
                    "changed when it has, so that nothing is redone. A loop that uses register_state or asks "
                    "should_checkpoint() need not wait for that."
                )

    def _lacks_slots(self, attempt: Attempt) -> bool:
        """Return True for a run that grows and waits for slots; they are requested."""
        regroup = self.regroup
        if regroup is None or regroup.cause != "resize" or regroup.workers <= attempt.world_size:
            return False
        return not self._slots.reserve(regroup.workers)

    # -- another number of workers

    def consider(self, attempt: Attempt | None, *, is_free: bool) -> None:
        """Schedule a resize, if one is wanted and nothing else is under way."""
        wanted = None
        if attempt is not None and attempt.phase == phases.TRAINING and is_free and self.regroup is None:
            wanted = self._elastic.wanted(attempt.world_size)
            if wanted is None or wanted.workers < attempt.world_size:
                self._slots.reservation.cancel()
        out_of_step = attempt is not None and attempt.out_of_step
        if wanted is None or out_of_step or self._slots.is_reserving(wanted.workers):
            self._deadlines.cancel(Deadline.RESIZE)
        else:
            self._deadlines.set_at(Deadline.RESIZE, max(wanted.when, self._deadlines.now()))

    def resize(self, attempt: Attempt | None, *, is_free: bool) -> None:
        """Ask the ranks to meet at a boundary where nothing is lost."""
        wanted = self._elastic.wanted(attempt.world_size) if attempt is not None else None
        if attempt is None or attempt.phase != phases.TRAINING or wanted is None:
            return
        if not is_free or self.regroup is not None or any(m.outcome is not None for m in attempt.members):
            return
        self.regroup = Regroup("resize", wanted.reason, wanted.workers)
        self._request_hold(attempt, self.regroup)

    def _request_hold(self, attempt: Attempt, regroup: Regroup) -> None:
        self._asked_at = self._deadlines.now()
        self._deadlines.set(Deadline.TOGETHER, self._together_timeout_s(attempt))
        self.holds.begin(attempt, regroup.reason, needs_commit=True, resize_to=regroup.workers)

    def on_reached(self, member: Member, message: Reached) -> None:
        """Note that a rank waits at a boundary to be sent on."""
        if self.holds.on_reached(member, message):
            self._deadlines.set(Deadline.TOGETHER, self._together_timeout_s(member.attempt))
        self.check_commits(member.attempt)

    def check_commits(self, attempt: Attempt) -> None:
        """End the ranks if all wait at the same row and its checkpoint is committed; send them on otherwise."""
        row = self.holds.row_of_all(attempt)
        if row is None or attempt.rows.closed < row or attempt.phase != phases.TRAINING:
            return
        newest = self._checkpoints.newest
        if any(pending.row == row for pending in self._checkpoints.pending):
            patience = _COMMITTED_TIMES * self._commit_seconds + _COMMITTED_MORE
            self._deadlines.set(Deadline.TOGETHER, min(patience, _COMMITTED_TIMEOUT_S))
            return
        self._deadlines.cancel(Deadline.TOGETHER)
        if newest is not None and newest.row == row:
            self.holds.stop_here(attempt)
        elif self.regroup is not None and self._should_ask_again(attempt):
            self._request_hold(attempt, self.regroup)
        else:
            self.holds.step(attempt)

    def _should_ask_again(self, attempt: Attempt) -> bool:
        """Return True when ranks that are sent from report to report may be able to save by now: otherwise a loop that
        leaves its checkpoints to the run would be sent on for ever."""
        answers = attempt.hold.answers.values() if attempt.hold is not None else ()
        had_not_begun = any(answer.boundary == 0 for answer in answers)
        return had_not_begun or self._deadlines.now() - self._asked_at >= _ASK_INTERVAL_S

    def on_late_ranks(self, attempt: Attempt | None) -> None:
        """Postpone the resize: a rank did not answer, or skips reports that others make, or storage is slow."""
        if attempt is None or not self._is_resizing():
            return
        waits_for_storage = self.holds.row_of_all(attempt) is not None
        missed = bool(attempt.hold and attempt.hold.reached) and not waits_for_storage
        late = [m.rank for m in attempt.running() if attempt.hold and m.rank not in attempt.hold.reached]
        attempt.misses += missed
        self._put_off(attempt)
        if attempt.out_of_step:
            self._warn_once(
                f"The number of workers is not changed: {phases.MISSES_ALLOWED} times ranks {late} did not come to the "
                "report at which the others waited for them. Let every rank report at the same place of its loop, use "
                "register_state, or ask should_checkpoint()."
            )
        else:
            self._deadlines.set(Deadline.RESIZE, _RETRY_INTERVAL_S)

    @staticmethod
    def _together_timeout_s(attempt: Attempt) -> float:
        """Return the timeout, longer after each miss: one rank may evaluate before it reports."""
        return float(_TOGETHER_TIMEOUT_S * 2**attempt.misses)

    def on_commit(self, seconds: float) -> bool:
        """Note a commit, so many seconds after the report; return True when it is the run's first."""
        first, self._has_committed, self._commit_seconds = not self._has_committed, True, seconds
        return first

    def take(self) -> Regroup | None:
        """Return and clear the reason the ended attempt was brought to a boundary."""
        regroup, self.regroup = self.regroup, None
        return regroup

    def _is_resizing(self) -> bool:
        return self.regroup is not None and self.regroup.cause == "resize"

    def _put_off(self, attempt: Attempt) -> None:
        """Continue with the ranks as they are, without slots for others."""
        if self._is_resizing():
            self._slots.reservation.cancel()
        self._postpone(attempt)

    def _postpone(self, attempt: Attempt) -> None:
        self.regroup = None
        self._deadlines.cancel(Deadline.TOGETHER)
        self.holds.let_go(attempt)
