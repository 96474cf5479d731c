"""What a person sees of a run: the live view, plain lines, the ranks' output, the error report, the end card.

Three layers, each testable without the next:

- :class:`View` folds facts into what is worth showing. It reads no clock and writes nothing.
- Functions turn a view into text: :func:`live_rows` (what the live region says), :class:`Narrator` (which
  plain lines a fact is worth), :func:`failure_report`, :func:`end_rows`.
- :class:`Terminal` owns the stream. Its methods fold, queue and return: a terminal that nobody reads (a full
  pipe, Ctrl-S) delays lines, never training, and what goes wrong in here never reaches the run.

``rich`` is loaded by the live view's own thread, after the launch; plain mode never loads it.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import select
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TextIO

from powertrain.text.redaction import redact
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.startup import report as startup_report
from powertrain.run.health.hang_report import stretches
from powertrain.run.checkpoints.unsaved import UnsavedCheckpoint, fold, summarize
from powertrain.terminal.echoes import Echoes
from powertrain.text.printable import clean_output, escape_controls, indent_continuation, without_colours
from powertrain.text.tracebacks import TracebackFolder, users_frames

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

_P = ParamSpec("_P")

#: Live mode: pictures a second, and how long the launch is left alone before rich is imported.
_REFRESH_SECONDS = 1 / 8
_RICH_DELAY_SECONDS = 0.25
#: Plain mode: at most one progress line in this many seconds.
_PROGRESS_SECONDS = 5.0
#: A row that some ranks have not reported is worth a plain line after this many seconds.
_LATE_SECONDS = 5.0
#: The rate is taken over about this many seconds, from at most this many samples.
_RATE_SECONDS = 30.0
_RATE_SAMPLES = 128
#: Characters kept for a stream that does not take them; beyond it the oldest lines are left out, and counted.
_PENDING_LIMIT = 8 * 2**20
#: A longer line of a rank is shown in pieces.
_LINE_LIMIT = 64 * 2**10
#: A pipe that poll() calls writable takes 4096 bytes at once: 1024 characters in UTF-8.
_PIECE = 1024
_METRICS_SHOWN = 12
#: Lines of the user's code that are named as callers of the one that failed.
_CALLERS = 5
_CLOSE_SECONDS = 5.0

_RANK_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_STATE_COLOURS = {
    lifecycle.TRAINING: "green",
    lifecycle.FINISHED: "green",
    lifecycle.FAILED: "red",
    lifecycle.RECOVERING: "yellow",
    lifecycle.STOPPING: "yellow",
    lifecycle.STOPPED: "yellow",
    lifecycle.PREEMPTED: "yellow",
}


# --------------------------------------------------------------------------- numbers for people


def number(value: float) -> str:
    """At most four significant digits; whole numbers below 100,000 as they are; 1.2 k, 3.4 M, 5.6 G above."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int) and abs(value) < 100_000:
        return str(value)
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    for limit, unit in ((9.9995e14, ""), (9.9995e11, "T"), (9.9995e8, "G"), (9.9995e5, "M"), (9999.5, "k")):
        if size >= limit:
            scale = {"": 1.0, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}[unit]
            return f"{value / scale:.4g} {unit}".rstrip()
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """3 ms, 0.45 s, 12.3 s, 3 min 05 s, 2 h 03 min, 3 d 4 h."""
    seconds = max(0.0, seconds)
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def clock(seconds: float) -> str:
    """A duration that is watched while it grows: in whole seconds, so that it does not flicker."""
    return f"{max(0, int(seconds))} s" if seconds < 60 else duration(int(seconds))


def data_size(count: int) -> str:
    """512 B, 1.2 kB, 3.4 MB, 5.6 GB."""
    for limit, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count} B"


def pace(rows_per_second: float) -> str:
    """A rate in rows a second, or the time one row takes where that is longer than ten seconds."""
    if rows_per_second <= 0:
        return ""
    if rows_per_second < 0.1:
        return f"{duration(1 / rows_per_second)} per row"
    if rows_per_second >= 1000:
        return f"{rows_per_second / 1000:.3g} k rows/s"
    return f"{rows_per_second:.3g} rows/s"


def rank_list(ranks: Iterable[int]) -> str:
    """Names ranks: "rank 1"; "ranks 0, 2, 3"; long stretches folded: "ranks 0-5, 9"."""
    parts: list[str] = []
    for stretch in stretches(ranks):
        parts += [f"{stretch[0]}-{stretch[-1]}"] if len(stretch) > 3 else [str(rank) for rank in stretch]
    if len(parts) == 1 and parts[0].isdigit():
        return f"rank {parts[0]}"
    shown, hidden = parts[:10], len(parts) - 10
    return "ranks " + ", ".join(shown) + (f" and {hidden} more" if hidden > 0 else "")


def counted(count: int, noun: str) -> str:
    """A number of things: "1 worker", "2 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def one_line(text: str, limit: int) -> str:
    """Return ``text`` in one line without control characters, cut to ``limit`` characters."""
    flat = escape_controls(" ".join(text.split()))
    flat = flat if flat.isprintable() else "".join(c if c.isprintable() else "?" for c in flat)
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def metric_value(value: Any) -> str:
    """A reported value in a few characters."""
    if isinstance(value, (bool, int, float)):
        return number(value)
    if isinstance(value, (list, tuple)):
        return f"[{counted(len(value), 'item')}]"
    return one_line(str(value), 40)


def metric_pairs(metrics: Mapping[str, Any], limit: int = _METRICS_SHOWN) -> list[tuple[str, str]]:
    """Names and values as shown; nested names joined by a slash; what is beyond ``limit`` is counted."""
    flat = _flattened(metrics, "")
    pairs = [(one_line(name, 40), metric_value(value)) for name, value in itertools.islice(flat, limit)]
    hidden = sum(1 for _ in flat)
    return pairs + ([("", f"{hidden} more")] if hidden else [])


def _flattened(metrics: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _metrics_text(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}".strip() for name, value in metric_pairs(metrics))


# --------------------------------------------------------------------------- the view


@dataclass
class Late:
    """Ranks that have not reported a row which others have."""

    row: int
    ranks: tuple[int, ...]
    #: How long the others had waited at ``at`` (Unix seconds).
    seconds: float
    at: float

    def waited(self, now: float) -> float:
        """Seconds the others have waited by ``now``."""
        return self.seconds + max(0.0, now - self.at)


@dataclass
class View:
    """What is worth showing of a run, folded from facts. Its size does not grow with the run's length."""

    name: str = ""
    path: str = ""
    engine: str = ""
    state: str = lifecycle.NEW
    reason: str = ""
    started: float = 0.0
    #: Workers asked for, and what is missing while slots are waited for.
    workers: int = 0
    waiting_for: str = ""
    #: Number of the attempt, how many this controller began, when this one began.
    attempt: int = 0
    attempts: int = 0
    attempt_started: float = 0.0
    world_size: int = 0
    #: Ranks whose process has answered.
    up: set[int] = field(default_factory=set)
    #: What the start has taken so far: seconds by what they went into.
    phases: dict[str, float] = field(default_factory=dict)
    slots_requested: float = 0.0
    #: From the attempt's begin to its training; 0 until then.
    startup_seconds: float = 0.0
    row: int = 0
    row_time: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    late: Late | None = None
    #: How far rank 0 has read its data: "train: epoch 3, 45 %".
    data: str = ""
    checkpoint: str = ""
    checkpoint_row: int = 0
    checkpoint_bytes: int = 0
    #: Checkpoints of this start that were lost.
    unsaved: tuple[UnsavedCheckpoint, ...] = ()
    ended: ev.Ended | None = None
    _samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_SAMPLES))

    def on_event(self, event: ev.Fact) -> None:
        """Fold one fact. A fact out of order is shown as it comes: judging it is not the view's business."""
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
        """Row ``row`` closed at ``time``; ``metrics`` are rank 0's, None where it took no part."""
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
        """``ranks`` have not reported ``row`` while others have for ``seconds``; nobody any more if empty."""
        self.late = Late(row, tuple(ranks), seconds, at) if ranks else None

    def on_data(self, text: str) -> None:
        """Data have been read so far."""
        self.data = text

    def rate(self) -> float:
        """Rows a second of late; 0 until two rows are known."""
        if not self._samples:
            return 0.0
        began, first = self._samples[0]
        elapsed = self.row_time - began
        return (self.row - first) / elapsed if elapsed > 0 and self.row > first else 0.0

    def not_up(self) -> tuple[int, ...]:
        """Ranks whose process has not answered yet."""
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


def phases_text(view: View) -> str:
    """What the start has taken so far, in the order in which it came."""
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in view.phases.items())


def _checkpoint_text(view: View) -> str:
    size = f" ({data_size(view.checkpoint_bytes)})" if view.checkpoint_bytes else ""
    return f"checkpoint of row {view.checkpoint_row}{size}"


def _late_text(late: Late, now: float) -> str:
    return f"waiting for {rank_list(late.ranks)} at row {late.row} since {clock(late.waited(now))}"


# --------------------------------------------------------------------------- the live region

#: A piece of text and its rich style.
Span = tuple[str, str]


def live_rows(view: View, now: float, bars: Sequence[tuple[int, str]] = ()) -> list[list[Span]]:
    """The live region at ``now``, line by line. ``bars`` are the ranks' unfinished progress bars."""
    rows = [_headline(view, now)]
    if view.state == lifecycle.WAITING and view.waiting_for:
        rows.append([(one_line(view.waiting_for, 300), "yellow")])
    if view.state in (lifecycle.STOPPING, lifecycle.RECOVERING) and view.reason:
        rows.append([(one_line(view.reason, 300), "yellow")])
    if view.phases and view.row_time == 0 and view.state in (lifecycle.STARTING, lifecycle.TRAINING):
        rows.append([("start-up ", "dim"), (phases_text(view), "")])
    if view.state == lifecycle.STARTING and view.not_up():
        rows.append([(f"waiting for {rank_list(view.not_up())} to come up", "yellow")])
    if view.row_time:
        rows.append(_row_line(view, now))
    if view.data:
        rows.append([("data ", "dim"), (one_line(view.data, 300), "")])
    if view.metrics:
        rows.append(_metric_spans(view.metrics))
    if view.late and view.late.waited(now) >= 1:
        rows.append([(_late_text(view.late, now), "yellow")])
    rows += [[(f"[rank {rank}] ", _RANK_COLOURS[rank % 6]), (_bar_text(bar), "")] for rank, bar in bars]
    return rows


def _headline(view: View, now: float) -> list[Span]:
    spans = [(one_line(view.name, 60) + "  ", "bold"), (view.state, _STATE_COLOURS.get(view.state, "cyan"))]
    workers = view.world_size or view.workers
    if workers:
        spans.append((f"  {counted(workers, 'worker')}", ""))
    if view.attempts > 1:
        spans.append((f"  attempt {view.attempts}", "yellow"))
    if view.started:
        spans.append((f"  {clock(now - view.started)}", "dim"))
    return spans


def _row_line(view: View, now: float) -> list[Span]:
    spans = [("row ", "dim"), (number(view.row), "bold")]
    rate, quiet = view.rate(), now - view.row_time
    if rate:
        spans.append((f"  {pace(rate)}", ""))
    if quiet > max(5.0, 5 / rate if rate else 0.0):
        spans.append((f"  last {clock(quiet)} ago", "yellow"))
    if view.checkpoint:
        spans.append((f"  {_checkpoint_text(view)}", "dim"))
    if view.startup_seconds:
        spans.append((f"  started in {duration(view.startup_seconds)}", "dim"))
    return spans


def _bar_text(bar: str) -> str:
    """A progress bar keeps its spaces, which draw it, and loses colours and control characters."""
    return escape_controls(without_colours(bar))[:300]


def _metric_spans(metrics: Mapping[str, Any]) -> list[Span]:
    spans: list[Span] = []
    for name, value in metric_pairs(metrics):
        spans += [(f"{name} ", "dim"), (f"{value}  ", "")]
    return spans


# --------------------------------------------------------------------------- the error report


def failure_report(
    failures: Sequence[ev.WorkerFailure],
    reason: str = "",
    *,
    logs: str = "",
    width: int | None = None,
) -> str:
    """What went wrong, for a person: plain text, no markup, also the message of ``TrainingFailedError``.

    First the rank whose failure came first and is not the echo of another's: where in the user's code, type,
    message. Then the other ranks, folded. ``reason`` says what was decided, ``logs`` where the output lies.
    ``width`` wraps the lines that can be wrapped. No line holds a control character or a secret of an address.
    """
    if not failures:
        lines = ["The run failed before any worker did."]
    else:
        first = next((f for f in failures if not f.secondary), failures[0])
        others = [f for f in failures if f is not first]
        lines = [*_first_failure(first), *_other_failures(first, others)]
    if reason:
        lines.append(_sentence(reason))
    if logs:
        lines.append(f"The output of every rank is kept in {logs}")
    lines = [escape_controls(without_colours(redact(line))) for line in lines]
    return "\n".join(lines if width is None else _wrapped(lines, width))


def _first_failure(failure: ev.WorkerFailure) -> list[str]:
    if failure.error_type:
        heading = f"Rank {failure.rank} raised {failure.error_type}"
        message = failure.message.strip().splitlines()
        lines = [f"{heading}: {message[0]}" if message else heading]
        lines += _clipped(["    " + line for line in message[1:]], 20)
    else:
        lines = [_sentence(failure.summary or f"rank {failure.rank} failed")]
        if failure.kind == "hung":
            lines += ["    " + line for line in failure.message.splitlines()]
    if failure.file:
        inside = f" in {failure.function}" if failure.function else ""
        lines.append(f"  at {failure.file}:{failure.line}{inside}")
        if failure.source.strip():
            lines.append(f"      {failure.source.strip()}")
        lines += _callers(failure)
    elif failure.traceback.strip():
        # No frame of the user's is known: the end of the traceback is the best there is.
        lines += ["    " + line for line in failure.traceback.strip().splitlines()[-12:]]
    lines += ["  " + cause for cause in failure.causes]
    return [*lines, "  " + _circumstances(failure)]


def _callers(failure: ev.WorkerFailure) -> list[str]:
    """Where the user's own code called the line that failed, the nearest first."""
    frames = users_frames(failure.traceback)
    if not frames or (frames[-1].file, frames[-1].line) != (failure.file, failure.line):
        return []
    callers = [f"  called from {frame.file}:{frame.line} in {frame.function}" for frame in frames[-2::-1]]
    hidden = len(callers) - _CALLERS
    return callers if hidden <= 0 else [*callers[:_CALLERS], f"  ... {counted(hidden, 'more frame')}"]


def _circumstances(failure: ev.WorkerFailure) -> str:
    parts = [f"after row {failure.row}" if failure.row else "before its first report"]
    if failure.after:
        parts.append(f"{duration(failure.after)} into the attempt")
    if failure.host or failure.pid:
        process = f"process {failure.pid}" if failure.pid else "its process"
        parts.append(process + (f" on {failure.host}" if failure.host else ""))
    return ", ".join(parts)


def _other_failures(first: ev.WorkerFailure, others: Sequence[ev.WorkerFailure]) -> list[str]:
    lines: list[str] = []
    echoes = [f for f in others if f.secondary]
    same = [f for f in others if not f.secondary and _essence(f) == _essence(first)]
    own = [f for f in others if not f.secondary and _essence(f) != _essence(first)]
    if same:
        lines.append(f"The same happened on {rank_list(f.rank for f in same)}.")
    for failure in own[:3]:
        lines.append("Also: " + one_line(_headline_of(failure), 300))
    if len(own) > 3:
        lines.append(f"Also failed: {rank_list(f.rank for f in own[3:])}.")
    if echoes:
        ranks = sorted({f.rank for f in echoes})
        noun = counted(len(ranks), "other rank")
        lines.append(f"{noun} ended after it: {rank_list(ranks)} ({one_line(_echo_of(echoes[0]), 120)})")
    return lines


def _essence(failure: ev.WorkerFailure) -> tuple[str, ...]:
    if failure.error_type:
        return (failure.error_type, failure.message)
    # A summary names its rank, which alone makes no difference.
    return (failure.kind, re.sub(r"\brank \d+\b", "rank", failure.summary, flags=re.IGNORECASE))


def _headline_of(failure: ev.WorkerFailure) -> str:
    if failure.error_type:
        return f"rank {failure.rank} raised {failure.error_type}: {failure.message}".rstrip(": ")
    return failure.summary or f"rank {failure.rank} failed"


def _echo_of(failure: ev.WorkerFailure) -> str:
    if failure.error_type:
        return f"{failure.error_type}: {failure.message}".rstrip(": ")
    return failure.summary or failure.kind


def _sentence(text: str) -> str:
    text = text.strip()
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?", ":")) else text + "."


def _clipped(lines: list[str], limit: int) -> list[str]:
    hidden = len(lines) - limit
    return lines if hidden <= 0 else [*lines[:limit], f"    ... {counted(hidden, 'more line')}"]


def _wrapped(lines: Sequence[str], width: int) -> Iterator[str]:
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        if len(line) <= width or len(indent) >= 4:
            yield line  # source lines and tracebacks stay as they are
        else:
            more = indent + "  "
            yield from textwrap.wrap(
                line, max(20, width), subsequent_indent=more, break_long_words=False, break_on_hyphens=False
            )


# --------------------------------------------------------------------------- the end card


def end_rows(view: View) -> list[tuple[str, str]]:
    """Label and value of each line of the end card; the first is the state in a word."""
    ended = view.ended
    if ended is None:
        return []
    seconds = ended.seconds or max(0.0, ended.time - view.started)
    rows = [("state", ended.state)]
    if ended.reason and ended.reason != ended.state:
        rows.append(("reason", one_line(ended.reason, 300)))
    rows += [("rows", number(ended.rows or view.row)), ("time", duration(seconds))]
    if view.attempts > 1:
        rows.append(("attempts", str(view.attempts)))
    if view.metrics:
        rows.append(("metrics", _metrics_text(view.metrics)))
    if view.data:
        rows.append(("data", one_line(view.data, 300)))
    if view.checkpoint:
        rows.append(("checkpoint", f"{one_line(view.checkpoint, 200)} (row {view.checkpoint_row})"))
    if view.unsaved:
        rows.append(("not saved", one_line(summarize(view.unsaved), 500)))
    if view.path:
        rows.append(("path", escape_controls(view.path)))
    if ended.state == lifecycle.PREEMPTED:
        rows.append(("to resume", "start the same script again"))
    return rows


def end_card(view: View) -> str:
    """The end card as plain text; "" for a run that has not ended."""
    rows = end_rows(view)
    if not rows:
        return ""
    heading = f"Run {one_line(view.name, 100)} {rows[0][1]}"
    return "\n".join([heading, *(f"  {label:<10}  {value}" for label, value in rows[1:])])


# --------------------------------------------------------------------------- plain lines


@dataclass(frozen=True)
class Line:
    """One line to print: ``rank`` -1 for the run's own, ``style`` for live mode.

    Every line of a run passes here, so here its own lose control characters and secrets of addresses: texts in them
    come from names, errors, other hosts and earlier starts. Line ends in such a text are followed by blanks. Output of
    a rank has been cleaned by :class:`LineAssembler`.
    """

    text: str
    rank: int = -1
    style: str = ""

    def __post_init__(self) -> None:
        if self.rank < 0:
            object.__setattr__(self, "text", indent_continuation(without_colours(redact(self.text))))

    def plain(self) -> str:
        """As it stands on a stream without colours."""
        return self.text if self.rank < 0 else f"[rank {self.rank}] {self.text}"


class Narrator:
    """Decides which lines a fact is worth. Pure: the same facts at the same times give the same lines.

    ``progress=False`` leaves out what a live region shows anyway. ``verbose`` 0 keeps only warnings and
    failures, 2 adds each process, phase and commit.
    """

    def __init__(self, view: View, *, progress: bool = True, verbose: int = 1) -> None:
        self._view, self._verbose = view, verbose
        self.progress = progress and verbose > 0
        self._unannounced: ev.RunStarted | None = None
        self._last_progress = -math.inf
        self._new_commit = False
        self._told_slots = ""
        self._told_late: tuple[int, tuple[int, ...]] | None = None
        self._next_late = _LATE_SECONDS

    def on_event(self, event: ev.Fact) -> list[Line]:
        """The lines for ``event``, which the view has already folded."""
        lines = self._announcement(event)
        match event:
            case ev.SlotsWaited():
                lines += self._slots_waited(event)
            case ev.WorkerStarted() if self._verbose > 1:
                lines.append(self._own(f"rank {event.rank} is up: process {event.pid} on {event.host}"))
            case ev.StartupMeasured() if startup_report.is_told(event):
                lines += self._startup_measured(event)
            case ev.AttemptStarted():
                self._last_progress, self._told_late = -math.inf, None
            case ev.TrainingStarted() if self._verbose > 0:
                lines.append(self._own(self._training_started()))
            case ev.Committed():
                lines += self._committed(event)
            case ev.Stopping() if self._verbose > 0:
                lines.append(self._own(f"stopping ({event.cause}): {event.reason}", "yellow"))
            case ev.UploadLagged() | ev.CheckpointFailed() | ev.ValidationEnded():
                lines += self._of_a_checkpoint(event)
            case ev.Notified() | ev.HangNoticed() | ev.HangOver():
                lines += self._looming(event)
            case ev.Failed() | ev.Lost() | ev.Resized() | ev.RanksAbsent() | ev.Warned():
                lines += self._trouble(event)
        return lines

    def on_row(self, now: float) -> list[Line]:
        """A progress line if one is due."""
        if not self.progress or now - self._last_progress < _PROGRESS_SECONDS:
            return []
        self._last_progress = now
        view = self._view
        parts = [f"row {number(view.row)}", pace(view.rate()), _metrics_text(view.metrics)]
        parts.append(one_line(view.data, 120))
        if self._new_commit:
            parts.append(_checkpoint_text(view) + " committed")
            self._new_commit = False
        return [self._own(", ".join(part for part in parts if part))]

    def on_waiting(self, now: float) -> list[Line]:
        """A line when ranks are late for long, and again each time the wait has doubled."""
        late = self._view.late
        if late is None or not self.progress:
            return []
        if self._told_late != (late.row, late.ranks):
            self._told_late, self._next_late = (late.row, late.ranks), _LATE_SECONDS
        if late.waited(now) < self._next_late:
            return []
        self._next_late = 2 * late.waited(now)
        return [self._own(_late_text(late, now))]

    def _own(self, text: str, style: str = "") -> Line:
        return Line(f"[{self._view.name}] {text}", style=style)

    def _announcement(self, event: ev.Fact) -> list[Line]:
        """The start line waits for the fact after ``RunStarted``, which knows the number of workers."""
        if isinstance(event, ev.RunStarted):
            self._unannounced = event
            return []
        started, self._unannounced = self._unannounced, None
        if started is None or self._verbose == 0:
            return []
        workers = f", {counted(self._view.workers, 'worker')}" if isinstance(event, ev.SlotsRequested) else ""
        if started.min_workers < started.max_workers:
            workers = f", {started.min_workers} to {started.max_workers} workers"
        onward = f", goes on from row {started.row}" if started.checkpoint else ""
        return [self._own(f"run started in {self._view.path} ({started.engine} engine{workers}{onward})")]

    def _slots_waited(self, event: ev.SlotsWaited) -> list[Line]:
        told = f"{event.granted} of {event.count} slots are there, {event.reason}"
        if told == self._told_slots or not self.progress:
            return []
        self._told_slots = told
        return [self._own(told)]

    def _training_started(self) -> str:
        view = self._view
        begin = f", from row {view.row + 1}" if view.row else ""
        where = counted(view.world_size, "worker")
        return f"training started on {where} after {duration(view.startup_seconds)}{begin}"

    def _startup_measured(self, event: ev.StartupMeasured) -> list[Line]:
        """A line, and what could be done about it; where it came to no first step, something else is worth more."""
        if self._verbose == 0 or (event.unfinished and self._verbose < 2):
            return []
        lines = [self._own(startup_report.line(event))]
        if self._verbose > 1:
            lines += [Line("  " + text) for text in startup_report.table(event)]
        return lines + [self._own(f"of the start-up, {text}") for text in startup_report.advice(event)]

    def _committed(self, event: ev.Committed) -> list[Line]:
        """Rare commits get a line of their own; frequent ones go into the next progress line."""
        rare = self.progress and event.time - self._last_progress >= _PROGRESS_SECONDS
        if self._verbose > 1 or rare:
            self._new_commit = False
            return [self._own(f"{_checkpoint_text(self._view)} committed: {event.checkpoint}")]
        self._new_commit = True
        return []

    def _of_a_checkpoint(
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
                found = _metrics_text(event.metrics)
                return [self._own(f"{event.checkpoint} validated in {duration(event.seconds)}: {found}")]
            case ev.ValidationEnded() if event.status != "VALIDATED":
                return [self._own(f"the validation of {event.checkpoint} failed: {event.reason}", "yellow")]
        return []

    def _looming(self, event: ev.Notified | ev.HangNoticed | ev.HangOver) -> list[Line]:
        """What may come to nothing: a notice, a pause that looks like a hang, and its end."""
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
                return [self._own(f"it moves again, after {duration(event.seconds)}", "yellow")]

    def _trouble(self, event: ev.Failed | ev.Lost | ev.Resized | ev.RanksAbsent | ev.Warned) -> list[Line]:
        match event:
            case ev.Failed():
                return self._failed(event)
            case ev.Lost():
                text = f"{rank_list(event.ranks)} lost: {event.reason}" if event.ranks else event.reason
                return [self._own(text, "yellow")]
            case ev.Resized():
                workers = counted(event.world_size, "worker")
                return [self._own(f"going on with {workers}: {event.reason}", "yellow")]
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
        """The whole report when the run goes on; at its end one line, as the error raised has the report."""
        if event.decision == "give_up":
            first = next((f for f in event.failures if not f.secondary), None)
            what = one_line(_headline_of(first), 300) if first else "failed"
            return [self._own(f"attempt {event.attempt} failed: {what}; {event.reason}", "red")]
        # Where ranks share the driver's own output there is no log of theirs to point at.
        logs = "" if self._view.engine in ("inline", "torchrun") else f"{self._view.path}/logs"
        report = failure_report(event.failures, event.reason, logs=logs)
        when = f" in {duration(event.delay)}" if event.delay else ""
        lines = [self._own(f"attempt {event.attempt} failed; the run goes on{when}", "red")]
        return lines + [Line("  " + text, style="red") for text in report.splitlines()]


# --------------------------------------------------------------------------- the ranks' output

_LINE_PARTS = re.compile(rb"[\r\n]|[^\r\n]+")


class LineAssembler:
    """Turns one rank's bytes into lines, the same lines however the bytes are cut.

    A carriage return starts the line over, as on a screen: of a progress bar the last state remains. Bytes
    that are not UTF-8 are replaced. At most one line of ``_LINE_LIMIT`` bytes is held.
    """

    def __init__(self) -> None:
        self._current = bytearray()
        self._returned = False
        #: True while the unfinished line has been started over: a progress bar.
        self.is_bar = False

    def feed(self, data: bytes) -> list[str]:
        """Take more bytes; return the lines they complete."""
        lines: list[str] = []
        for part in _LINE_PARTS.findall(data):
            if part == b"\r":
                self._returned = True
            elif part == b"\n":
                lines.append(self._take())
            else:
                if self._returned:
                    self._current.clear()
                    self._returned, self.is_bar = False, True
                self._current += part
                lines += self._overflow()
        return lines

    def finish(self) -> list[str]:
        """The unfinished line, if there is one."""
        return [self._take()] if self._current else []

    def unfinished(self) -> str:
        """The unfinished line as it stands."""
        return _readable(bytes(self._current))

    def _take(self) -> str:
        text = self.unfinished()
        self._current.clear()
        self._returned = self.is_bar = False
        return text

    def _overflow(self) -> Iterator[str]:
        while len(self._current) > _LINE_LIMIT:
            cut = _LINE_LIMIT
            while cut > _LINE_LIMIT - 4 and self._current[cut] & 0xC0 == 0x80:
                cut -= 1  # not inside a character
            yield _readable(bytes(self._current[:cut]))
            del self._current[:cut]


def _readable(data: bytes) -> str:
    return clean_output(data.decode("utf-8", "replace"))


# --------------------------------------------------------------------------- the terminal


def wants_live(stream: TextIO | None, environ: Mapping[str, str] | None = None) -> bool:
    """Whether a live region makes sense: a real, capable, interactive terminal that is not a notebook."""
    environ = os.environ if environ is None else environ
    if stream is None or type(stream).__module__.startswith("ipykernel"):
        return False
    if environ.get("TERM", "") in ("", "dumb") or environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    encoding = (getattr(stream, "encoding", None) or "utf-8").lower()
    try:
        return encoding.startswith("utf") and stream.isatty()
    except (OSError, ValueError):
        return False


def _guarded(method: Callable[Concatenate[Terminal, _P], None]) -> Callable[Concatenate[Terminal, _P], None]:
    """Failures of ``method`` are noted once and never reach the run; after ``close`` it does nothing."""

    @functools.wraps(method)
    def call(self: Terminal, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if self._closed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # showing a run must not end it
            self._note(error)

    return call


#: The one terminal of this process with a live region: two would overwrite each other.
_live_owner: Terminal | None = None
_live_owner_lock = threading.RLock()


class Terminal:
    """Shows one run on one stream.

    All methods may be called from any thread, return at once and never raise; ``close`` alone waits until the
    stream has taken what was said. Nothing is printed after ``close``.
    """

    def __init__(
        self,
        name: str,
        path: str,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        log_to_file: bool = False,
        verbose: int = 1,
    ) -> None:
        """``stream`` is stdout by default; ``live=None`` decides by the stream.

        With ``log_to_file`` the ranks' output is left to their files. :class:`Narrator` explains ``verbose``.
        """
        stream = sys.stdout if stream is None else stream
        # A live view of another run may have put its proxy in place of stdout.
        self._stream: TextIO | None = getattr(stream, "rich_proxied_file", stream)
        self._log_to_file, self._verbose = log_to_file, verbose
        self._lock = threading.RLock()  # the state: held for microseconds, also by signal handlers
        self._writing = threading.Lock()  # the stream, in plain mode
        self._pending: deque[Line] = deque()
        self._pending_size = self._left_out = 0
        self._unwritten = ""
        self._assemblers: dict[int, LineAssembler] = {}
        self._folders: dict[int, TracebackFolder] = {}
        self._echoes = Echoes()
        self._closed = self._noted = self._card_shown = False
        self._stop = threading.Event()
        #: Set while somebody talks in this terminal; and while the live region keeps off it for that.
        self._held, self._off = threading.Event(), threading.Event()
        wanted = wants_live(self._stream) if live is None else live
        self._live = wanted and verbose > 0 and self._stream is not None and self._claim_live()
        self._shared = wanted and not self._live
        self.view = View(name=name, path=path)
        self._narrator = Narrator(self.view, progress=not self._live, verbose=verbose)
        self._thread: threading.Thread | None = None
        if self._live:
            self._thread = threading.Thread(target=self._show_live, name="powertrain-terminal", daemon=True)
            self._thread.start()

    # -- what the run says

    @_guarded
    def event(self, event: ev.Event) -> None:
        """A fact of the run."""
        with self._lock:
            if isinstance(event, ev.AttemptStarted):
                self._finish_lines()  # of processes that are no more
            self.view.on_event(event)
            self._queue(self._narrator.on_event(event))
        self._write()

    @_guarded
    def row(self, row: int, by_rank: Sequence[Mapping[str, Any] | None], at: float) -> None:
        """Row ``row`` closed at ``at`` (Unix seconds) with these metrics, in rank order."""
        with self._lock:
            self.view.on_row(row, by_rank[0] if by_rank else None, at)
            lines = self._narrator.on_row(at)
            if lines:
                self._queue(lines)
        if lines:
            self._write()

    @_guarded
    def waiting(self, row: int, ranks: Sequence[int], seconds: float) -> None:
        """``ranks`` have not reported ``row``, which others did ``seconds`` ago. Empty: nobody is late."""
        now = time.time()
        with self._lock:
            self.view.on_waiting(row, ranks, seconds, now)
            self._queue(self._narrator.on_waiting(now))
        self._write()

    @_guarded
    def data(self, text: str) -> None:
        """Rank 0 has read its data so far, in words."""
        with self._lock:
            self.view.on_data(text)

    @_guarded
    def output(self, rank: int, data: bytes) -> None:
        """Bytes that ``rank`` wrote, cut anywhere."""
        if self._log_to_file:
            return
        with self._lock:
            assembler = self._assemblers.setdefault(rank, LineAssembler())
            folder = self._folders.setdefault(rank, TracebackFolder())
            lines = self._echoes.fold(rank, folder.feed(assembler.feed(data)))
            self._queue([Line(text, rank) for text in lines])
        self._write()

    @_guarded
    def text(self, text: str) -> None:
        """Lines about the run as a whole."""
        if self._verbose > 0:
            self._queue([Line(line) for line in text.splitlines()])
            self._write()

    @_guarded
    def hold(self) -> None:
        """Write nothing before :meth:`release`, because a debugger talks in this terminal: what comes meanwhile is
        kept. Waits for the live region to be gone."""
        self._held.set()
        if self._live:
            self._off.wait(_CLOSE_SECONDS)

    @_guarded
    def release(self) -> None:
        """Show what came since :meth:`hold`, and go on."""
        self._held.clear()
        self._write()

    def close(self, metrics: Mapping[str, Any] | None = None, checkpoint: str | None = None) -> None:
        """Print what is left and the end card (of a run that ended), and leave the terminal as it was.

        ``metrics`` and ``checkpoint`` replace what the view saw last. May be called twice.
        """
        if self._closed:
            return
        try:
            with self._lock:
                self.view.metrics = self.view.metrics if metrics is None else dict(metrics)
                self.view.checkpoint = self.view.checkpoint if checkpoint is None else checkpoint
                self._finish_lines()
            self._stop.set()
            if self._thread is not None:
                self._thread.join(_CLOSE_SECONDS)
            if self._thread is None or not self._thread.is_alive():
                self._print_rest()
        except Exception as error:  # showing a run must not end it
            self._note(error)
        finally:
            self._closed = True

    def _finish_lines(self) -> None:
        for rank, assembler in sorted(self._assemblers.items()):
            folder = self._folders[rank]
            shown = [*folder.feed(assembler.finish()), *folder.finish()]
            lines = [*self._echoes.fold(rank, shown), *self._echoes.finish(rank)]
            self._queue([Line(text, rank) for text in lines])
        self._assemblers.clear()
        self._folders.clear()

    def _print_rest(self) -> None:
        if not self._card_shown and self._verbose > 0:
            self._queue([Line(text) for text in end_card(self.view).splitlines()])
        self._write(wait=True)

    # -- the queue

    def _queue(self, lines: Iterable[Line]) -> None:
        with self._lock:
            for line in lines:
                self._pending.append(line)
                self._pending_size += len(line.text) + 16
            while self._pending_size > _PENDING_LIMIT:
                self._pending_size -= len(self._pending.popleft().text) + 16
                self._left_out += 1

    def _take(self, size: int) -> list[Line]:
        """The oldest queued lines, about ``size`` characters of them."""
        taken: list[Line] = []
        with self._lock:
            if self._left_out:
                lines = counted(self._left_out, "line")
                where = self.view.path
                taken.append(Line(f"[{lines} left out: this terminal was too slow; all are kept in {where}]"))
                self._left_out = 0
            while self._pending and size > 0:
                line = self._pending.popleft()
                self._pending_size -= len(line.text) + 16
                size -= len(line.text) + 16
                taken.append(line)
        return taken

    def _note(self, error: Exception) -> None:
        """Say once that showing the run failed."""
        if self._noted:
            return
        self._noted = True
        what = one_line(f"{type(error).__name__}: {error}", 300)
        note = f"[{self.view.name}] the terminal could not show something ({what}); the run goes on"
        self._queue([Line(note)])
        try:
            self._write()
        except Exception:  # there is nowhere left to say it
            self._stream = None

    # -- plain mode

    def _write(self, wait: bool = False) -> None:
        """Hand the stream what is queued, as far as it takes it without blocking, or all of it if ``wait``.

        One thread writes at a time; another's lines are written by the one that is at it.
        """
        if self._live or (self._held.is_set() and not wait) or (self._shared and self._hand_over()):
            return
        while self._pending or self._unwritten:
            if not self._writing.acquire(blocking=wait):
                return
            try:
                if not self._write_queued(wait):
                    return
            finally:
                self._writing.release()

    def _write_queued(self, wait: bool) -> bool:
        """False when the stream takes no more for now."""
        while True:
            if not self._unwritten:
                self._unwritten = self._encodable("".join(line.plain() + "\n" for line in self._take(2**15)))
            piece = self._unwritten[:_PIECE]
            if not piece:
                return True
            if self._stream is None or getattr(self._stream, "closed", False):
                self._unwritten = ""
                continue
            if not wait and not _takes_more(self._stream):
                return False
            # Forgotten before it is written: after an error the same piece must not come again.
            self._unwritten = self._unwritten[_PIECE:]
            self._put(self._stream, piece)

    def _put(self, stream: TextIO, piece: str) -> None:
        try:
            stream.write(piece)
            stream.flush()
        except (OSError, ValueError):
            self._stream = None  # the reader is gone; the files have everything

    def _encodable(self, text: str) -> str:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        return text.encode(encoding, "replace").decode(encoding)

    def _hand_over(self) -> bool:
        """Give the queued lines to the terminal that has the live region, if there is one."""
        with _live_owner_lock:
            if _live_owner is None:
                return False
            _live_owner._queue(self._take(_PENDING_LIMIT))
            return True

    # -- live mode

    def _claim_live(self) -> bool:
        global _live_owner
        with _live_owner_lock:
            if _live_owner is None:
                _live_owner = self
            return _live_owner is self

    def _show_live(self) -> None:
        """The refresh thread. Whatever happens in it, callers then write for themselves."""
        global _live_owner
        try:
            if not self._stop.wait(_RICH_DELAY_SECONDS):
                self._run_live()
        except OSError:
            self._stream = None
        except Exception as error:  # showing a run must not end it
            self._note(error)
        finally:
            with _live_owner_lock, self._lock:
                _live_owner, self._live = None, False
                self._narrator.progress = self._verbose > 0

    def _run_live(self) -> None:
        from rich.console import Console

        console = Console(file=self._stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        while not self._stop.is_set():
            self._keep_off(console)
            self._draw_until_held(console)
        rows = end_rows(self.view)
        if rows:
            console.print(_end_panel(self.view.name, rows))
            self._card_shown = True

    def _keep_off(self, console: Console) -> None:
        """Wait while somebody talks in the terminal."""
        if self._held.is_set():
            self._print_queued(console)
        while self._held.is_set() and not self._stop.is_set():
            self._off.set()
            self._stop.wait(_REFRESH_SECONDS)
        self._off.clear()

    def _draw_until_held(self, console: Console) -> None:
        from rich.live import Live

        stdout_is_ours = self._stream is sys.stdout
        live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            # Prints of the driver (callbacks, say) must go above the region, not into it.
            redirect_stdout=stdout_is_ours,
            redirect_stderr=stdout_is_ours and sys.stderr is not None and sys.stderr.isatty(),
        )
        with live:
            # Rich hides the cursor; a killed driver could not bring it back.
            console.show_cursor(True)
            while not self._held.is_set() and not self._stop.wait(_REFRESH_SECONDS):
                self._refresh(console, live)
            self._print_queued(console)
            live.update("", refresh=True)

    def _refresh(self, console: Console, live: Live) -> None:
        with self._lock:
            bars = [(rank, a.unfinished()) for rank, a in sorted(self._assemblers.items()) if a.is_bar]
            rows = live_rows(self.view, time.time(), bars[:4])
        # One write for both, so that the region does not flicker; printing alone would draw it as it was.
        with console:
            self._print_queued(console)
            live.update(_region(rows), refresh=True)

    def _print_queued(self, console: Console) -> None:
        from rich.text import Text

        while lines := self._take(2**16):
            # Soft wrap: the terminal breaks long lines itself, so that they can be copied whole.
            console.print(Text("\n").join(_line_text(line) for line in lines), soft_wrap=True)


def _takes_more(stream: TextIO) -> bool:
    """Whether a write of one piece will not block. True where that cannot be known."""
    if not hasattr(select, "poll"):
        return True
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(0))
    except (OSError, ValueError, AttributeError):
        return True


def _line_text(line: Line) -> Text:
    from rich.text import Text

    if line.rank < 0:
        return Text(line.text, style=line.style)
    body = Text.from_ansi(line.text) if "\x1b" in line.text else Text(line.text)
    return Text.assemble((f"[rank {line.rank}] ", _RANK_COLOURS[line.rank % len(_RANK_COLOURS)]), body)


def _region(rows: Sequence[Sequence[Span]]) -> Text:
    from rich.text import Text

    lines = [Text.assemble(*((escape_controls(text), style) for text, style in row)) for row in rows]
    return Text("\n", no_wrap=True, overflow="ellipsis").join(lines)


def _end_panel(name: str, rows: Sequence[tuple[str, str]]) -> Any:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, value in rows[1:]:
        table.add_row(Text(label, style="dim"), Text(escape_controls(value), overflow="fold"))
    colour = _STATE_COLOURS.get(rows[0][1], "cyan")
    title = Text.assemble((one_line(name, 60), "bold"), " ", (rows[0][1], colour))
    return Panel(table, title=title, title_align="left", border_style=colour, expand=False)
