"""The state of a run as the terminal shows it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.checkpoints.unsaved import UnsavedCheckpoint, fold
from powertrain.terminal.text import (
    RANK_COLOURS,
    STATE_COLOURS,
    clock,
    counted,
    data_size,
    duration,
    metric_pairs,
    number,
    one_line,
    pace,
    rank_list,
)
from powertrain.text.printable import escape_controls, without_colours

#: The rate is taken over about this many seconds, from at most this many samples.
_RATE_SECONDS = 30.0
_RATE_SAMPLES = 128


@dataclass
class Late:
    """Ranks that have not reported a row which others have."""

    row: int
    ranks: tuple[int, ...]
    #: Seconds that the others had waited at ``at`` (Unix seconds).
    seconds: float
    at: float

    def waited(self, now: float) -> float:
        """Seconds the others have waited by ``now``."""
        return self.seconds + max(0.0, now - self.at)


@dataclass
class RunView:
    """The displayed state of a run, folded from facts. Its size does not grow with the run's length."""

    name: str = ""
    path: str = ""
    engine: str = ""
    state: str = lifecycle.NEW
    reason: str = ""
    started: float = 0.0
    #: Requested workers, and missing resources while slots are waited for.
    workers: int = 0
    waiting_for: str = ""
    #: Number of the attempt, how many this controller began, when this one began.
    attempt: int = 0
    attempts: int = 0
    attempt_started: float = 0.0
    world_size: int = 0
    #: Ranks whose process has connected.
    up: set[int] = field(default_factory=set)
    #: Seconds of the start so far, by phase.
    phases: dict[str, float] = field(default_factory=dict)
    slots_requested: float = 0.0
    #: From the attempt's begin to its training; 0 until then.
    startup_seconds: float = 0.0
    row: int = 0
    row_time: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    late: Late | None = None
    #: Position of rank 0 in its data: "train: epoch 3, 45 %".
    data: str = ""
    checkpoint: str = ""
    checkpoint_row: int = 0
    checkpoint_bytes: int = 0
    #: Checkpoints of this start that were lost.
    unsaved: tuple[UnsavedCheckpoint, ...] = ()
    ended: ev.Ended | None = None
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_SAMPLES))

    def on_event(self, event: ev.Fact) -> None:
        """Fold one fact. A fact out of order is shown as it comes: the view does not validate it."""
        try:
            self.state = lifecycle.next_state(self.state, event)
        except lifecycle.IllegalTransition:
            if isinstance(event, ev.Ended):
                self.state = event.state
        self.unsaved = fold(self.unsaved, event)
        match event:
            case ev.RunStarted():
                self._begin_run(event)
            case ev.AttemptStarted():
                self._begin_attempt(event)
            case ev.SlotsRequested(count=count):
                self.workers, self.waiting_for, self.slots_requested = count, "", event.time
            case ev.SlotsWaited():
                self.workers, self.waiting_for = event.count, event.reason
            case ev.WorkerStarted():
                self.up.add(event.rank)
                self.phases["processes"] = max(0.0, event.time - self.attempt_started)
            case ev.TrainingStarted():
                self.startup_seconds = max(0.0, event.time - (self.attempt_started or event.time))
                hooks = self.startup_seconds - self.phases.get("processes", 0.0)
                self.phases["process group"] = max(0.0, hooks)
            case ev.Committed():
                self.checkpoint, self.checkpoint_row = event.checkpoint, event.row
                self.checkpoint_bytes = event.bytes
            case ev.Resized():
                self.workers, self.reason, self.late = event.world_size, event.reason, None
            case ev.Stopping() | ev.Failed() | ev.Lost():
                self.reason, self.late = event.reason, None
            case ev.Ended():
                self.ended, self.reason, self.late = event, event.reason, None

    def on_row(self, row: int, metrics: Mapping[str, Any] | None, time: float) -> None:
        """Record that ``row`` closed at ``time``; ``metrics`` are rank 0's, None if it took no part."""
        self.row, self.row_time = row, time
        if metrics is not None:
            self.metrics = dict(metrics)
        if self.late and row >= self.late.row:
            self.late = None
        # Samples are thinned so that a fast run is measured over seconds, not over its last few rows.
        if not self._samples or time - self._samples[-1][0] >= _RATE_SECONDS / _RATE_SAMPLES:
            self._samples.append((time, row))
        while len(self._samples) > 2 and time - self._samples[0][0] > _RATE_SECONDS:
            self._samples.popleft()

    def on_waiting(self, row: int, ranks: Sequence[int], seconds: float, at: float = 0.0) -> None:
        """Record ranks that have not reported ``row`` while others have for ``seconds``; none if empty."""
        self.late = Late(row, tuple(ranks), seconds, at) if ranks else None

    def on_data(self, text: str) -> None:
        """Record the position in the data."""
        self.data = text

    def rate(self) -> float:
        """Return the recent rows per second; 0 until two rows are known."""
        if not self._samples:
            return 0.0
        began, first = self._samples[0]
        elapsed = self.row_time - began
        return (self.row - first) / elapsed if elapsed > 0 and self.row > first else 0.0

    def not_up(self) -> tuple[int, ...]:
        """Return ranks whose process has not connected yet."""
        return tuple(rank for rank in range(self.world_size) if rank not in self.up)

    def _begin_run(self, event: ev.RunStarted) -> None:
        self.name, self.engine, self.started = event.name, event.engine, event.time
        self.attempts, self.ended, self.reason, self.unsaved = 0, None, "", ()
        self.row = event.row
        self.checkpoint, self.checkpoint_row, self.checkpoint_bytes = event.checkpoint, event.row, 0

    def _begin_attempt(self, event: ev.AttemptStarted) -> None:
        self.attempt, self.attempt_started = event.attempt, event.time
        self.attempts += 1
        self.world_size, self.waiting_for, self.reason = event.world_size, "", ""
        self.up, self.startup_seconds, self.late, self.data = set(), 0.0, None, ""
        self.phases = {"slots": max(0.0, event.time - (self.slots_requested or event.time))}
        self.row, self.row_time = event.first_row - 1, 0.0
        self._samples.clear()


def phases_text(view: RunView) -> str:
    """Return the phases of the start so far, in order."""
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in view.phases.items())


def checkpoint_text(view: RunView) -> str:
    size = f" ({data_size(view.checkpoint_bytes)})" if view.checkpoint_bytes else ""
    return f"checkpoint of row {view.checkpoint_row}{size}"


def late_text(late: Late, now: float) -> str:
    return f"waiting for {rank_list(late.ranks)} at row {late.row} since {clock(late.waited(now))}"


#: A piece of text and its rich style.
Span = tuple[str, str]


def live_rows(view: RunView, now: float, bars: Sequence[tuple[int, str]] = ()) -> list[list[Span]]:
    """Return the live region at ``now``, line by line. ``bars`` are the ranks' unfinished progress bars."""
    rows = [_headline(view, now)]
    if view.state == lifecycle.WAITING and view.waiting_for:
        rows.append([(one_line(view.waiting_for, 300), "yellow")])
    if view.state in (lifecycle.STOPPING, lifecycle.RECOVERING) and view.reason:
        rows.append([(one_line(view.reason, 300), "yellow")])
    if view.phases and view.row_time == 0 and view.state in (lifecycle.STARTING, lifecycle.TRAINING):
        rows.append([("start-up ", "dim"), (phases_text(view), "")])
    if view.state == lifecycle.STARTING and view.not_up():
        rows.append([(f"waiting for {rank_list(view.not_up())} to connect", "yellow")])
    if view.row_time:
        rows.append(_row_line(view, now))
    if view.data:
        rows.append([("data ", "dim"), (one_line(view.data, 300), "")])
    if view.metrics:
        rows.append(_metric_spans(view.metrics))
    if view.late and view.late.waited(now) >= 1:
        rows.append([(late_text(view.late, now), "yellow")])
    rows += [[(f"[rank {rank}] ", RANK_COLOURS[rank % 6]), (_bar_text(bar), "")] for rank, bar in bars]
    return rows


def _headline(view: RunView, now: float) -> list[Span]:
    spans = [(one_line(view.name, 60) + "  ", "bold"), (view.state, STATE_COLOURS.get(view.state, "cyan"))]
    workers = view.world_size or view.workers
    if workers:
        spans.append((f"  {counted(workers, 'worker')}", ""))
    if view.attempts > 1:
        spans.append((f"  attempt {view.attempts}", "yellow"))
    if view.started:
        spans.append((f"  {clock(now - view.started)}", "dim"))
    return spans


def _row_line(view: RunView, now: float) -> list[Span]:
    spans = [("row ", "dim"), (number(view.row), "bold")]
    rate, quiet = view.rate(), now - view.row_time
    if rate:
        spans.append((f"  {pace(rate)}", ""))
    if quiet > max(5.0, 5 / rate if rate else 0.0):
        spans.append((f"  last {clock(quiet)} ago", "yellow"))
    if view.checkpoint:
        spans.append((f"  {checkpoint_text(view)}", "dim"))
    if view.startup_seconds:
        spans.append((f"  started in {duration(view.startup_seconds)}", "dim"))
    return spans


def _bar_text(bar: str) -> str:
    """Return a progress bar with its spaces, but without colours and control characters."""
    return escape_controls(without_colours(bar))[:300]


def _metric_spans(metrics: Mapping[str, Any]) -> list[Span]:
    spans: list[Span] = []
    for name, value in metric_pairs(metrics):
        spans += [(f"{name} ", "dim"), (f"{value}  ", "")]
    return spans
