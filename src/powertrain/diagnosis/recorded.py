"""What a run's directory has recorded, as tables; and so its diagnosis, made again at any time.

Needs nothing but the directory: whatever ended the run, what its ranks had recorded until then is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from powertrain.diagnosis.report import diagnose
from powertrain.diagnosis.summary import Report
from powertrain.diagnosis.tables.samples import Samples, samples_of
from powertrain.diagnosis.tables.settled import LEAST_STEPS
from powertrain.diagnosis.tables.steps import StepTable, aligned
from powertrain.errors import StorageError
from powertrain.run import events as ev
from powertrain.run.health.hang_report import rank_names
from powertrain.run.record import journal
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.trace import store


@dataclass(frozen=True)
class Recorded:
    """One attempt of a run."""

    attempt: int
    steps: StepTable
    samples: dict[int, Samples]
    #: What ranks have told of themselves, by rank.
    facts: Mapping[int, Mapping[str, Any]]
    #: What whoever reads this should know, one sentence each.
    notes: tuple[str, ...]


#: Records of all ranks together by which a run is judged, the newest: it takes a second for each of these.
_JUDGED = 200_000


def read(storage: Storage, attempt: int | None = None, *, most: int = 0) -> Recorded:
    """The given attempt; the newest one with enough steps to judge by where none is given, else that with most steps.

    With ``most``, only so many records of all ranks together are read, the newest.
    Raises StorageError where the run has recorded nothing, or has no such attempt.
    """
    telemetry = store.read(storage)
    recorded = sorted({*telemetry.steps, *telemetry.samples})
    if not recorded or (attempt is not None and attempt not in recorded):
        raise StorageError(_nothing_there(storage, attempt, recorded))
    hosts = _hosts(storage)
    wanted = recorded if attempt is None else [attempt]
    every = {number: telemetry.steps.get(number, {}) for number in wanted}
    tables = {number: aligned(_newest(every[number], most), hosts.get(number, {})) for number in wanted}
    chosen = _telling_attempt(tables) if attempt is None else attempt
    on_hosts = hosts.get(chosen, {})
    return Recorded(
        attempt=chosen,
        steps=tables[chosen],
        samples=samples_of(telemetry.samples.get(chosen, {}), on_hosts),
        facts=telemetry.facts.get(chosen, {}),
        notes=(*_notes(chosen, recorded, tables[chosen], on_hosts), *_left_out(every[chosen], most)),
    )


def report_of(storage: Storage, name: str = "", attempt: int | None = None) -> Report:
    """The diagnosis of a run from its directory alone. Raises as :func:`read` does."""
    recorded = read(storage, attempt, most=_JUDGED)
    return diagnose(
        recorded.steps,
        recorded.samples,
        name=name,
        seen=_first_of(recorded.facts, "seen", {}),
        flops_per_sample=_first_of(recorded.facts, "flops_per_sample", 0.0),
        peak_flops=_first_of(recorded.facts, "peak_flops", 0.0),
        notes=recorded.notes,
    )


def _hosts(storage: Storage) -> dict[int, dict[int, str]]:
    """Host of each rank, by attempt."""
    started = (event for event in journal.read(storage) if isinstance(event, ev.AttemptStarted))
    return {event.attempt: dict(enumerate(event.hosts)) for event in started}


def _telling_attempt(tables: Mapping[int, StepTable]) -> int:
    enough = [number for number, steps in tables.items() if len(steps) >= LEAST_STEPS]
    return max(enough) if enough else max(tables, key=lambda number: (len(tables[number]), number))


def _first_of(facts: Mapping[int, Mapping[str, Any]], name: str, default: Any) -> Any:
    """What the first rank that knows says."""
    return next((facts[rank][name] for rank in sorted(facts) if facts[rank].get(name)), default)


def _notes(attempt: int, recorded: list[int], steps: StepTable, hosts: Mapping[int, str]) -> list[str]:
    notes = []
    if len(recorded) > 1:
        notes.append(
            f"This is attempt {attempt} of {len(recorded)} that were recorded, from {recorded[0]} on."
        )
    if silent := sorted(set(hosts) - set(steps.ranks)):
        notes.append(f"Nothing was recorded of {rank_names(silent)}.")
    return notes


def _newest(ranks: Mapping[int, Any], most: int) -> Mapping[int, Any]:
    """Of each rank's steps the newest, ``most`` of all ranks together; and none that other ranks never came to."""
    if not most or not all(map(len, ranks.values())) or not ranks:
        return ranks
    last = min(table["step"][-1] for table in ranks.values())
    reached = {rank: table[table["step"] <= last] for rank, table in ranks.items()}
    return {rank: table[-(most // len(ranks)) :] for rank, table in reached.items()}


def _left_out(ranks: Mapping[int, Any], most: int) -> list[str]:
    kept, judged = max(map(len, ranks.values()), default=0), most // max(1, len(ranks))
    if not most or kept <= judged:
        return []
    return [f"It is judged by the newest {judged:,} of {kept:,} steps that were kept."]


def _nothing_there(storage: Storage, attempt: int | None, recorded: list[int]) -> str:
    place = without_secrets(storage.uri)
    if recorded:
        there = ", ".join(map(str, recorded))
        return f"Nothing was recorded of attempt {attempt} of the run at {place}. It has {there}."
    return f"Nothing was recorded of the steps of the run at {place}, so nothing can be said of them."
