"""The replies that a report of a run holds: those that the dashboard would send."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from powertrain.errors import StorageError
from powertrain.terminal.text import data_size
from powertrain.text.errors import describe_error
from powertrain.views import run_page
from powertrain.views.log_ends import log_at, log_ends
from powertrain.views.metrics import metric_lines
from powertrain.views.report.detail import BYTES_OF_LOGS, MOST_BYTES, CurveDetail, choose_curves, shorten_page
from powertrain.views.report.document import document, embedded
from powertrain.views.run_page import ShownRun

#: Pixels of the step timeline and its rows, and pixels of the charts of resources.
_STEP_COLUMNS, _STEP_ROWS, _RESOURCE_COLUMNS = 600, 96, 200
#: Metrics whose curves are read together, between two looks at the time.
_METRICS_AT_ONCE = 8
#: Parts that are left out of a report that would be too large, the first one first, and what takes their place.
_SPARE: dict[str, tuple[str, Any]] = {
    "logs": ("the ends of the logs", []),
    "resources": ("the resources of ranks", None),
    "steps": ("the step timeline", None),
    "lines": ("the curves of metrics", {"lines": [], "times": None}),
}

#: Returns the ends of logs within so many bytes.
LogEnds = Callable[[int], list[dict[str, Any]]]


def logs_in(run: ShownRun) -> LogEnds:
    """Return a reader of the log files in a run's directory."""

    def ends(budget: int) -> list[dict[str, Any]]:
        logs = [
            log for entry in run.storage.list("logs") if (log := log_at(entry.key, entry.size)) is not None
        ]
        return log_ends(logs, lambda log, at, size: run.storage.get_range(log.key, at, size).data, budget)

    return ends


def run_report(run: ShownRun, logs: LogEnds, seconds: float = math.inf) -> bytes:
    """Return the report of a run as an HTML file. A part that cannot be read is named in it.

    Args:
        run: The run.
        logs: Returns the ends of its logs.
        seconds: No further curves are read after so many; the report says which ones it has.
    """
    deadline = time.monotonic() + seconds
    page = run_page.run_page(run)
    unread: dict[str, str] = {}

    def read(what: str, make: Callable[[], Any], default: Any) -> Any:
        try:
            return make()
        except Exception as error:  # storage may be gone, and files damaged: the rest is worth a report
            unread[what] = describe_error(error)
            return default

    planned = choose_curves(page["metrics"], run.world_size)
    nothing = (CurveDetail([], [0], 1), _SPARE["lines"][1])
    detail, lines = read("curves", lambda: _read_curves(run, planned, deadline), nothing)
    replies = {
        "made": time.time(),
        "lines": lines,
        "steps": read("steps", lambda: run_page.run_steps(run, columns=_STEP_COLUMNS, rows=_STEP_ROWS), None),
        "resources": read("resources", lambda: run_page.run_resources(run, columns=_RESOURCE_COLUMNS), None),
        "logs": read("logs", lambda: logs(BYTES_OF_LOGS), []),
    }
    replies["run"] = shorten_page({**page, "unread": {**page["unread"], **unread}}, detail)
    return within_limit(run.name, replies)


def _read_curves(run: ShownRun, planned: CurveDetail, deadline: float) -> tuple[CurveDetail, dict[str, Any]]:
    """Return the curves that could be read until the deadline: those of rank 0 first. One part is read in any case."""
    others = [rank for rank in planned.ranks if rank]
    found: dict[str, Any] = {"lines": [], "times": None}
    for ranks in ([0], others) if others else ([0],):
        so_far = len(found["lines"])
        for start in range(0, len(planned.metrics), _METRICS_AT_ONCE):
            if time.monotonic() > deadline and (start or ranks == others):
                if ranks == others:
                    return replace(planned, ranks=[0]), {**found, "lines": found["lines"][:so_far]}
                return replace(planned, metrics=planned.metrics[:start], ranks=[0]), found
            names = planned.metrics[start : start + _METRICS_AT_ONCE]
            part = metric_lines(run.storage, run.state, names, ranks=ranks, pixels=planned.pixels)
            found = {
                "lines": [*found["lines"], *part["lines"]],
                "times": found["times"] or part["times"],
            }
    found["lines"].sort(key=lambda line: int(line["rank"]))
    return planned, found


def sweep_report(name: str, page: Mapping[str, Any]) -> bytes:
    """Return the report of a sweep, from what its page shows."""
    return within_limit(name, {"made": time.time(), "sweep": {**page, "can_control": False}})


def within_limit(name: str, replies: dict[str, Any], limit: int = MOST_BYTES) -> bytes:
    """Return the file; parts are left out, and named, where it would be larger than ``limit``.

    Raises :class:`StorageError` if it is too large without them.
    """
    made = document(name, replies)
    for part, (words, empty) in _SPARE.items():
        if len(made) <= limit:
            return made
        if part in replies and len(embedded(replies[part])) > len(embedded(empty)):
            replies = {**replies, part: empty}
            note = f"The report would be too large with {words}: the dashboard shows them."
            replies["run"] = {**replies["run"], "left_out": [*replies["run"]["left_out"], note]}
            made = document(name, replies)
    if len(made) > limit:
        raise StorageError(
            f"The report of {name!r} would have {data_size(len(made))}, more than the limit of {data_size(limit)}. "
            "Look at it with 'powertrain ui'."
        )
    return made
