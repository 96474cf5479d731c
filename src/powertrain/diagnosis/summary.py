"""The whole diagnosis of a run as one value, and as JSON: ``final_summary.json``. Pure.

``docs/diagnosis.md`` describes the fields for readers without this package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.goodput import TimeShare
from powertrain.errors import StorageError
from powertrain.storage.sealed import DamagedError, check_seal, seal_json

#: Raised when a field changes its meaning or goes, not when one is added.
SCHEMA_VERSION = 1


class PhaseTime(msgspec.Struct, frozen=True):
    """One phase in the steps after start-up."""

    phase: str
    #: Median over the steps.
    seconds: float
    #: Share of the total time; the shares of a table add up to 1.
    share: float
    #: Mean over the steps; 0 in files of earlier versions.
    mean_seconds: float = 0.0


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Phase times of one rank."""

    rank: int
    host: str
    #: Median of a step.
    step_seconds: float
    phases: tuple[PhaseTime, ...]
    #: The most MiB of the device in use within a step; 0 without one.
    peak_memory_mib: float = 0.0


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput of all ranks together after start-up; 0 if unknown."""

    steps_per_second: float = 0.0
    samples_per_second: float = 0.0
    tokens_per_second: float = 0.0
    flops_per_second: float = 0.0
    #: Model FLOPs utilisation, relative to the peak of the devices; None if either is unknown. Operations that are
    #: recomputed in the backward pass count too, unless the user has given the number of operations of a sample.
    mfu: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The diagnosis of a run: phase times, throughput and findings."""

    schema_version: int = SCHEMA_VERSION
    #: Name of the run; "" if it has none.
    name: str = ""
    #: Root causes, the most severe and costliest first.
    findings: tuple[Finding, ...] = ()
    #: Steps that all ranks have recorded, and how many of those were start-up.
    steps: int = 0
    start_up_steps: int = 0
    #: Median of a step over all ranks.
    step_seconds: float = 0.0
    #: Mean of a step on the rank that takes longest: findings state times and shares of it. 0 in files of earlier
    #: versions.
    mean_step_seconds: float = 0.0
    #: Over all ranks, in the order of :data:`powertrain.trace.recording.phases.NAMES`; phases that never occurred are
    #: left out.
    phases: tuple[PhaseTime, ...] = ()
    ranks: tuple[RankTimes, ...] = ()
    throughput: Throughput = Throughput()
    #: Where the time of the whole run went, all attempts together; empty for a plain script, and in files of earlier
    #: versions.
    time: tuple[TimeShare, ...] = ()
    #: Remarks on the data for the reader, one sentence each.
    notes: tuple[str, ...] = ()


# --------------------------------------------------------------------------- JSON


def to_json(report: Report) -> bytes:
    """Return the content of ``final_summary.json``: indented, and sealed by a hash in its last line."""
    return seal_json(msgspec.json.format(msgspec.json.encode(report), indent=2))


def from_json(data: bytes) -> Report:
    """Return the report that :func:`to_json` encoded. Raises StorageError if it is invalid, or of a later version."""
    try:
        check_seal(data)
        version = msgspec.json.decode(data, type=_Versioned).schema_version
        if version > SCHEMA_VERSION:
            raise StorageError(
                f"This summary has schema version {version}, and this Powertrain reads up to {SCHEMA_VERSION}. "
                "Read it with the version of Powertrain that wrote it, or a later one."
            )
        return msgspec.json.decode(data, type=Report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, DamagedError) as error:
        raise StorageError(
            f"This is not a summary that Powertrain wrote: {error}. Make it again with `powertrain diagnose RUN`."
        ) from error


class _Versioned(msgspec.Struct):
    schema_version: int


def plain_finding(finding: Finding) -> Finding:
    """Return the finding in Python's own types, so that it is unchanged by JSON."""
    return msgspec.structs.replace(
        finding,
        ranks=tuple(int(rank) for rank in finding.ranks),
        hosts=tuple(str(host) for host in finding.hosts),
        cost=float(finding.cost) if math.isfinite(finding.cost) else 0.0,
        evidence=_plain(finding.evidence),
        echoes=tuple(plain_finding(echo) for echo in finding.echoes),
    )


def _plain(value: Any) -> Any:
    """Return numpy's numbers as Python's, tuples as lists, and non-finite numbers as None."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
