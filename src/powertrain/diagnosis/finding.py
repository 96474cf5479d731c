"""What a diagnosis says: a finding, with its evidence and what to do about it."""

from __future__ import annotations

from typing import Any

import msgspec

#: How much a finding matters, the most first.
SEVERITIES = ("critical", "warning", "info")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a run, or that all is well.

    ``kind`` is a stable name for programs (``docs/diagnosis.md`` lists all); the other words are for people.
    """

    kind: str
    severity: str
    #: One sentence with the numbers that matter.
    summary: str
    #: One sentence that says what to do, with sizes where they follow from the evidence; "" where there is nothing.
    action: str = ""
    #: The phase it is about, by its name in :mod:`powertrain.trace.recording.phases`; "" where it is about none.
    phase: str = ""
    #: The ranks it is about, and their hosts; empty where it is about all of them.
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    #: Seconds a step, or whatever else says how much it costs: what remedies are ranked by. A share of the step's time.
    cost: float = 0.0
    #: Numbers behind it, by name; durations in seconds, memory in MiB.
    evidence: dict[str, Any] = {}
    #: Findings that are only echoes of this one.
    echoes: tuple[Finding, ...] = ()
