"""A finding of a diagnosis, with its evidence and its remedy."""

from __future__ import annotations

from typing import Any

import msgspec

#: Severities of findings, the highest first.
SEVERITIES = ("critical", "warning", "info")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of a run, or the statement that it is healthy.

    ``kind`` is a stable name for programs (``docs/diagnosis.md`` lists all); the other texts are for people.
    """

    kind: str
    severity: str
    #: One sentence with the numbers that matter.
    summary: str
    #: One sentence with the remedy, with sizes if they follow from the evidence; "" if there is none.
    action: str = ""
    #: The affected phase, by its name in :mod:`powertrain.trace.recording.phases`; "" for none.
    phase: str = ""
    #: The affected ranks and their hosts; empty for all of them.
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    #: The share of the step's time that it costs, by which findings are ordered.
    cost: float = 0.0
    #: Numbers behind it, by name; durations in seconds, memory in MiB.
    evidence: dict[str, Any] = {}
    #: Findings that this one explains.
    echoes: tuple[Finding, ...] = ()
