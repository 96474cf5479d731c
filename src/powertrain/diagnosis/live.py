"""Findings of a live run: printed when they appear, and again only when they change."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from time import monotonic

from powertrain.diagnosis import recorded, words
from powertrain.diagnosis.card import speed_line, time_line
from powertrain.diagnosis.final import is_telling
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.rules.root_cause import is_trouble
from powertrain.diagnosis.summary import Report
from powertrain.errors import StorageError
from powertrain.storage import Storage

#: Minimum seconds between two analyses.
ANALYSIS_INTERVAL_S = 10.0
#: The pause is at least this many times the duration of the last analysis, which reads all telemetry.
PAUSE_FACTOR = 20.0
#: Seconds between two lines about the speed of the run.
SPEED_INTERVAL_S = 60.0

_Printed = set[tuple[str, tuple[int, ...]]]


class Live:
    """Analyses the telemetry of a live run on its own thread. A context manager: prints nothing after its exit.

    A failed analysis is harmless: the first failure is printed, and the next analysis runs all the same.
    """

    def __init__(
        self, storage: Storage, name: str, print_line: Callable[[str], None], *, every: float | None = None
    ) -> None:
        self._storage, self._name, self._print_line = storage, name, print_line
        self._every = ANALYSIS_INTERVAL_S if every is None else every
        self._printed: _Printed = set()
        self._failed = False
        self._next_speed = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="powertrain-live-diagnosis", daemon=True)

    def __enter__(self) -> Live:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        wait = self._every
        while not self._over.wait(wait):
            began = monotonic()
            try:
                self._analyse()
            except (StorageError, OSError):  # no telemetry yet, or it is being written
                pass
            except Exception as error:  # of the analysis or of the output: later ones may succeed
                self._print_failure(error)
            wait = until_next(self._every, monotonic() - began)

    def _analyse(self) -> None:
        report = recorded.report_of(self._storage, self._name)
        lines, self._printed = news(report, self._printed)
        if monotonic() >= self._next_speed and (speed := efficiency(report)):
            self._next_speed = monotonic() + SPEED_INTERVAL_S
            lines.append(speed)
        for line in lines:
            self._print_line(f"[{self._name}] {line}")

    def _print_failure(self, error: Exception) -> None:
        if self._failed:
            return
        self._failed = True
        with contextlib.suppress(Exception):  # the output itself may fail
            self._print_line(
                f"[{self._name}] The run's telemetry could not be analysed: {type(error).__name__}: {error}. "
                "The run is not affected; the analysis is retried, and this warning is not repeated."
            )


def until_next(every: float, took: float) -> float:
    """Return the seconds from the end of an analysis that took ``took`` to the next one. Pure."""
    return max(every, PAUSE_FACTOR * took)


def efficiency(report: Report) -> str:
    """Return throughput, utilisation and goodput in one line; "" while too few steps are recorded. Pure."""
    speed, time = speed_line(report), time_line(report)
    if not is_telling(report) or not speed:
        return ""
    return f"speed: {speed}" + (f"; goodput: {time}" if time else "")


def news(report: Report, printed: _Printed) -> tuple[list[str], _Printed]:
    """Return the lines for changes since ``printed``, and the new set of printed findings. Pure."""
    troubles = [finding for finding in report.findings if is_trouble(finding)]
    found = {(finding.kind, finding.ranks) for finding in troubles}
    lines = [_line(finding) for finding in troubles if (finding.kind, finding.ranks) not in printed]
    lines += [f"resolved: {kind}" for kind, ranks in sorted(printed - found)]
    step = report.mean_step_seconds or report.step_seconds
    if lines and step > 0:
        lines[0] += f" ({report.steps:,} steps, {words.seconds(step)} each on average)"
    return lines, found


def _line(finding: Finding) -> str:
    return f"{finding.kind}: {finding.summary}" + (f" Do: {finding.action}" if finding.action else "")
