"""The list of runs and sweeps, and a small curve of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from powertrain.diagnosis import final
from powertrain.errors import PowertrainError
from powertrain.lookup import sweeps
from powertrain.lookup.summaries import UNREADABLE, summarize
from powertrain.run.metrics import curves
from powertrain.run.record import run_json
from powertrain.storage.addresses import without_secrets
from powertrain.ui.places import Places, RunRecord, id_of
from powertrain.views.metrics import spark
from powertrain.views.overview import finding_view

#: Errors of a run that must not hide all others.
_UNREADABLE_ERRORS = (PowertrainError, OSError, ValueError, OverflowError, RecursionError)
#: The most runs of one request for curves.
MOST_SPARKS = 50
_MOST_VALUES = 3


def list_runs(places: Places) -> dict[str, Any]:
    """Return all runs and sweeps, from their journals alone."""
    names, of_sweeps = places.names()
    runs = [_run(places, name) for name in names if name not in of_sweeps]
    return {
        "root": without_secrets(places.root.uri),
        "now": time.time(),
        "runs": sorted(runs, key=lambda run: -float(run["started"])),
        "sweeps": [_sweep(places, name) for name in of_sweeps],
    }


def list_version(places: Places) -> object:
    """Return a value that changes with the list."""
    names, _ = places.names()
    found = []
    for name in names:
        try:
            found.append((name, places.root.child(name).list("journal")))
        except _UNREADABLE_ERRORS as error:
            found.append((name, [str(error)]))  # type: ignore[list-item]
    return found, sorted(places.live())


def _run(places: Places, name: str) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": id_of(name), "name": name}
    try:
        record = places.record(name)
        summary = summarize(name, record.facts)
    except _UNREADABLE_ERRORS as error:
        return {**shown, "state": UNREADABLE, "reason": str(error), "started": 0.0}
    pid = record.found.live.card.pid if record.found.live is not None else 0
    return {**asdict(summary), **shown, "pid": pid, "reason": record.state.reason}


def _sweep(places: Places, name: str) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": id_of(name), "name": name}
    try:
        return {**asdict(sweeps.summarize(places.find(name))), **shown}
    except _UNREADABLE_ERRORS as error:
        return {**shown, "state": UNREADABLE, "reason": str(error), "started": 0.0}


def sparks(places: Places, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the small curve, the last values and the top finding of these runs."""
    found = []
    for name in names[:MOST_SPARKS]:
        try:
            found.append({"id": id_of(name), **_spark(places.record(name))})
        except _UNREADABLE_ERRORS as error:
            found.append({"id": id_of(name), "error": str(error)})
    return found


def _spark(record: RunRecord) -> dict[str, Any]:
    place = record.found.place
    names = curves.metric_names(place, record.state)
    chosen = choose_metric(names, _score_attribute(record))
    others = [name for name in names if name != chosen][: _MOST_VALUES - 1]
    small = spark(place, record.state, chosen) if chosen else None
    report = final.report_of(place, record.found.name) if record.has_ended else None
    told = [one for one in report.findings if one.severity != "info"] if report is not None else []
    return {
        "spark": small,
        "others": [
            {"name": one["name"], "value": one["value"]}
            for name in others
            if (one := spark(place, record.state, name, pixels=1)) is not None
        ],
        "finding": finding_view(told[0]) if told else None,
    }


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
