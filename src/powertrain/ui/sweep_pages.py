"""Content of a sweep's page: trials, parallel coordinates, learning curves, importance of parameters."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from powertrain.checkpoint.manifest import from_json_value
from powertrain.errors import StorageError
from powertrain.lookup.finding import FoundRun
from powertrain.lookup.sweeps import objective, summary_of
from powertrain.storage.addresses import without_secrets
from powertrain.tune.plots import MISSING, explain_ranks, scale_values
from powertrain.tune.reporter.table import find_best, status_of
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.trial import Trial, flat_numbers
from powertrain.ui.places import SweepRecord
from powertrain.views.encoding import id_of

#: Points of a learning curve, trials with a curve, and parameters.
_MOST_POINTS, _MOST_CURVES, _MOST_PARAMETERS = 200, 200, 12


def sweep_page(sweep: SweepRecord) -> dict[str, Any]:
    """Return a sweep, from its journal and ``sweep.json`` alone."""
    found, watch, record = sweep.found, sweep.watch, sweep.settings
    if watch.start is None:
        raise StorageError(f"The sweep {found.name!r} cannot be shown: it has no journal.")
    metric, mode = objective(watch.sweep, record)
    trials = watch.trials
    best = find_best(trials, metric, mode)
    paths = list(dict.fromkeys(path for trial in trials for path in trial.evaluated_params))
    scores = [_last(trial, metric) for trial in trials]
    return {
        **asdict(summary_of(found, watch, record)),
        "id": id_of(found.name),
        "path": without_secrets(found.place.uri),
        "metric": metric,
        "mode": mode,
        "reason": watch.sweep.reason,
        "best_trial": best.name if best is not None else None,
        "trials": [_trial(found, trial, metric) for trial in trials],
        "axes": [_axis(trials, path, scores) for path in paths[:_MOST_PARAMETERS]],
        "curves": _curves(sweep.facts, trials, metric),
    }


def _trial(found: FoundRun, trial: Trial, metric: str) -> dict[str, Any]:
    return {
        "id": id_of(f"{found.name}/{trial.name}"),
        "name": trial.name,
        "number": trial.number,
        "state": status_of(trial),
        "reason": trial.reason,
        "params": [[path, _shown(value)] for path, value in trial.evaluated_params.items()],
        "iteration": trial.iteration,
        "seconds": trial.seconds,
        "score": _last(trial, metric),
    }


def _last(trial: Trial, metric: str) -> float | None:
    history = trial.metrics.get(metric)
    return history.last if history is not None and math.isfinite(history.last) else None


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:200]


def _axis(trials: list[Trial], path: str, scores: list[float | None]) -> dict[str, Any]:
    axis = scale_values([trial.evaluated_params.get(path, MISSING) for trial in trials])
    ended = [
        (trial.evaluated_params[path], score)
        for trial, score in zip(trials, scores, strict=True)
        if trial.is_ended and path in trial.evaluated_params and score is not None
    ]
    importance = explain_ranks([value for value, _ in ended], [score for _, score in ended])
    return {
        "path": path,
        "places": [round(place, 4) if math.isfinite(place) else None for place in axis.places.tolist()],
        "ticks": [[place, label] for place, label in axis.ticks],
        "is_log": axis.is_log,
        "importance": importance,
    }


def _curves(facts: list[ev.SweepEvent], trials: list[Trial], metric: str) -> list[dict[str, Any]]:
    """Return the reports of each trial as (iteration, value) columns, thinned to what a chart can show."""
    points: dict[str, dict[int, float]] = {trial.trial_id: {} for trial in trials[:_MOST_CURVES]}
    for fact in facts:
        if isinstance(fact, ev.TrialReported) and fact.trial in points:
            value = dict(flat_numbers(from_json_value(fact.metrics))).get(metric)
            if value is not None:
                points[fact.trial][fact.iteration] = value
    found = []
    for trial in trials[:_MOST_CURVES]:
        rows = sorted(points[trial.trial_id])
        step = max(1, -(-len(rows) // _MOST_POINTS))
        kept = sorted({*rows[::step], *rows[-1:]})
        values = [points[trial.trial_id][row] for row in kept]
        found.append(
            {
                "number": trial.number,
                "rows": kept,
                "last": [float(f"{value:.5g}") if math.isfinite(value) else None for value in values],
            }
        )
    return found
