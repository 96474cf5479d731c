"""Figures of one run, kept up to date by its events and rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from powertrain.driver.prometheus.exposition import FigureFamily, FigureSample
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.outcome import Observer
from powertrain.text.loggers import module_logger

_logger = module_logger(__name__)
#: The most metrics of rank 0: each is a time series, and a loop may make up names.
MOST_METRICS = 500
#: Facts that are counted, and the names and helps of their counters.
_COUNTED: dict[type[ev.Fact], tuple[str, str]] = {
    ev.AttemptStarted: ("powertrain_attempts_total", "Attempts that this process has started."),
    ev.Failed: ("powertrain_failures_total", "Attempts that ended by a failure of a rank."),
    ev.Lost: ("powertrain_losses_total", "Attempts that ended because slots were lost or preempted."),
    ev.Resized: ("powertrain_resizes_total", "Changes of the number of workers."),
    ev.HangNoticed: ("powertrain_hangs_total", "Hangs that were noticed."),
    ev.Committed: ("powertrain_checkpoints_total", "Checkpoints that were committed."),
    ev.CheckpointFailed: ("powertrain_lost_checkpoints_total", "Reported checkpoints that were not saved."),
}


class RunFigures:
    """The figures of a run. Fed on the controller's thread, read on that of the server."""

    def __init__(self, name: str) -> None:
        self._labels = {"run": name}
        self._lock = threading.Lock()
        self._state = lifecycle.NEW
        self._engine = ""
        self._counts: dict[type[ev.Fact], int] = dict.fromkeys(_COUNTED, 0)
        self._rows = 0
        self._gauges: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._dropped = 0

    # ----------------------------------------------------------------------- feeding

    def on_event(self, event: ev.Fact) -> None:
        """Take in a fact of the run."""
        with self._lock:
            if type(event) in self._counts:
                self._counts[type(event)] += 1
            if type(event) not in lifecycle.NEUTRAL:
                self._state = lifecycle.next_state(self._state, event)
            if isinstance(event, ev.RunStarted):
                self._engine = event.engine
                self._gauges["start_time_seconds"] = event.time
            elif isinstance(event, ev.AttemptStarted):
                self._gauges |= {"workers": event.world_size, "row": event.first_row - 1}
            elif isinstance(event, ev.Committed):
                self._gauges |= {"last_commit_time_seconds": event.time, "last_commit_row": event.row}
                self._gauges["checkpoint_bytes"] = event.bytes

    def on_row(self, row: int, by_rank: Sequence[Mapping[str, Any] | None], at: float) -> None:
        """Take in a complete row: the numbers that rank 0 reported."""
        with self._lock:
            self._rows += 1
            self._gauges |= {"row": row, "last_row_time_seconds": at}
            for name, value in numbers_in(by_rank[0] or {} if by_rank else {}):
                if name in self._metrics or len(self._metrics) < MOST_METRICS:
                    self._metrics[name] = value
                else:
                    self._dropped += 1

    # ----------------------------------------------------------------------- reading

    def families(self) -> list[FigureFamily]:
        """Return all figures as they are now."""
        with self._lock:
            return list(self._families())

    def _families(self) -> Iterator[FigureFamily]:
        yield self._one("powertrain_run_info", "The run and its engine.", 1.0, engine=self._engine)
        states = [
            FigureSample({**self._labels, "state": s}, float(s == self._state)) for s in lifecycle.STATES
        ]
        yield FigureFamily("powertrain_run_state", "1 for the state that the run is in.", "gauge", states)
        for key, help in _GAUGES.items():
            if key in self._gauges:
                yield self._one(f"powertrain_{key}", help, self._gauges[key])
        for kind, (name, help) in _COUNTED.items():
            yield self._counter(name, help, self._counts[kind])
        yield self._counter(
            "powertrain_rows_total", "Rows (reports of all ranks) that were completed.", self._rows
        )
        yield self._counter(
            "powertrain_dropped_metrics_total",
            f"Values of metrics beyond the first {MOST_METRICS}.",
            self._dropped,
        )
        samples = [
            FigureSample({**self._labels, "name": name}, value) for name, value in self._metrics.items()
        ]
        if samples:
            yield FigureFamily("powertrain_metric", "Metrics of the last report of rank 0.", "gauge", samples)

    def _one(self, name: str, help: str, value: float, **labels: str) -> FigureFamily:
        return FigureFamily(name, help, "gauge", [FigureSample({**self._labels, **labels}, value)])

    def _counter(self, name: str, help: str, value: float) -> FigureFamily:
        return FigureFamily(name, help, "counter", [FigureSample(self._labels, value)])


_GAUGES = {
    "start_time_seconds": "When this process started the run, in Unix seconds.",
    "workers": "Workers of the current attempt.",
    "row": "The last complete row.",
    "last_row_time_seconds": "When the last row was completed, in Unix seconds.",
    "last_commit_time_seconds": "When the last checkpoint was committed, in Unix seconds.",
    "last_commit_row": "The row of the last committed checkpoint.",
    "checkpoint_bytes": "The size of the last committed checkpoint.",
}


def numbers_in(metrics: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a report, nested names joined by "/". Booleans and texts are not numbers."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from numbers_in(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                yield f"{prefix}{name}", float(value)
            except OverflowError:  # a whole number beyond any float
                continue


class MeasuredRun:
    """An observer that feeds figures and passes everything on to another observer."""

    def __init__(self, figures: RunFigures, observer: Observer) -> None:
        self._figures, self._observer = figures, observer
        self._has_failed = False

    def event(self, event: ev.Event) -> None:
        self._feed(self._figures.on_event, event)
        self._observer.event(event)

    def row(self, row: int, by_rank: Sequence[Mapping[str, Any] | None], at: float) -> None:
        self._feed(self._figures.on_row, row, by_rank, at)
        self._observer.row(row, by_rank, at)

    def _feed(self, feed: Any, *arguments: Any) -> None:
        """Feed the figures: an error of theirs is logged once, and never ends the run."""
        try:
            feed(*arguments)
        except Exception:
            if not self._has_failed:
                _logger.warning("Figures for Prometheus are incomplete.", exc_info=True)
            self._has_failed = True

    def waiting(self, row: int, ranks: Sequence[int], seconds: float) -> None:
        self._observer.waiting(row, ranks, seconds)

    def data(self, text: str) -> None:
        self._observer.data(text)

    def output(self, rank: int, data: bytes) -> None:
        self._observer.output(rank, data)

    def hold(self) -> None:
        self._observer.hold()

    def release(self) -> None:
        self._observer.release()
