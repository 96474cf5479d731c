"""What follows when a rank dies, fails or loses its slot: the cause is found, then the run retries or gives up."""

from __future__ import annotations

from powertrain.engine import base
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.active_run import ActiveRun
from powertrain.run.checkpoints.settling import Settling
from powertrain.run.deadlines import Deadline
from powertrain.run.health import failure_policy, failures
from powertrain.run.health.clearing import Clearing
from powertrain.run.next_steps import DecideOnRetry, EndRun, RetryAfter
from powertrain.run.scaling.preemption import Regroup
from powertrain.run.workers import attempt as phases
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.run.workers.reports import Reports
from powertrain.run.workers.starting import Starting
from powertrain.values.exceptions import exceptions_of
from powertrain.wire.from_worker import Outcome

#: Seconds to wait for the cause when every failure seen so far reads like an echo of another.
CAUSE_TIMEOUT_S = 1.0

_LAUNCHER_DECIDES = failure_policy.FailureDecision(
    "give_up", "the launcher decides whether to start it again"
)


class Recovery:
    """Failures and losses of ranks. The controller's thread only."""

    def __init__(
        self, run: ActiveRun, settling: Settling, reports: Reports, starting: Starting, clearing: Clearing
    ) -> None:
        self._run, self._settling, self._reports = run, settling, reports
        self._starting, self._clearing = starting, clearing
        #: How many attempts in a row ended before any rank had trained.
        self._early_deaths = 0
        #: The failures of the last attempt that failed, the cause first.
        self.failures: tuple[ev.WorkerFailure, ...] = ()

    # -- ranks that are gone

    def on_rank_exited(self, event: base.Exited) -> None:
        """The process of a rank has ended."""
        run, attempt = self._run, self._run.attempt
        member = attempt.by_slot(event.slot.id) if attempt is not None else None
        if attempt is None or member is None or member.exited:
            return
        self._release(member, event, "has ended")
        is_expected = attempt.phase in (phases.DISMISSED, phases.CLEARING)
        if is_expected or member.outcome is not None:
            self._clearing.on_exits_changed(attempt)
        elif event.code == 0 and run.spec.runs_scripts and attempt.phase == phases.TRAINING:
            self._reports.on_outcome(member, Outcome(status="returned"))  # by os._exit(0)
        elif event.code < 0 and member.placement.slot.id in run.noticed_slots:
            self._lose(member, f"rank {member.rank} was ended after a preemption notice")
        else:
            self.fail(member, failures.died(member, event, run.hub.endpoint))

    def on_slot_lost(self, event: base.SlotLost) -> None:
        """A slot was withdrawn, and the process on it is gone."""
        attempt = self._run.attempt
        was_held = self._run.slots.lose(event.slot)
        if attempt is None:
            if was_held:
                self._lose_before_start(event)
            return
        member = attempt.by_slot(event.slot.id)
        if member is not None and not member.exited:
            self._release(member, None, "has lost its slot")
            self._lose(member, event.reason)

    def on_abandoned(self) -> None:
        """Go on without processes that no signal ends, such as those that hang in the kernel or on a lost node."""
        if left := self._clearing.remaining():
            ranks = [member.rank for member in left]
            self._run.warn(f"Ranks {ranks} were killed and did not end; the run no longer waits for them.")
            for member in left:
                reason = "its process did not end when it was killed"
                self.on_slot_lost(base.SlotLost(member.placement.slot, reason))

    def _release(self, member: Member, event: base.Exited | None, why: str) -> None:
        """Nothing more comes from a rank: its reports count, the shares that it had to upload itself are lost."""
        run = self._run
        member.exited = True
        run.debugging.on_process_gone(member)
        self._reports.recover(member, event)
        run.telemetry.on_rank_gone(member, event)
        run.checkpoints.rank_ended(member.attempt.number, member.rank)
        run.checkpoints.fail_lost_shares(
            run.uploaders.rank_ended(member),
            f"rank {member.rank} ended while it uploaded its share of the checkpoint",
        )
        if member.attempt.group is not None:
            member.attempt.group.gone(member.rank, why)

    def _lose(self, member: Member, reason: str) -> None:
        """Note a rank that is gone by no fault of its own."""
        attempt = member.attempt
        attempt.losses.append((member.rank, reason))
        if attempt.phase in (phases.STARTING, phases.TRAINING) and member.outcome is None:
            self._clearing.clear(attempt, DecideOnRetry())
        else:
            self._clearing.on_exits_changed(attempt)

    def _lose_before_start(self, event: base.SlotLost) -> None:
        """A slot was lost while others were awaited: give the rest back and request them anew."""
        decision = self._record_loss(max(0, self._run.state.attempt), (), event.reason)
        if self._run.stop.request is not None:
            self._run.flow.proceed(EndRun())
        elif decision.retry:
            self.retry()
        else:
            self._run.flow.proceed(EndRun(lifecycle.FAILED, decision.reason))

    # -- failures

    def fail(self, member: Member, failure: ev.WorkerFailure) -> None:
        """Note a failure; act at once when its cause is known, otherwise wait a moment for the cause."""
        attempt = member.attempt
        if member.failure is None:
            member.failure = failure
            attempt.failures.append(failure)
        if attempt.phase == phases.CLEARING:
            self._clearing.on_exits_changed(attempt)
        else:
            self.act_on_failures(attempt)

    def act_on_failures(self, attempt: Attempt) -> None:
        """Deferred while a debugger is attached: acting now would kill the debugged process."""
        if not attempt.failures or self._run.debugging.is_open:
            return
        if failure_policy.cause_is_known(attempt.failures):
            self._end_failed(attempt)
        elif Deadline.CAUSE not in self._run.deadlines:
            attempt.failing_since = self._run.deadlines.now()
            self._run.deadlines.set(Deadline.CAUSE, CAUSE_TIMEOUT_S)

    def on_cause_overdue(self) -> None:
        attempt = self._run.attempt
        if attempt is None or not attempt.failures or self._run.debugging.is_open:
            return
        if self._run.engine.is_in_doubt(attempt.failing_since):  # a loss is about to be reported
            self._run.deadlines.set(Deadline.CAUSE, CAUSE_TIMEOUT_S / 2)
        elif not self._run.inbox.empty():  # the cause may be in it
            self._run.deadlines.set(Deadline.CAUSE, 0.0)
        else:
            self._end_failed(attempt)

    def _end_failed(self, attempt: Attempt) -> None:
        """End a failed attempt.

        A lone rank that has raised blocks no other. Its process may live on (inline), so the backend's shutdown hooks
        run there.
        """
        is_lone = attempt.world_size == 1 and attempt.phase == phases.TRAINING
        if is_lone and attempt.members[0].outcome is not None:
            self._run.flow.shut_down(attempt)
        else:
            self._clearing.clear(attempt, DecideOnRetry())

    # -- retry or give up

    def decide(self) -> None:
        """All processes of an attempt are gone: start the next attempt or end the run."""
        run, attempt = self._run, self._run.attempt
        run.startup.over()
        assert attempt is not None
        regroup = run.steering.regroup
        is_preempted = regroup is not None and regroup.cause == "notice"
        self._early_deaths = 0 if attempt.has_trained else self._early_deaths + 1
        if attempt.losses and not failure_policy.cause_is_known(attempt.failures):
            attempt.failures.clear()  # they only echo the loss
        if attempt.failures:
            decision = self._after_failure(attempt)
        elif attempt.losses or is_preempted:
            decision = self._after_loss(attempt, regroup)
        else:
            decision = failure_policy.FailureDecision("retry", "the ranks were brought to a boundary for it")
        if attempt.group is not None and not attempt.shut_down:
            # Its workers are gone; the hooks clean up in the driver.
            self._starting.run_hooks(attempt, "shutdown")
        retries = decision.retry and run.stop.request is None
        self._reports.warn_of_lost_reports(attempt, run.checkpoints.newest_row if retries else None)
        if retries:
            self._settling.wait(RetryAfter(decision.delay), self._settling.patience, continues=True)
            return
        run.stop.is_decided = True
        end = EndRun()
        if not attempt.failures and run.stop.request is None and is_preempted:
            end = EndRun(lifecycle.PREEMPTED, decision.reason)
        elif not self._is_excused(attempt) and (attempt.failures or run.stop.request is None):
            end = EndRun(lifecycle.FAILED, decision.reason)
        self._settling.wait(end, self._settling.patience)

    def _is_excused(self, attempt: Attempt) -> bool:
        """Return True when the requested end counts, whatever became of ranks on the way: one may be killed."""
        stop = self._run.stop
        if stop.cause not in ("interrupt", "notice"):
            return False
        return stop.was_interrupted or all(failures.may_follow_a_notice(f) for f in attempt.failures)

    def _after_failure(self, attempt: Attempt) -> failure_policy.FailureDecision:
        run = self._run
        self.failures = tuple(failure_policy.order_by_cause(attempt.failures))
        decision = failure_policy.after_failure(
            run.state.failures, run.spec.max_failures, run.spec.fail_fast, self._early_deaths
        )
        if run.spec.on_hang == "fail" and any(failure.kind == "hung" for failure in self.failures):
            reason = 'FailureConfig(on_hang="fail") ends a run that hangs'
            decision = failure_policy.FailureDecision("give_up", reason)
        if not run.engine.restarts:
            decision = _LAUNCHER_DECIDES
        run.record(
            ev.Failed(
                time=run.clock.time(),
                attempt=attempt.number,
                failures=self.failures,
                decision=decision.action,
                reason=decision.reason,
                delay=decision.delay,
            )
        )
        run.callbacks.call("after_exception", exceptions_of(self.failures))
        return decision

    def _after_loss(self, attempt: Attempt, regroup: Regroup | None) -> failure_policy.FailureDecision:
        """Slots were lost, or given up before that because a notice had come for them."""
        if attempt.losses:
            ranks = tuple(rank for rank, _ in attempt.losses)
            lost = {attempt.placements[rank].slot.id for rank in ranks}
            is_preempted = bool(lost & self._run.noticed_slots)
            return self._record_loss(attempt.number, ranks, attempt.losses[0][1], is_preempted=is_preempted)
        assert regroup is not None
        return self._record_loss(attempt.number, regroup.ranks, regroup.reason, is_preempted=True)

    def _record_loss(
        self, attempt: int, ranks: tuple[int, ...], why: str, *, is_preempted: bool = False
    ) -> failure_policy.FailureDecision:
        run = self._run
        decision = failure_policy.after_loss(
            run.state.losses_since_commit,
            preempted=is_preempted,
            preemptions_before=run.state.preemptions,
            max_preemptions=run.spec.max_preemptions,
        )
        if not run.engine.restarts:
            decision = _LAUNCHER_DECIDES
        run.record(
            ev.Lost(
                time=run.clock.time(),
                attempt=attempt,
                ranks=ranks,
                decision=decision.action,
                reason=f"{why}: {decision.reason}",
                preempted=is_preempted,
            )
        )
        return decision

    def retry_after(self, delay: float) -> None:
        """Start the next attempt in ``delay`` seconds."""
        if delay > 0:
            self._run.deadlines.set(Deadline.RETRY, delay)
        else:
            self.retry()

    def retry(self) -> None:
        """Start again from the newest commit: on the slots that are left, or on new ones in place of lost ones."""
        run = self._run
        attempt, regroup = run.attempt, run.steering.take()
        run.startup.slots_asked()
        run.attempt = run.notice = None
        run.deadlines.cancel(Deadline.GRACE)
        self._reports.reset_to(run.checkpoints.newest)
        run.slots.reservation.withdraw()  # growth goes on when the ranks train again
        if regroup is not None:
            run.slots.drop(regroup.drop)
        if not (run.elastic.is_elastic and run.slots.held):
            run.slots.again()
            return
        spare = len(run.slots.reservation.slots)
        workers = len(run.slots.held) + min(spare, max(0, run.state.world_size - len(run.slots.held)))
        workers = max(workers, run.spec.min_workers)
        reason = attempt.losses[0][1] if attempt is not None and attempt.losses else ""
        if regroup is not None:
            workers, reason = regroup.workers, regroup.reason
        if workers != run.state.world_size or (regroup is not None and regroup.cause == "resize"):
            run.record(
                ev.Resized(
                    time=run.clock.time(), attempt=run.state.attempt, world_size=workers, reason=reason
                )
            )
        run.slots.change_to(workers)
