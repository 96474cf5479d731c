"""What ranks report: points that are kept, rows that close, ranks that are late, functions that end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from powertrain.checkpoint.manifest import Manifest
from powertrain.checkpoint.staging import sealed_reports
from powertrain.engine import base
from powertrain.run import events as ev
from powertrain.run import stopping
from powertrain.run.active_run import ActiveRun
from powertrain.run.checkpoints.settling import Settling
from powertrain.run.checkpoints.unsaved import error_text
from powertrain.run.deadlines import Deadline
from powertrain.run.forced_end import EndedAtOnce
from powertrain.run.health import failures
from powertrain.run.health.hang_report import rank_names
from powertrain.run.health.watching import HangWatch
from powertrain.run.metrics.points import PointRecord
from powertrain.run.next_steps import DecideOnRetry
from powertrain.run.workers import attempt as phases
from powertrain.run.workers import launch
from powertrain.run.workers.attempt import Attempt, Member
from powertrain.run.workers.rows import Row
from powertrain.text.errors import describe_error
from powertrain.wire.from_controller import RowClosed
from powertrain.wire.from_worker import Arrived, Outcome
from powertrain.wire.values import Point
from powertrain.worker.checkpoints.newest_reports import read_newest_reports

#: Rows of a dead rank that are looked for.
_MOST_MISSING = 100_000
#: Seconds for which ranks that have reported wait for one that never has.
ABSENT_TIMEOUT_S = 30.0
#: Seconds between two messages about a rank that is behind.
LATE_INTERVAL_S = 5.0
#: Seconds for ranks without any report to end after the others have stopped.
LAGGARD_TIMEOUT_S = 5.0


class Reports:
    """Reports of the ranks, from points to the end of their functions. The controller's thread only."""

    def __init__(
        self, run: ActiveRun, settling: Settling, watch: HangWatch, resumed_from: Manifest | None
    ) -> None:
        self._run, self._settling, self._watch = run, settling, watch
        #: Points that have arrived and are not in the metrics store yet.
        self._unkept: list[PointRecord] = []
        #: Rank 0's last report, and its last one outside rows; with the objects among their values.
        self._last: dict[str, Any] | None = dict(resumed_from.metrics) if resumed_from is not None else None
        self._last_originals: dict[str, bytes] = {}
        self._last_solo: dict[str, Any] | None = None
        self._solo_originals: dict[str, bytes] = {}
        #: The (attempt, row) that some ranks have reached and others not, and since when.
        self._awaited, self._awaited_since = (-1, 0), 0.0
        #: When the newest row was complete (monotonic); 0.0 before the first.
        self.row_closed_at = 0.0
        #: The pickled return value of rank 0.
        self.value = b""

    # -- points

    def can_follow(self, member: Member, point: Point, before: int) -> bool:
        """Return False for a row that no loop can make after ``before`` unhandled points of the rank.

        Rows follow each other; one far ahead would make the run wait for all those in between. An attempt that is over
        waits for nothing, and its points are only kept.
        """
        if point.solo or member.attempt is not self._run.attempt:
            return True
        last = max(member.attempt.rows.last_row(member.rank), member.attempt.first_row - 1)
        if point.row <= last + before + 1:
            return True
        self._run.warn_once(
            f"Rank {member.rank} sent a report of row {point.row} after row {last + before}, which no loop can "
            "make: it is not kept."
        )
        return False

    def add(self, member: Member, points: list[Point]) -> None:
        """Keep every point; those of the current attempt also close rows."""
        if member.recovered:  # a report found after the rank's death may still arrive by the wire
            points = [point for point in points if point.solo or point.row not in member.recovered]
        if not points:
            return
        if member.missing:
            member.missing -= {point.row for point in points}
        number, rank = member.attempt.number, member.rank
        self._unkept += [
            PointRecord(rank=rank, attempt=number, row=p.row, at=p.at, solo=p.solo, metrics=p.metrics)
            for p in points
        ]
        attempt = self._run.attempt
        if attempt is None or member.attempt is not attempt:
            return
        rows: list[Row] = []
        for point in points:
            rows += self._rows_of(attempt, member, point)
        self._run.hangs.on_report(rank, attempt.rows.last_row(rank))
        self.close_rows(attempt, rows)
        self.watch_late_ranks(attempt)

    def _rows_of(self, attempt: Attempt, member: Member, point: Point) -> list[Row]:
        """Enter a point into the table of rows and return the rows that it completes."""
        rank = member.rank
        if point.solo and rank == 0:
            self._last_solo, self._solo_originals = point.metrics, point.originals
        if point.solo or (member.exited and point.row <= attempt.rows.last_row(rank)):
            return []
        if rank == 0:
            self._last, self._last_originals = point.metrics, point.originals
        if point.barrier:
            attempt.barrier_rows.setdefault(point.row, set()).add(rank)
        return attempt.rows.add(rank, point)

    def flush(self) -> None:
        """Hand the points that have arrived to the metrics store."""
        if self._unkept:
            points, self._unkept = self._unkept, []
            self._run.metrics.add(points)

    # -- rows

    def close_rows(self, attempt: Attempt, rows: list[Row]) -> None:
        """Act on rows that are complete."""
        run = self._run
        if rows and not attempt.first_row_seen:
            attempt.first_row_seen = True
            run.consider_resize()  # from here on it is known whether the loop can save on request
        if rows:
            self.row_closed_at = run.deadlines.now()
        for row in rows:
            if row.metrics:
                self._on_row(attempt, row)
            if row.parts:
                self.flush()  # a resume from the checkpoint relies on the points before it
                self._settling.begin(attempt, row)
            if row.complete:
                stop = attempt.stops_at.pop(row.number, "")
                for rank in attempt.barrier_rows.pop(row.number, ()):
                    run.send(attempt.members[rank], RowClosed(row=row.number, stop=stop))
        if rows:
            run.queries.answer()
        run.steering.check_commits(attempt)

    def _on_row(self, attempt: Attempt, row: Row) -> None:
        """Show a row, call the callbacks that do not wait for a checkpoint, and check the stop criterion."""
        run = self._run
        run.observer.row(row.number, row.metrics, run.clock.time())
        if run.spec.callbacks and not row.parts:
            run.callbacks.call("after_report", [m or {} for m in row.metrics], None)
        is_running = attempt.phase in (phases.TRAINING, phases.SHUTTING_DOWN)
        is_checked = run.stop.request is None or run.spec.stop_sees_all
        if is_running and is_checked and row.metrics[0] is not None:
            self._stop_if_reached(attempt, row, row.metrics[0])

    def _stop_if_reached(self, attempt: Attempt, row: Row, metrics: Mapping[str, Any]) -> None:
        run = self._run
        try:
            reason = stopping.reason_to_stop(
                run.spec.stop,
                run.spec.run.name,
                row.number,
                metrics,
                run.deadlines.now() - run.began,
                bool(row.parts) if run.spec.stop_sees_all else None,
            )
        except EndedAtOnce:
            raise
        except BaseException as error:  # also SystemExit: only the returned value ends the run
            run.warn(f"RunConfig(stop=...) raised {describe_error(error)}. The run goes on.")
            return
        if not reason or run.stop.request is not None:
            return
        is_agreed = isinstance(reason, stopping.StopHere) and self._can_stop_at(attempt, row, reason)
        if is_agreed:
            attempt.stops_at[row.number] = str(reason)
        run.flow.stop("criterion", str(reason), is_agreed=is_agreed)

    @staticmethod
    def _can_stop_at(attempt: Attempt, row: Row, reason: stopping.StopHere) -> bool:
        """Return True when every rank waits at this row, and it has the checkpoint that the reason needs."""
        waiting = attempt.barrier_rows.get(row.number, set())
        is_saved = reason.is_final or bool(row.parts)
        running = {member.rank for member in attempt.running()}
        return row.complete and is_saved and attempt.phase == phases.TRAINING and running <= waiting

    # -- late and absent ranks

    def watch_late_ranks(self, attempt: Attempt) -> None:
        """Set or cancel the deadlines for ranks that are behind."""
        deadlines = self._run.deadlines
        if self._run.debugging.is_open or attempt.phase == phases.CLEARING:
            return
        if attempt.rows.newest <= attempt.rows.closed:
            deadlines.cancel(Deadline.LATE, Deadline.ABSENT)
            return
        interval, awaited = LATE_INTERVAL_S + attempt.gather, (attempt.number, attempt.rows.closed + 1)
        if awaited != self._awaited:
            self._awaited, self._awaited_since = awaited, deadlines.now()
            deadlines.set(Deadline.LATE, interval)
        deadlines.set_if_unset(Deadline.LATE, interval)
        # A global barrier waits for every rank, however long it takes to its first report.
        if attempt.rows.waits_for_first_reports and not self._run.spec.report_barrier:
            deadlines.set_if_unset(Deadline.ABSENT, ABSENT_TIMEOUT_S)

    def on_late(self) -> None:
        """Show the ranks that others wait for."""
        run, attempt = self._run, self._run.attempt
        if attempt is None or not (behind := attempt.rows.behind()):
            return
        waited = run.deadlines.now() - self._awaited_since
        run.observer.waiting(attempt.rows.closed + 1, behind, waited)
        run.deadlines.set(Deadline.LATE, LATE_INTERVAL_S)

    def on_absent(self) -> None:
        """Close rows without the ranks that have never reported."""
        attempt = self._run.attempt
        if attempt is None or not (ranks := attempt.rows.never_reported()):
            return
        row, now = attempt.rows.closed + 1, self._run.clock.time()
        self._run.record(ev.RanksAbsent(time=now, attempt=attempt.number, row=row, ranks=tuple(ranks)))
        self.close_rows(attempt, attempt.rows.declare_absent(ranks))

    def on_debuggers_closed(self, seconds: float) -> None:
        """Do not count the time for which a debugger held a rank."""
        self._awaited_since += seconds
        if self._run.attempt is not None and self._run.attempt.phase == phases.TRAINING:
            self.watch_late_ranks(self._run.attempt)

    # -- collectives and ends

    def on_arrival(self, member: Member, message: Arrived) -> None:
        """A rank has called a collective of the controller."""
        member.attempt.arrive(member.rank, message)
        self._release_collectives(member.attempt)

    def _release_collectives(self, attempt: Attempt) -> None:
        for opened, members in attempt.pop_finished_collectives():
            for member in members:
                self._run.send(member, opened)

    def on_outcome(self, member: Member, message: Outcome) -> None:
        """The user's function has ended on a rank."""
        run, attempt = self._run, member.attempt
        if member.outcome is not None:
            return
        attempt.end(member, message)
        error = message.error
        is_timeout = error is not None and failures.is_collective_timeout(error)
        hung = run.hangs.behind_timeout(member) if is_timeout else []
        run.hangs.on_rank_ended(member)
        self._watch.show_data(member, message.data)
        if error is not None:
            kind = "exit" if message.status == "exited" else "raised"
            run.flow.fail(member, failures.raised(member, error, kind, is_echo=bool(hung)))
            self._watch.fail_hung(hung)
            return
        if member.rank == 0:
            self.value = message.value
        self.close_rows(attempt, attempt.rows.end(member.rank))
        self.watch_late_ranks(attempt)
        self._release_collectives(attempt)
        run.steering.on_rank_ended(member)
        self._end_attempt_if_done(attempt)

    def _end_attempt_if_done(self, attempt: Attempt) -> None:
        """After the last function the attempt ends; ranks that cannot know of a stop have a moment to end too."""
        run = self._run
        regroups = run.steering.regroup is not None
        if attempt.phase == phases.TRAINING and attempt.all_done():
            if regroups and any(m.was_stopped for m in attempt.members):
                run.flow.clear(attempt, DecideOnRetry())
            else:
                run.flow.shut_down(attempt)
        elif (run.stop.request is not None or regroups) and all(
            attempt.rows.last_row(m.rank) == 0 for m in attempt.running()
        ):
            timeout = run.spec.signal_grace if run.spec.runs_scripts else LAGGARD_TIMEOUT_S
            run.deadlines.set_if_unset(Deadline.LAGGARDS, timeout)

    def recover(self, member: Member, event: base.Exited | None) -> None:
        """Add reports of a dead rank whose ``report()`` had returned but whose message did not reach the controller.

        They are on the rank's node. Where that is another machine, its agent has put them into ``event``.
        """
        attempt, rank, spec = member.attempt, member.rank, self._run.spec
        last = max(attempt.rows.last_row(rank), attempt.first_row - 1)
        kept = launch.mark_path(spec, attempt.number, rank)
        newest, reports = read_newest_reports(kept, after=last)
        with contextlib.suppress(OSError):
            os.remove(kept)
        by_row = {point.row: point for point in reports}
        by_row |= sealed_reports(launch.staging_root(spec), attempt.number, rank)
        if event is not None:
            newest = max(newest, event.row)
            by_row |= {point.row: point for point in event.reports}
        found = [point for row, point in sorted(by_row.items()) if row > last]
        if found:
            self.add(member, found)
            self.flush()
            member.recovered |= {point.row for point in found}
        attempt.has_trained |= newest > 0
        unsent = range(max(last + 1, newest - _MOST_MISSING), newest + 1)
        member.missing = {row for row in unsent if row not in by_row}
        self.close_rows(attempt, attempt.rows.reach(rank, newest))

    def warn_of_lost_reports(self, attempt: Attempt, up_to: int | None) -> None:
        """Warn of reports that had returned and whose metrics died with their rank.

        Args:
            attempt: The attempt, of which no process is left.
            up_to: The last row that counts: the next attempt makes later reports again. None where there is none.
        """
        missing = {
            member.rank: rows
            for member in attempt.members
            if (rows := [row for row in member.missing if up_to is None or row <= up_to])
        }
        if missing:
            lost = [row for rows in missing.values() for row in rows]
            which = f"row {lost[0]}" if len(set(lost)) == 1 else f"rows {min(lost)} to {max(lost)}"
            self._run.warn(
                f"{rank_names(sorted(missing)).capitalize()} ended before all reports of {which} were sent: metrics in "
                "them are missing in the results."
            )

    # -- the result

    def reset_to(self, newest: Manifest | None) -> None:
        """Forget what the last attempt reported after the checkpoint that the next one continues from."""
        self._last = dict(newest.metrics) if newest is not None else None
        self._last_originals = {}
        self.value = b""

    def final_metrics(self) -> tuple[dict[str, Any] | None, dict[str, bytes]]:
        """Return rank 0's last report and the objects in it; one outside rows only where there is no other."""
        if self._last is not None:
            return self._last, self._last_originals
        return self._last_solo, self._solo_originals

    def rows_closed(self) -> int:
        return self._run.attempt.rows.closed if self._run.attempt is not None else 0

    def summary(self) -> dict[str, Any]:
        """Return what ranks are sent with their dismissal: how the run ended, for processes that show it themselves."""
        state, request = self._run.state, self._run.stop.request
        summary: dict[str, Any] = {"metrics": self.final_metrics()[0], "rows": self.rows_closed()}
        if state.lost_last is not None:
            summary["unsaved"] = error_text(state.unsaved, state.newest_commit[1])
        if request is not None and request.cause == "notice":
            summary["preempted"] = request.reason
        elif request is not None and request.cause == "asked":
            summary["stopped"] = request.reason
        return summary
