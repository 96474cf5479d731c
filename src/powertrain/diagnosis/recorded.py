"""The telemetry of a run's directory as tables, and the diagnosis of it at any time.

Needs only the directory: the records up to the end of the run are read, also after a crash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from powertrain.diagnosis import goodput
from powertrain.diagnosis.report import diagnose
from powertrain.diagnosis.summary import Report
from powertrain.diagnosis.tables.samples import Samples, samples_of
from powertrain.diagnosis.tables.steady import LEAST_STEPS
from powertrain.diagnosis.tables.steps import StepTable, aligned
from powertrain.errors import StorageError
from powertrain.run import events as ev
from powertrain.run.health.hang_report import rank_names
from powertrain.run.record import journal
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.trace import store
from powertrain.trace.recording.phases import NAMES, REPORT


@dataclass(frozen=True)
class Recorded:
    """One attempt of a run."""

    attempt: int
    steps: StepTable
    samples: dict[int, Samples]
    #: Facts that ranks have sent about themselves, by rank.
    facts: Mapping[int, Mapping[str, Any]]
    #: Remarks for the reader, one sentence each.
    notes: tuple[str, ...]
    #: The time of the whole run; see :func:`powertrain.diagnosis.goodput.spans`.
    spans: tuple[goodput.Span, ...] = ()


#: Number of newest records of all ranks together that a diagnosis reads, which takes about a second.
_RECORDS_LIMIT = 200_000


def read(
    storage: Storage,
    attempt: int | None = None,
    *,
    most: int = 0,
    telemetry: store.RecordedTelemetry | None = None,
) -> Recorded:
    """Return the given attempt; by default the newest one with enough steps, else that with most steps.

    With ``most``, only that many of the newest records of all ranks together are used. ``telemetry`` are the run's
    records where they have been read already.
    Raises StorageError if the run has no records, or no such attempt.
    """
    telemetry = store.read(storage) if telemetry is None else telemetry
    recorded = sorted({*telemetry.steps, *telemetry.samples})
    if not recorded or (attempt is not None and attempt not in recorded):
        raise StorageError(_explain_missing(storage, attempt, recorded))
    facts = journal.read(storage)
    hosts = _hosts(facts)
    wanted = recorded if attempt is None else [attempt]
    every = {number: telemetry.steps.get(number, {}) for number in wanted}
    tables = {number: aligned(_newest(every[number], most), hosts.get(number, {})) for number in wanted}
    chosen = _choose_attempt(tables) if attempt is None else attempt
    on_hosts = hosts.get(chosen, {})
    return Recorded(
        attempt=chosen,
        steps=tables[chosen],
        samples=samples_of(telemetry.samples.get(chosen, {}), on_hosts),
        facts=telemetry.facts.get(chosen, {}),
        notes=(*_notes(chosen, recorded, tables[chosen], on_hosts), *_left_out(every[chosen], most)),
        spans=tuple(goodput.spans(facts, goodput.last_known(facts, _newest_step(tables.values())))),
    )


def report_of(
    storage: Storage,
    name: str = "",
    attempt: int | None = None,
    telemetry: store.RecordedTelemetry | None = None,
) -> Report:
    """Return the diagnosis of a run from its directory alone. Arguments and errors are those of :func:`read`."""
    recorded = read(storage, attempt, most=_RECORDS_LIMIT, telemetry=telemetry)
    report = diagnose(
        recorded.steps,
        recorded.samples,
        name=name,
        seen=_first_of(recorded.facts, "seen", {}),
        flops_per_sample=_first_of(recorded.facts, "flops_per_sample", 0.0),
        step_flops={rank: float(of.get("step_flops") or 0) for rank, of in recorded.facts.items()},
        peak_flops=_first_of(recorded.facts, "peak_flops", 0.0),
        compiled={rank: of.get("compiled") or () for rank, of in recorded.facts.items()},
        devices=recorded.facts,
        notes=recorded.notes,
    )
    reporting = sum(phase.share for phase in report.phases if phase.phase == NAMES[REPORT])
    return msgspec.structs.replace(report, time=_time(recorded.spans, reporting))


def _time(spans: Sequence[goodput.Span], reporting: float) -> tuple[goodput.TimeShare, ...]:
    """Return where the run's time went; empty where its journal, of an earlier version, lacks it."""
    is_recorded = any(span.cause == goodput.TRAINING for span in spans)
    return goodput.goodput(spans, reporting) if is_recorded else ()


def _newest_step(tables: Iterable[StepTable]) -> float:
    """Return the Unix time at which the newest step began; 0 without steps."""
    begins = [float(np.nanmax(steps.start[-1])) for steps in tables if len(steps)]
    return max((begin for begin in begins if math.isfinite(begin)), default=0.0)


def _hosts(facts: Iterable[ev.Event]) -> dict[int, dict[int, str]]:
    """Return the host of each rank, by attempt."""
    started = (event for event in facts if isinstance(event, ev.AttemptStarted))
    return {event.attempt: dict(enumerate(event.hosts)) for event in started}


def _choose_attempt(tables: Mapping[int, StepTable]) -> int:
    enough = [number for number, steps in tables.items() if len(steps) >= LEAST_STEPS]
    return max(enough) if enough else max(tables, key=lambda number: (len(tables[number]), number))


def _first_of(facts: Mapping[int, Mapping[str, Any]], name: str, default: Any) -> Any:
    """Return the value of the first rank that has one."""
    return next((facts[rank][name] for rank in sorted(facts) if facts[rank].get(name)), default)


def _notes(attempt: int, recorded: list[int], steps: StepTable, hosts: Mapping[int, str]) -> list[str]:
    notes = []
    if len(recorded) > 1:
        notes.append(
            f"This is attempt {attempt}; {len(recorded)} attempts were recorded, the first is {recorded[0]}."
        )
    if silent := sorted(set(hosts) - set(steps.ranks)):
        notes.append(f"No steps were recorded on {rank_names(silent)}.")
    return notes


def _newest(ranks: Mapping[int, Any], most: int) -> Mapping[int, Any]:
    """Return the newest steps of each rank, ``most`` in total, up to the last step that all have reached."""
    if not most or not all(map(len, ranks.values())) or not ranks:
        return ranks
    last = min(table["step"][-1] for table in ranks.values())
    reached = {rank: table[table["step"] <= last] for rank, table in ranks.items()}
    return {rank: table[-(most // len(ranks)) :] for rank, table in reached.items()}


def _left_out(ranks: Mapping[int, Any], most: int) -> list[str]:
    kept, judged = max(map(len, ranks.values()), default=0), most // max(1, len(ranks))
    if not most or kept <= judged:
        return []
    return [f"Findings are based on the newest {judged:,} of {kept:,} recorded steps."]


def _explain_missing(storage: Storage, attempt: int | None, recorded: list[int]) -> str:
    place = without_secrets(storage.uri)
    if recorded:
        there = ", ".join(map(str, recorded))
        return f"The run at {place} has no recorded steps of attempt {attempt}, only of {there}."
    return f"The run at {place} has no recorded steps, so there is nothing to diagnose."
