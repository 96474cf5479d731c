"""The list of runs and sweeps, and a small curve of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from powertrain.diagnosis import final
from powertrain.diagnosis.summary import Report
from powertrain.errors import PowertrainError
from powertrain.lookup import sweeps
from powertrain.lookup.finding import real_path
from powertrain.lookup.summaries import INTERRUPTED, UNREADABLE, silent_since, summarize
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.metrics import curves
from powertrain.run.record import run_json
from powertrain.storage.addresses import without_secrets
from powertrain.ui.places import Places, RunRecord
from powertrain.ui.replies import Memo
from powertrain.views.encoding import id_of
from powertrain.views.metrics import spark
from powertrain.views.overview import finding_view

#: Errors of a run that must not hide all others.
_UNREADABLE_ERRORS = (PowertrainError, OSError, ValueError, OverflowError, RecursionError)
#: The most runs of one request for curves.
MOST_SPARKS = 50
_MOST_VALUES = 3
#: Rows that are kept: more than a directory usually has.
_MOST_ROWS = 20_000


class RunList:
    """The list, of which rows are made again only for runs that have changed or go on."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._rows: Memo[dict[str, Any]] = Memo(_MOST_ROWS)
        self._sparks: Memo[dict[str, Any]] = Memo(_MOST_ROWS)

    def all(self) -> dict[str, Any]:
        """Return all runs and sweeps, from their journals alone."""
        names, of_sweeps = self._places.names()
        are_sweeps = set(of_sweeps)
        runs = [self._row(name, self._run) for name in names if name not in are_sweeps]
        return {
            "root": without_secrets(self._places.root.uri),
            "runs": sorted(runs, key=lambda run: -float(run["started"])),
            "sweeps": [self._row(name, self._sweep) for name in of_sweeps],
        }

    def version(self) -> object:
        """Return a value that changes with the list: with journals, and with metrics of runs that go on."""
        names, _ = self._places.names()
        found: list[tuple[str, object]] = []
        for name in names:
            try:
                versions = (self._places.journal_version(name), self._places.metrics_version(name))
                found.append((name, versions))
            except _UNREADABLE_ERRORS as error:
                found.append((name, str(error)))
        return found, sorted(self._places.live())

    def sparks(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return the small curve, the last values and the top finding of these runs."""
        return [{"id": id_of(name), **self._spark(name)} for name in names[:MOST_SPARKS]]

    def _row(self, name: str, make: Callable[[str], tuple[dict[str, Any], bool]]) -> dict[str, Any]:
        """Return the row of a run or sweep; that of one which is over is kept."""
        shown: dict[str, Any] = {"id": id_of(name), "name": name}
        places = self._places
        try:
            version = places.journal_version(name)
            live = places.live()
            is_live = bool(live) and real_path(places.child(name).uri) in live

            def row(before: object) -> dict[str, Any]:
                made, is_over = make(name)
                if not is_over:
                    raise _GoesOn({**made, **shown})
                places.settle(name, version)
                return {**made, **shown}

            return self._rows.get(name, (version, is_live), row)
        except _GoesOn as going:
            return going.row
        except _UNREADABLE_ERRORS as error:
            return {**shown, "state": UNREADABLE, "reason": str(error), "started": 0.0}

    def _run(self, name: str) -> tuple[dict[str, Any], bool]:
        record = self._places.record(name)
        summary = summarize(name, record.facts, run=record.state)
        live = record.found.live
        row = {
            **asdict(summary),
            "pid": live.card.pid if live is not None else 0,
            "reason": record.state.reason,
            "silent_since": silence_of(record),
        }
        return row, live is None and summary.state in (*lifecycle.ENDED, INTERRUPTED)

    def _sweep(self, name: str) -> tuple[dict[str, Any], bool]:
        sweep = self._places.sweep(name)
        summary = sweeps.summary_of(sweep.found, sweep.watch, sweep.settings)
        return asdict(summary), sweep.found.live is None and summary.state not in ("running", UNREADABLE)

    def _spark(self, name: str) -> dict[str, Any]:
        try:
            version = self._places.version(name)
            return self._sparks.get(name, version, lambda _: _spark(self._places, self._places.record(name)))
        except _UNREADABLE_ERRORS as error:
            return {"error": str(error)}


class _GoesOn(Exception):
    """The row of a run that goes on, which is not kept: it changes with the time."""

    def __init__(self, row: dict[str, Any]) -> None:
        super().__init__()
        self.row = row


def silence_of(record: RunRecord) -> float:
    """Return when a run of another machine was last heard of, where that is long ago; else 0.0."""
    if record.found.live is not None:
        return 0.0
    starts = [fact for fact in record.facts if isinstance(fact, ev.RunStarted)]
    return silent_since(record.found.place, record.state, starts, time.time())


def _spark(places: Places, record: RunRecord) -> dict[str, Any]:
    place = record.found.place
    names = curves.metric_names(place, record.state)
    chosen = choose_metric(names, _score_attribute(record))
    others = [name for name in names if name != chosen][: _MOST_VALUES - 1]
    small = spark(place, record.state, chosen) if chosen else None
    report = _report(places, record) if record.has_ended else None
    warnings = [one for one in report.findings if one.severity != "info"] if report is not None else []
    return {
        "spark": small,
        "others": [
            {"name": one["name"], "value": one["value"]}
            for name in others
            if (one := spark(place, record.state, name, pixels=1)) is not None
        ],
        "finding": finding_view(warnings[0]) if warnings else None,
    }


def _report(places: Places, record: RunRecord) -> Report | None:
    return final.report_of(record.found.place, record.found.name, lambda: places.telemetry(record))


def _score_attribute(record: RunRecord) -> str:
    try:
        config = run_json.read(record.found.place).get("run_config", {}).get("checkpoint_config") or {}
    except (FileNotFoundError, PowertrainError):
        return ""
    attribute = config.get("checkpoint_score_attribute")
    return attribute if isinstance(attribute, str) else ""


def choose_metric(names: Sequence[str], preferred: str) -> str:
    """Return the metric that stands for a run: its score, else a loss, else the first; "" if there is none."""
    if preferred in names:
        return preferred
    losses = [name for name in names if "loss" in name.lower()]
    return (losses or list(names) or [""])[0]
