"""What a run does after the wait that it is in: a value, so that it can be named, compared and replaced.

Three waits have a next step: until the processes of an attempt are gone (``Clearing``), until storage has taken all
checkpoints (``Settling``), and until all validations have ended (``Validating``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DismissRanks:
    """Every function has returned: let the ranks exit."""


@dataclass(frozen=True)
class DecideOnRetry:
    """An attempt failed, lost slots or is regrouped: start the next one, or end the run."""


@dataclass(frozen=True)
class RetryAfter:
    """Start the next attempt in ``delay`` seconds."""

    delay: float


@dataclass(frozen=True)
class FinishRun:
    """End the run with what its functions returned."""


@dataclass(frozen=True)
class EndRun:
    """End the run in ``state`` for ``reason``; with ``state`` "", as the request to stop says."""

    state: str = ""
    reason: str = ""


#: What can follow once the processes of an attempt are gone.
AfterClearing = DecideOnRetry | FinishRun | EndRun


@dataclass(frozen=True)
class KillRanks:
    """End the processes of the attempt; ``then`` follows when they are gone."""

    then: AfterClearing


NextStep = DismissRanks | KillRanks | DecideOnRetry | RetryAfter | FinishRun | EndRun
