"""Findings while a run goes on: said when they come up, and again only when they change."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from time import monotonic

from powertrain.diagnosis import recorded, words
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.rules.root_cause import is_trouble
from powertrain.diagnosis.summary import Report
from powertrain.errors import StorageError
from powertrain.storage import Storage

#: Seconds between two looks, at least.
EVERY = 10.0
#: Between two looks it is at least so many times as long as the one before took: each reads all that was recorded.
REST = 20.0

_Told = set[tuple[str, tuple[int, ...]]]


class Live:
    """Looks at what a run records, on a thread of its own. A context: nothing is said once it is left.

    A look that fails disturbs nothing: the first failure is told, and the next look comes all the same.
    """

    def __init__(
        self, storage: Storage, name: str, tell: Callable[[str], None], *, every: float | None = None
    ) -> None:
        self._storage, self._name, self._tell = storage, name, tell
        self._every = EVERY if every is None else every
        self._told: _Told = set()
        self._failed = False
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
                self._look()
            except (StorageError, OSError):  # nothing yet; or it is being written
                pass
            except Exception as error:  # of ours, or of who is told: later looks may go well
                self._tell_failure(error)
            wait = until_next(self._every, monotonic() - began)

    def _look(self) -> None:
        lines, self._told = news(recorded.report_of(self._storage, self._name), self._told)
        for line in lines:
            self._tell(f"[{self._name}] {line}")

    def _tell_failure(self, error: Exception) -> None:
        if self._failed:
            return
        self._failed = True
        with contextlib.suppress(Exception):  # it may be the telling that fails
            self._tell(
                f"[{self._name}] What the run records could not be looked at: {type(error).__name__}: {error}. "
                "The run is not affected; it is looked at again, and this is not said again."
            )


def until_next(every: float, took: float) -> float:
    """Seconds from the end of a look that took ``took`` to the next one. Pure."""
    return max(every, REST * took)


def news(report: Report, told: _Told) -> tuple[list[str], _Told]:
    """What is to be said now, after what was said before; and what has been said then. Pure."""
    troubles = [finding for finding in report.findings if is_trouble(finding)]
    found = {(finding.kind, finding.ranks) for finding in troubles}
    lines = [_line(finding) for finding in troubles if (finding.kind, finding.ranks) not in told]
    lines += [f"no longer: {kind}" for kind, ranks in sorted(told - found)]
    step = report.mean_step_seconds or report.step_seconds
    if lines and step > 0:
        lines[0] += f" ({report.steps:,} steps, {words.seconds(step)} each on average)"
    return lines, found


def _line(finding: Finding) -> str:
    return f"{finding.kind}: {finding.summary}" + (f" Do: {finding.action}" if finding.action else "")
