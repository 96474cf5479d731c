"""Findings while a run goes on: said when they come up, and again only when they change."""

from __future__ import annotations

import threading
from collections.abc import Callable

from powertrain.diagnosis import recorded, words
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.root_cause import is_trouble
from powertrain.diagnosis.summary import Report
from powertrain.errors import StorageError
from powertrain.storage import Storage

#: Seconds between two looks.
EVERY = 10.0


class Live:
    """Looks at what a run records, on a thread of its own. A context: nothing is said once it is left."""

    def __init__(
        self, storage: Storage, name: str, tell: Callable[[str], None], *, every: float | None = None
    ) -> None:
        self._storage, self._name, self._tell = storage, name, tell
        self._every = EVERY if every is None else every
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="powertrain-live-diagnosis", daemon=True)

    def __enter__(self) -> Live:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        told: set[tuple[str, tuple[int, ...]]] = set()
        while not self._over.wait(self._every):
            try:
                report = recorded.report_of(self._storage, self._name)
            except (StorageError, OSError):  # nothing yet; or it is being written
                continue
            lines, told = news(report, told)
            for line in lines:
                self._tell(f"[{self._name}] {line}")


def news(
    report: Report, told: set[tuple[str, tuple[int, ...]]]
) -> tuple[list[str], set[tuple[str, tuple[int, ...]]]]:
    """What is to be said now, after what was said before; and what has been said then. Pure."""
    troubles = [finding for finding in report.findings if is_trouble(finding)]
    found = {(finding.kind, finding.ranks) for finding in troubles}
    lines = [_line(finding) for finding in troubles if (finding.kind, finding.ranks) not in told]
    lines += [f"no longer: {kind}" for kind, ranks in sorted(told - found)]
    if lines and report.step_seconds > 0:
        lines[0] += f" ({report.steps:,} steps, {words.seconds(report.step_seconds)} each)"
    return lines, found


def _line(finding: Finding) -> str:
    return f"{finding.kind}: {finding.summary}" + (f" Do: {finding.action}" if finding.action else "")
