"""The course of a run from its journal: attempts, what happened, and where the time went. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from powertrain.run import events as ev
from powertrain.run.record.milestones import milestones

#: Where the time of a run goes, with words for people; the first is the only one that brings it forward.
CAUSES = {
    "training": "Training",
    "redone": "Training that a restart repeated",
    "hang": "Hanging",
    "startup": "Starting up",
    "queue": "Waiting for resources",
    "recovery": "Recovering",
}


@dataclass(frozen=True)
class Span:
    """A part of the run's time with one cause. Times are Unix seconds."""

    cause: str
    begin: float
    end: float
    #: -1 before the first attempt.
    attempt: int = -1
    world_size: int = 0

    @property
    def seconds(self) -> float:
        return max(0.0, self.end - self.begin)


def spans(facts: Sequence[ev.Event], until: float) -> list[Span]:
    """Return the time of a run in consecutive spans. Time in which no driver worked on it is in none.

    Args:
        facts: The journal.
        until: The end of the last span, if the run has not ended.
    """
    found: list[Span] = []
    current: Span | None = None
    last = 0.0
    committed: list[ev.Committed] = []
    for fact in facts:
        now = max(fact.time, last)
        if isinstance(fact, ev.RunStarted):
            if current is not None:  # its driver was killed: nothing is known after its last fact
                found.append(replace(current, end=max(current.begin, last)))
            current = Span("queue", now, now)
        elif isinstance(fact, ev.Ended):
            if current is not None:
                found.append(replace(current, end=now))
            current = None
        elif isinstance(fact, ev.Committed):
            committed.append(fact)
        elif isinstance(fact, ev.HangNoticed) and current is not None and current.cause == "training":
            began = max(current.begin, now - max(0.0, fact.seconds))
            found.append(replace(current, end=began))
            current = replace(current, cause="hang", begin=began, end=began)
        elif current is not None and (cause := _cause_after(fact, current)) is not None:
            found.append(replace(current, end=now))
            current = replace(current, cause=cause, begin=now, end=now)
            if isinstance(fact, ev.AttemptStarted):
                current = replace(current, attempt=fact.attempt, world_size=fact.world_size)
                found = _with_redone(found, fact, committed)
        last = now
    if current is not None:
        found.append(replace(current, end=max(current.begin, until)))
    return [span for span in found if span.seconds > 0]


def _cause_after(fact: ev.Event, current: Span) -> str | None:
    """Return the cause of the time after a fact; None if the fact changes nothing."""
    if isinstance(fact, ev.AttemptStarted):
        return "startup"
    if isinstance(fact, ev.TrainingStarted):
        return "training"
    if isinstance(fact, ev.HangOver):
        return "training" if current.cause == "hang" else None
    if isinstance(fact, (ev.Failed, ev.Lost, ev.Resized)):
        return "recovery"
    if isinstance(fact, ev.SlotsWaited):
        return "queue" if current.cause == "recovery" else None
    return None


def _with_redone(
    found: Sequence[Span], started: ev.AttemptStarted, committed: Iterable[ev.Committed]
) -> list[Span]:
    """Return the spans with training cut off where the new attempt goes back to: from the last kept commit on."""
    earlier = [span for span in found if span.cause == "training"]
    if not earlier:
        return list(found)
    kept = [fact.time for fact in committed if fact.row < started.first_row]
    since = max(kept, default=0.0 if started.first_row <= 1 else earlier[-1].end)
    split: list[Span] = []
    for span in found:
        if span.cause != "training" or span.end <= since:
            split.append(span)
            continue
        middle = max(span.begin, since)
        split += [replace(span, end=middle), replace(span, cause="redone", begin=middle)]
    return split


def goodput(parts: Iterable[Span]) -> list[dict[str, Any]]:
    """Return the seconds and the share of each cause, in the order of :data:`CAUSES`."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    for span in parts:
        seconds[span.cause] += span.seconds
    total = sum(seconds.values())
    return [
        {"cause": cause, "words": CAUSES[cause], "seconds": spent, "share": spent / total}
        for cause, spent in seconds.items()
        if spent > 0
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
        told = _told(fact)
        if told is not None:
            found.append({"time": fact.time, "kind": told[0], "words": told[1]})
    return found[::-1]


def _told(fact: ev.Event) -> tuple[str, str] | None:
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
    return _told_of_trouble(fact)


def _told_of_trouble(fact: ev.Event) -> tuple[str, str] | None:
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
