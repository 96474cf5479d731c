"""One run in words and tables: checkpoints, findings, phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from powertrain.checkpoint import committed
from powertrain.checkpoint.manifest import Manifest
from powertrain.diagnosis import final
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.summary import Report
from powertrain.errors import PowertrainError
from powertrain.result.contents import Contents
from powertrain.run import events as ev
from powertrain.run.lifecycle import RunState
from powertrain.run.metrics.curves import times_of_rows
from powertrain.run.record import run_json
from powertrain.storage import Storage
from powertrain.terminal.text import metric_pairs
from powertrain.trace.store import RecordedTelemetry
from powertrain.worker.data.shards import in_words, positions_in

#: The most metrics of a checkpoint that are shown.
_METRICS_OF_CHECKPOINT = 4
#: The newest checkpoints, whose uploads are timed: each takes a look at the run's points.
_CHECKPOINTS_WITH_LAG = 20


def checkpoints(storage: Storage, facts: Sequence[ev.Event], state: RunState) -> dict[str, Any]:
    """Return the committed checkpoints, oldest first, those that could not be saved, and the data position."""
    manifests = committed.with_validations(committed.committed(storage), committed.validations(storage))
    best = _best(storage, manifests)
    newest = [one.row for one in manifests[-_CHECKPOINTS_WITH_LAG:]]
    reported = times_of_rows(storage, state, newest)
    at = {fact.checkpoint: fact.time for fact in facts if isinstance(fact, ev.Committed)}
    return {
        "committed": [
            {
                "name": one.name,
                "row": one.row,
                "bytes": one.bytes,
                "files": len(one.files),
                "time": at.get(one.name, one.created),
                "lag": _lag(at.get(one.name), reported.get(one.row)),
                "metrics": metric_pairs(one.metrics, limit=_METRICS_OF_CHECKPOINT),
                "is_best": one.name == best,
            }
            for one in manifests
        ],
        "unsaved": [{"name": one.name, "row": one.row, "reason": one.reason} for one in state.unsaved],
        "data": in_words(positions_in(manifests[-1].extras)) if manifests else "",
    }


def _lag(committed_at: float | None, reported_at: float | None) -> float | None:
    """Return the seconds from a report to the commit of its checkpoint; None where one of them is not known."""
    if committed_at is None or reported_at is None:
        return None
    return max(0.0, committed_at - reported_at)


def progress(storage: Storage, rows: int) -> dict[str, Any] | None:
    """Return the rows of a run that were made, as a share of those after which it stops; None where that is unknown."""
    try:
        stop = run_json.read(storage).get("run_config", {}).get("stop")
    except (FileNotFoundError, PowertrainError):
        return None
    limit = stop.get("training_iteration") if isinstance(stop, dict) else None
    if not isinstance(limit, (int, float)) or not 0 < limit < 1e15:
        return None
    return {"rows": limit, "share": min(1.0, rows / limit)}


def _best(storage: Storage, manifests: Sequence[Manifest]) -> str:
    def unused() -> Any:
        raise AssertionError("the best checkpoint follows from the manifests")

    run = Contents(storage.uri, lambda: storage, unused, unused, lambda: manifests, unused)
    return run.best()


def diagnosis(
    storage: Storage, name: str, telemetry: Callable[[], RecordedTelemetry] | None = None
) -> dict[str, Any] | None:
    """Return the findings and the time of phases; None if no steps were recorded.

    ``telemetry`` returns the run's records where they have been read already.
    """
    report = final.report_of(storage, name, telemetry)
    return report_view(report) if report is not None else None


def report_view(report: Report) -> dict[str, Any]:
    """Return a diagnosis for a page."""
    return {
        "findings": [finding_view(found) for found in report.findings],
        "steps": report.steps,
        "step_seconds": report.step_seconds,
        "phases": [{"phase": one.phase, "seconds": one.seconds, "share": one.share} for one in report.phases],
        "throughput": {
            "steps": report.throughput.steps_per_second,
            "samples": report.throughput.samples_per_second,
            "tokens": report.throughput.tokens_per_second,
            "mfu": report.throughput.mfu,
        },
        "notes": list(report.notes),
    }


def finding_view(found: Finding) -> dict[str, Any]:
    """Return a finding for a page."""
    return {
        "kind": found.kind,
        "severity": found.severity,
        "summary": found.summary,
        "action": found.action,
        "ranks": list(found.ranks),
        "cost": found.cost,
        "evidence": [[str(key), str(value)] for key, value in found.evidence.items()],
    }
