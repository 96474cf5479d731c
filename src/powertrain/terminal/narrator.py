"""Plain lines about a run, for a stream that is not a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from powertrain.engine.registry import recorded_traits
from powertrain.run import events as ev
from powertrain.run.startup import report as startup_report
from powertrain.terminal.failures import failure_report, headline_of
from powertrain.terminal.lines import Line
from powertrain.terminal.text import (
    counted,
    data_size,
    duration,
    metrics_text,
    number,
    one_line,
    pace,
    rank_list,
)
from powertrain.terminal.view import checkpoint_text, late_text

if TYPE_CHECKING:
    from powertrain.terminal.view import RunView

#: Plain mode: at least this many seconds between two progress lines.
_PROGRESS_INTERVAL_S = 5.0
#: Seconds after which late ranks get a plain line.
_LATE_DELAY_S = 5.0


class Narrator:
    """Turns facts into plain lines. Pure: the same facts at the same times give the same lines.

    ``progress=False`` leaves out the content of a live region. ``verbose`` 0 keeps only warnings and
    failures, 2 adds each process, phase and commit.
    """

    def __init__(self, view: RunView, *, progress: bool = True, verbose: int = 1) -> None:
        self._view, self._verbose = view, verbose
        self.progress = progress and verbose > 0
        self._unannounced: ev.RunStarted | None = None
        self._last_progress = -math.inf
        self._new_commit = False
        self._last_slots_text = ""
        self._last_late: tuple[int, tuple[int, ...]] | None = None
        self._next_late = _LATE_DELAY_S

    def on_event(self, event: ev.Fact) -> list[Line]:
        """Return the lines for ``event``, which the view has already folded."""
        lines = self._announcement(event)
        match event:
            case ev.SlotsWaited():
                lines += self._slots_waited(event)
            case ev.WorkerStarted() if self._verbose > 1:
                lines.append(self._own(f"rank {event.rank} is up: process {event.pid} on {event.host}"))
            case ev.StartupMeasured() if startup_report.has_phases(event):
                lines += self._startup_measured(event)
            case ev.AttemptStarted():
                self._last_progress, self._last_late = -math.inf, None
            case ev.TrainingStarted() if self._verbose > 0:
                lines.append(self._own(self._training_started()))
            case ev.Committed():
                lines += self._committed(event)
            case ev.Informed() if self._verbose > 0:
                return [self._own(event.message)]
            case ev.Stopping() if self._verbose > 0:
                lines.append(self._own(f"stopping ({event.cause}): {event.reason}", "yellow"))
            case ev.UploadLagged() | ev.CheckpointFailed() | ev.ValidationEnded():
                lines += self._checkpoint_lines(event)
            case ev.Notified() | ev.HangNoticed() | ev.HangOver():
                lines += self._notice_lines(event)
            case ev.Failed() | ev.Lost() | ev.Resized() | ev.RanksAbsent() | ev.Warned():
                lines += self._problem_lines(event)
        return lines

    def on_row(self, now: float) -> list[Line]:
        """Return a progress line if one is due."""
        if not self.progress or now - self._last_progress < _PROGRESS_INTERVAL_S:
            return []
        self._last_progress = now
        view = self._view
        parts = [f"row {number(view.row)}", pace(view.rate()), metrics_text(view.metrics)]
        parts.append(one_line(view.data, 120))
        if self._new_commit:
            parts.append(checkpoint_text(view) + " committed")
            self._new_commit = False
        return [self._own(", ".join(part for part in parts if part))]

    def on_waiting(self, now: float) -> list[Line]:
        """Return a line when ranks are late for long, and again each time the wait has doubled."""
        late = self._view.late
        if late is None or not self.progress:
            return []
        if self._last_late != (late.row, late.ranks):
            self._last_late, self._next_late = (late.row, late.ranks), _LATE_DELAY_S
        if late.waited(now) < self._next_late:
            return []
        self._next_late = 2 * late.waited(now)
        return [self._own(late_text(late, now))]

    def _own(self, text: str, style: str = "") -> Line:
        return Line(f"[{self._view.name}] {text}", style=style)

    def _announcement(self, event: ev.Fact) -> list[Line]:
        """Return the start line, which is delayed until the fact after ``RunStarted`` has the number of workers."""
        if isinstance(event, ev.RunStarted):
            self._unannounced = event
            return []
        started, self._unannounced = self._unannounced, None
        if started is None or self._verbose == 0:
            return []
        workers = f", {counted(self._view.workers, 'worker')}" if isinstance(event, ev.SlotsRequested) else ""
        if started.min_workers < started.max_workers:
            workers = f", {started.min_workers} to {started.max_workers} workers"
        onward = f", resumes from row {started.row}" if started.checkpoint else ""
        return [self._own(f"run started in {self._view.path} ({started.engine} engine{workers}{onward})")]

    def _slots_waited(self, event: ev.SlotsWaited) -> list[Line]:
        text = f"{event.granted} of {event.count} slots are available, {event.reason}"
        if text == self._last_slots_text or not self.progress:
            return []
        self._last_slots_text = text
        return [self._own(text)]

    def _training_started(self) -> str:
        view = self._view
        begin = f", from row {view.row + 1}" if view.row else ""
        where = counted(view.world_size, "worker")
        return f"training started on {where} after {duration(view.startup_seconds)}{begin}"

    def _startup_measured(self, event: ev.StartupMeasured) -> list[Line]:
        """Return the start-up line and its advice; nothing by default for a start without a first step."""
        if self._verbose == 0 or (event.unfinished and self._verbose < 2):
            return []
        lines = [self._own(startup_report.line(event))]
        if self._verbose > 1:
            lines += [Line("  " + text) for text in startup_report.table(event)]
        return lines + [self._own(f"start-up: {text}") for text in startup_report.advice(event)]

    def _committed(self, event: ev.Committed) -> list[Line]:
        """Return a line for a rare commit; frequent ones are added to the next progress line."""
        rare = self.progress and event.time - self._last_progress >= _PROGRESS_INTERVAL_S
        if self._verbose > 1 or rare:
            self._new_commit = False
            return [self._own(f"{checkpoint_text(self._view)} committed: {event.checkpoint}")]
        self._new_commit = True
        return []

    def _checkpoint_lines(
        self, event: ev.UploadLagged | ev.CheckpointFailed | ev.ValidationEnded
    ) -> list[Line]:
        match event:
            case ev.UploadLagged():
                why = f": {event.reason}" if event.reason else ""
                text = (
                    f"{counted(event.waiting, 'checkpoint')} ({data_size(event.bytes)}) not in storage yet, the "
                    f"oldest (row {event.row}) for {duration(event.seconds)}{why}"
                )
                return [self._own(text, "yellow")]
            case ev.CheckpointFailed():
                return [self._own(f"the checkpoint of row {event.row} was NOT saved: {event.reason}", "red")]
            case ev.ValidationEnded() if event.status == "VALIDATED" and self._verbose > 0:
                found = metrics_text(event.metrics)
                return [self._own(f"{event.checkpoint} validated in {duration(event.seconds)}: {found}")]
            case ev.ValidationEnded() if event.status != "VALIDATED":
                return [self._own(f"the validation of {event.checkpoint} failed: {event.reason}", "yellow")]
        return []

    def _notice_lines(self, event: ev.Notified | ev.HangNoticed | ev.HangOver) -> list[Line]:
        """Return lines for a preemption notice, a suspected hang, and the end of a hang."""
        match event:
            case ev.Notified():
                left = f" ({duration(max(0.0, event.deadline - event.time))} left)" if event.deadline else ""
                return [self._own(f"notice: {event.reason}{left}", "yellow")]
            case ev.HangNoticed():
                first, *more = event.message.splitlines()
                kept = [f"All stacks: {self._view.path}/{event.stacks}"] if event.stacks else []
                lines = [self._own(first, "yellow")]
                return lines + [Line("  " + text, style="yellow") for text in (*more, *kept)]
            case ev.HangOver():
                return [self._own(f"progress resumed after {duration(event.seconds)}", "yellow")]

    def _problem_lines(
        self, event: ev.Failed | ev.Lost | ev.Resized | ev.RanksAbsent | ev.Warned
    ) -> list[Line]:
        match event:
            case ev.Failed():
                return self._failed(event)
            case ev.Lost():
                text = f"{rank_list(event.ranks)} lost: {event.reason}" if event.ranks else event.reason
                return [self._own(text, "yellow")]
            case ev.Resized():
                workers = counted(event.world_size, "worker")
                return [self._own(f"continuing with {workers}: {event.reason}", "yellow")]
            case ev.RanksAbsent():
                text = (
                    f"warning: {rank_list(event.ranks)} never reported while others wait at row {event.row}; "
                    "rows close without them. Call report() on every rank, or with solo=True on one."
                )
                return [self._own(text, "yellow")]
            case ev.Warned():
                who = f" (rank {event.rank})" if event.rank >= 0 else ""
                return [self._own(f"warning{who}: {event.message}", "yellow")]

    def _failed(self, event: ev.Failed) -> list[Line]:
        """Return the whole report if the run continues; otherwise one line, because the raised error has the report."""
        if event.decision == "give_up":
            first = next((f for f in event.failures if not f.secondary), None)
            what = one_line(headline_of(first), 300) if first else "failed"
            return [self._own(f"attempt {event.attempt} failed: {what}; {event.reason}", "red")]
        # Ranks that share the driver's output have no log files.
        logs = f"{self._view.path}/logs" if recorded_traits(self._view.engine).owns_processes else ""
        report = failure_report(event.failures, event.reason, logs=logs)
        when = f" in {duration(event.delay)}" if event.delay else ""
        lines = [self._own(f"attempt {event.attempt} failed; the run continues{when}", "red")]
        return lines + [Line("  " + text, style="red") for text in report.splitlines()]
