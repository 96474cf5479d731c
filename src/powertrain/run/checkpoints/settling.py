"""From a reported checkpoint to a settled one: committed or failed; notifications, and the wait for it."""

from __future__ import annotations

import contextlib
from typing import Any

from powertrain.checkpoint.manifest import Manifest
from powertrain.checkpoint.staging import remove_share
from powertrain.errors import FencedError
from powertrain.run import events as ev
from powertrain.run.active_run import ActiveRun
from powertrain.run.checkpoints.pending import PendingCheckpoint
from powertrain.run.checkpoints.validating import Validating
from powertrain.run.deadlines import Deadline
from powertrain.run.next_steps import NextStep
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.run.workers.rows import Row
from powertrain.storage import safety
from powertrain.text.errors import message_of
from powertrain.wire.from_controller import CheckpointSettled, Unstaged
from powertrain.wire.from_worker import StagingFull

#: Seconds that a restart waits for checkpoints that are on their way, so that their steps need not be repeated.
SETTLE_TIMEOUT_S = 60.0
#: The same for a run that was asked twice to end.
CUT_SHORT_TIMEOUT_S = 2.0
#: Seconds after which a checkpoint that is not in storage yet is reported; then after twice as long each time.
_LAG_INTERVAL_S = 10.0
#: The same while the run waits for nothing else, such as at its end.
_AWAITED_LAG_INTERVAL_S = 2.0
#: Seconds of a preemption's notice that are kept for exiting.
_EXIT_RESERVE_S = 1.0


class Settling:
    """The checkpoints that are on their way, and the step that waits for them. The controller's thread only."""

    def __init__(self, run: ActiveRun, validating: Validating) -> None:
        self._run, self._validating = run, validating
        #: What follows once every reported checkpoint is settled; None while nothing waits for that.
        self._next: NextStep | None = None
        #: Seconds that the oldest upload had taken when it was last reported.
        self._lag_reported = 0.0
        #: By attempt and row the reports with checkpoints, for the callback that follows when they are settled.
        self._reports: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._is_space_checked = False

    # -- one checkpoint

    def begin(self, attempt: Attempt, row: Row) -> None:
        """Have the shares of a complete row uploaded and committed."""
        if self._run.spec.callbacks and row.metrics:
            self._reports[(attempt.number, row.number)] = [m or {} for m in row.metrics]
        self._run.checkpoints.begin(attempt, row)
        self._schedule_lag()

    def on_settled(
        self, pending: PendingCheckpoint, manifest: Manifest | None, reason: BaseException | str
    ) -> None:
        """A reported checkpoint is committed (``manifest``), or never will be (``reason``)."""
        run, value = self._run, None
        if manifest is not None:
            value = run.checkpoints.value(manifest)
            self._on_committed(pending, manifest)
        else:
            self._record_failure(
                pending.attempt,
                pending.row,
                pending.name,
                message_of(reason),
                run.checkpoints.place_of(pending),
            )
        self._notify_ranks(pending, value.address if value is not None else "", message_of(reason))
        if (metrics := self._reports.pop(pending.key, None)) is not None:
            run.callbacks.call("after_report", metrics, value)
        if isinstance(reason, FencedError):
            run.flow.lose_lease(reason)
        self._schedule_lag()
        run.queries.answer()
        if run.attempt is not None:
            run.steering.check_commits(run.attempt)
        self._proceed_if_settled()

    def _on_committed(self, pending: PendingCheckpoint, manifest: Manifest) -> None:
        run = self._run
        run.record(
            ev.Committed(
                time=run.clock.time(),
                attempt=pending.attempt,
                row=pending.row,
                checkpoint=manifest.name,
                bytes=manifest.bytes,
                files=len(manifest.files),
            )
        )
        self._validating.validate(manifest)
        self._check_space(manifest)
        self._validating.discard_old()
        if run.steering.on_commit(run.deadlines.now() - pending.since):
            run.consider_resize()

    def _record_failure(self, attempt: int, row: int, checkpoint: str, reason: str, place: str = "") -> None:
        self._run.record(
            ev.CheckpointFailed(
                time=self._run.clock.time(),
                attempt=attempt,
                row=row,
                checkpoint=checkpoint,
                reason=reason,
                place=place,
            )
        )

    def _check_space(self, manifest: Manifest) -> None:
        """Warn where the disk is too small: the first checkpoint shows what those to come will take."""
        path = self._run.storage.local_path("checkpoints")
        if path is None or self._is_space_checked:
            return
        self._is_space_checked = True
        with contextlib.suppress(OSError):
            kept = self._run.spec.checkpoints.num_to_keep
            remark = safety.space_remark(safety.free_bytes(path), manifest.bytes, kept)
            if remark:
                self._run.warn(remark)

    def _notify_ranks(self, pending: PendingCheckpoint, path: str, error: str) -> None:
        attempt = self._run.attempt
        if attempt is not None and attempt.number == pending.attempt:
            for rank in pending.parts:
                if not attempt.members[rank].exited:
                    self._run.send(
                        attempt.members[rank], CheckpointSettled(row=pending.row, path=path, error=error)
                    )

    def on_unstaged(self, pending: PendingCheckpoint, rank: int) -> None:
        """The share of ``rank`` has left its staging area."""
        attempt = self._run.attempt
        if attempt is not None and attempt.number == pending.attempt and not attempt.members[rank].exited:
            self._run.send(attempt.members[rank], Unstaged(row=pending.row))

    def on_staging_full(self, member: Member, message: StagingFull) -> None:
        if self._run.spec.checkpoints.on_full == "replace":
            self._run.checkpoints.make_staging_room(message.row, member.rank)
        else:
            self._run.warn(
                f"The staging area of rank {member.rank} is full ({message.limit:,} bytes): report() blocks until an "
                'older checkpoint is uploaded. CheckpointConfig(on_full="replace") drops the older one instead.',
                member.rank,
            )

    def abandon_open_rows(self, attempt: Attempt) -> None:
        """Give up rows that some rank never reported: there is no whole checkpoint in them."""
        for row, parts in sorted(attempt.rows.abandon().items()):
            for part in parts.values():
                if part.staged:
                    remove_share(part.staged)
            missing = [m.rank for m in attempt.members if attempt.rows.last_row(m.rank) < row]
            name = next((p.checkpoint for p in parts.values() if p.checkpoint), "")
            self._record_failure(attempt.number, row, name, f"ranks {missing} never made that report")

    # -- slow uploads

    def _schedule_lag(self) -> None:
        pending = self._run.checkpoints.pending
        if not pending:
            self._run.deadlines.cancel(Deadline.LAG)
            self._lag_reported = 0.0
        else:
            least = _AWAITED_LAG_INTERVAL_S if self.is_awaited else _LAG_INTERVAL_S
            after = max(least, 2 * self._lag_reported)
            self._run.deadlines.set_at(Deadline.LAG, pending[0].since + after)

    def on_lag(self) -> None:
        """The oldest upload takes long: record that, and schedule the next report."""
        run, pending = self._run, self._run.checkpoints.pending
        if not pending:
            return
        self._lag_reported = run.deadlines.now() - pending[0].since
        run.record(
            ev.UploadLagged(
                time=run.clock.time(),
                attempt=pending[0].attempt,
                row=pending[0].row,
                seconds=round(self._lag_reported, 1),
                waiting=len(pending),
                bytes=sum(checkpoint.bytes for checkpoint in pending),
                reason=next((p.trouble for p in pending if p.trouble), ""),
            )
        )
        self._schedule_lag()

    # -- waiting for all

    @property
    def is_awaited(self) -> bool:
        """True while a step of the run waits for storage."""
        return self._next is not None

    @property
    def patience(self) -> float:
        """Seconds for storage to take what is on its way when an attempt is over."""
        notice = self._run.notice
        if self._run.stop.is_cut_short:
            return CUT_SHORT_TIMEOUT_S
        if notice is not None and notice.deadline:
            left = notice.deadline - self._run.clock.time() - _EXIT_RESERVE_S
            return min(SETTLE_TIMEOUT_S, max(CUT_SHORT_TIMEOUT_S, left))
        return SETTLE_TIMEOUT_S

    def wait(self, then: NextStep, timeout: float, *, continues: bool = False) -> None:
        """Take the step ``then`` once every reported checkpoint is settled, at the latest after ``timeout`` seconds.

        Shares that storage has not taken by then stay where they are; a run that ``continues`` comes to the same rows
        again and discards them.
        """
        self._next, self._run.checkpoints.last_chance = then, not continues
        self._run.deadlines.set(Deadline.SETTLED, timeout)
        self._schedule_lag()
        self._proceed_if_settled()

    def shorten(self, timeout: float) -> None:
        """Wait no longer than ``timeout`` seconds, if anything waits."""
        if Deadline.SETTLED in self._run.deadlines:
            self._run.deadlines.shorten(Deadline.SETTLED, timeout)

    def _proceed_if_settled(self) -> None:
        if self._next is not None and not self._run.checkpoints.pending:
            self._run.deadlines.cancel(Deadline.SETTLED)
            then, self._next = self._next, None
            self._run.flow.proceed(then)

    def on_overdue(self) -> None:
        """Storage has not taken all checkpoints in time: proceed without the others."""
        checkpoints = self._run.checkpoints
        self._run.deadlines.cancel(Deadline.SETTLED)
        for checkpoint in checkpoints.pending:
            why = f" ({checkpoint.trouble})" if checkpoint.trouble else ""
            if checkpoints.last_chance:
                checkpoints.leave(checkpoint, f"its upload did not finish in time{why}")
            else:
                checkpoints.fail(checkpoint, f"its upload did not finish before the restart{why}")
