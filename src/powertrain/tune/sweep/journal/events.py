"""The facts of a sweep, in chronological order. Replaying them rebuilds the sweep."""

from __future__ import annotations

from typing import Any, Union

import msgspec


class SweepFact(msgspec.Struct, frozen=True, kw_only=True, tag_field="fact"):
    """A fact with its Unix time."""

    time: float


class SweepStarted(SweepFact, frozen=True, kw_only=True, tag="sweep_started"):
    """A driver has taken the sweep. ``start`` counts them from 1."""

    start: int
    host: str = ""
    pid: int = 0
    metric: str = ""
    mode: str = ""


class TrialAdded(SweepFact, frozen=True, kw_only=True, tag="trial_added"):
    """The searcher has suggested a configuration.

    Attributes:
        config: The configuration if JSON can represent it, otherwise a readable form of it.
        is_exact: Whether ``config`` is the configuration itself. If not, ``pickled`` has it.
        pickled: The key of a signed pickle of the configuration; "" if ``config`` is exact.
        params: The values that were drawn, by path.
    """

    trial: str
    number: int
    name: str
    config: dict[str, Any]
    is_exact: bool = True
    pickled: str = ""
    params: dict[str, Any] = {}


class SearchEnded(SweepFact, frozen=True, kw_only=True, tag="search_ended"):
    """The search has ended: no more trials follow."""


class SearchReopened(SweepFact, frozen=True, kw_only=True, tag="search_reopened"):
    """The search is open again: a driver was given a larger ``num_samples``."""


class TrialStarted(SweepFact, frozen=True, kw_only=True, tag="trial_started"):
    """The run of a trial has started, or restarted."""

    trial: str


class TrialReported(SweepFact, frozen=True, kw_only=True, tag="trial_reported"):
    """Rank 0 of a trial has reported. ``seconds`` counts all of the trial's starts.

    ``metrics`` are in the form of :func:`powertrain.checkpoint.manifest.to_json_value`, which keeps infinities.
    ``is_saved`` tells whether the report includes a checkpoint.
    """

    trial: str
    iteration: int
    seconds: float
    metrics: dict[str, Any]
    is_saved: bool = False


class TrialDecided(SweepFact, frozen=True, kw_only=True, tag="trial_decided"):
    """A scheduler, a stopper or the user has decided about a trial.

    Attributes:
        action: "stop", "pause" or "continue" (also: resume, or exploit, if there is a source).
        source: The trial whose checkpoint this one continues from; "" for its own.
        source_iteration: The row of the source at that time.
        config: The configuration that it continues with; None for its own.
        reason: The reason, as text.
    """

    trial: str
    action: str
    source: str = ""
    source_iteration: int = 0
    config: dict[str, Any] | None = None
    is_exact: bool = True
    pickled: str = ""
    reason: str = ""


class TrialFailed(SweepFact, frozen=True, kw_only=True, tag="trial_failed"):
    """The run of a trial has failed and is restarted."""

    trial: str


class TrialEnded(SweepFact, frozen=True, kw_only=True, tag="trial_ended"):
    """A trial has ended. ``state`` is that of its run."""

    trial: str
    status: str
    state: str = ""
    reason: str = ""
    seconds: float = 0.0


class TrialRevived(SweepFact, frozen=True, kw_only=True, tag="trial_revived"):
    """A failed trial runs again, after ``Tuner.restore(resume_errored=True)``."""

    trial: str
    #: The new run of a trial that starts over; "" to resume its run from its newest checkpoint.
    fresh_name: str = ""


class SweepEnded(SweepFact, frozen=True, kw_only=True, tag="sweep_ended"):
    """The sweep is complete ("finished"), or a driver has left it to be resumed ("stopped")."""

    state: str
    reason: str = ""


SweepEvent = Union[
    SweepStarted,
    TrialAdded,
    SearchEnded,
    SearchReopened,
    TrialStarted,
    TrialReported,
    TrialDecided,
    TrialFailed,
    TrialEnded,
    TrialRevived,
    SweepEnded,
]
#: Facts that must be durable before they are acted upon.
DURABLE = (TrialDecided, TrialEnded, SweepEnded)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(SweepEvent)


def encode_event(event: SweepEvent) -> bytes:
    """Return the fact as JSON."""
    return _encoder.encode(event)


def decode_event(line: bytes) -> SweepEvent:
    """Return the fact of a line; raises ``msgspec.DecodeError`` for anything else."""
    event: SweepEvent = _decoder.decode(line)
    return event
