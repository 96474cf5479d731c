"""The course of a run from its journal: what happened, and what charts mark. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from powertrain.diagnosis.goodput import CAUSES, Span, spans
from powertrain.diagnosis.goodput import goodput as shares_of
from powertrain.run import events as ev
from powertrain.run.record.milestones import milestones

__all__ = ["CAUSES", "Span", "goodput", "happenings", "marks", "spans"]


def goodput(parts: Iterable[Span], reporting: float = 0.0) -> list[dict[str, Any]]:
    """Return the seconds and the share of each cause with words for people; see :mod:`powertrain.diagnosis.goodput`."""
    return [
        {"cause": one.cause, "words": one.words, "seconds": one.seconds, "share": one.share}
        for one in shares_of(parts, reporting)
    ]


def marks(facts: Sequence[ev.Event]) -> list[dict[str, Any]]:
    """Return what charts mark: failures, restarts, resizes, hangs, preemptions, stops. ``row`` is None if unknown."""
    found: list[dict[str, Any]] = [
        {"kind": one.kind, "row": one.row, "time": one.time, "words": one.words} for one in milestones(facts)
    ]
    for fact in facts:
        if isinstance(fact, ev.HangNoticed):
            words = (fact.message.splitlines() or [""])[0]
            found.append({"kind": "hang", "row": fact.row, "time": fact.time, "words": words})
        elif isinstance(fact, ev.Notified):
            found.append({"kind": "preemption", "row": None, "time": fact.time, "words": fact.reason})
        elif isinstance(fact, ev.Lost):
            found.append({"kind": "loss", "row": None, "time": fact.time, "words": fact.reason})
        elif isinstance(fact, ev.Stopping):
            found.append({"kind": "stop", "row": None, "time": fact.time, "words": fact.reason})
    return sorted(found, key=lambda mark: float(mark["time"]))


def happenings(facts: Sequence[ev.Event], most: int | None = None) -> list[dict[str, Any]]:
    """Return the events of a run for a table, oldest first; the newest ``most`` if given."""
    found: list[dict[str, Any]] = []
    for fact in reversed(facts):
        if len(found) == most:
            break
        described = _describe_event(fact)
        if described is not None:
            found.append({"time": fact.time, "kind": described[0], "words": described[1]})
    return found[::-1]


def _describe_event(fact: ev.Event) -> tuple[str, str] | None:
    """Return the kind and the words of a fact; None if it is of no interest to people."""
    if isinstance(fact, ev.RunStarted):
        resumed = f", resumed from {fact.checkpoint}" if fact.checkpoint else ""
        return "start", f"started on {fact.host} with the engine {fact.engine}{resumed}"
    if isinstance(fact, ev.SlotsWaited):
        return "queue", fact.reason
    if isinstance(fact, ev.AttemptStarted):
        return "attempt", f"attempt {fact.attempt}: {fact.world_size} workers from row {fact.first_row}"
    if isinstance(fact, ev.Committed):
        return "checkpoint", f"{fact.checkpoint} committed at row {fact.row}"
    if isinstance(fact, ev.CheckpointFailed):
        return "failure", f"the checkpoint of row {fact.row} was not saved: {fact.reason}"
    if isinstance(fact, ev.UploadLagged):
        return "lag", f"{fact.waiting} checkpoints wait for their upload. {fact.reason}".strip()
    return _trouble_in_words(fact)


def _trouble_in_words(fact: ev.Event) -> tuple[str, str] | None:
    if isinstance(fact, ev.Failed):
        first = fact.failures[0].summary if fact.failures else "the attempt failed"
        return "failure", f"{first} ({fact.decision.replace('_', ' ')}: {fact.reason})"
    if isinstance(fact, ev.Lost):
        return "loss", f"ranks lost: {fact.reason} ({fact.decision.replace('_', ' ')})"
    if isinstance(fact, ev.HangNoticed):
        return "hang", fact.message
    if isinstance(fact, ev.HangOver):
        return "hang", f"progress resumed after {fact.seconds:.0f} s"
    if isinstance(fact, ev.Notified):
        return "preemption", fact.reason
    if isinstance(fact, ev.Resized):
        return "resize", f"next attempt with {fact.world_size} workers: {fact.reason}"
    if isinstance(fact, ev.Stopping):
        return "stop", fact.reason
    if isinstance(fact, ev.Warned):
        return "warning", fact.message
    if isinstance(fact, ev.Ended):
        return "end", f"{fact.state}: {fact.reason}" if fact.reason else fact.state
    return None
