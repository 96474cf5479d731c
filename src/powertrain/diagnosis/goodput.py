"""Where the time of a run goes: training, and each cause for which it does not train. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from powertrain.run import events as ev

#: The only cause that brings a run forward.
TRAINING = "training"
#: Where the time of a run goes, with words for people.
CAUSES = {
    TRAINING: "Training",
    "redone": "Training that a restart repeated",
    "hang": "Hanging",
    "startup": "Starting up",
    "queue": "Waiting for resources",
    "recovery": "Recovering",
    "resize": "Changing the number of workers",
    "save": "Reporting and saving",
}


class TimeShare(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a run with one cause."""

    #: A key of :data:`CAUSES`.
    cause: str
    seconds: float
    #: Of the whole time of the run.
    share: float

    @property
    def words(self) -> str:
        return CAUSES.get(self.cause, self.cause)


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
    if isinstance(fact, ev.Resized):
        return "resize"
    if isinstance(fact, (ev.Failed, ev.Lost)):
        return "recovery"
    if isinstance(fact, ev.SlotsWaited):
        return "queue" if current.cause in ("recovery", "resize") else None
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


def goodput(parts: Iterable[Span], reporting: float = 0.0) -> tuple[TimeShare, ...]:
    """Return the seconds and the share of each cause, in the order of :data:`CAUSES`; causes without time are left out.

    Args:
        parts: The time of the run, as :func:`spans` returns it.
        reporting: The share of a step that reports and saves take, by the telemetry.
    """
    seconds = dict.fromkeys(CAUSES, 0.0)
    for span in parts:
        seconds[span.cause] += span.seconds
    seconds["save"] = seconds["training"] * min(max(reporting, 0.0), 1.0)
    seconds["training"] -= seconds["save"]
    total = sum(seconds.values())
    return tuple(
        TimeShare(cause=cause, seconds=spent, share=spent / total)
        for cause, spent in seconds.items()
        if spent > 0
    )


def training_share(time: Iterable[TimeShare]) -> float:
    """Return the goodput: the share of the time in which the run made progress that it kept; 0 if unknown."""
    return sum(one.share for one in time if one.cause == TRAINING)


def last_known(facts: Sequence[ev.Event], newest_step: float = 0.0) -> float:
    """Return the Unix time up to which a run is known to have been at work: its last fact, or its newest step."""
    return max([newest_step, *(fact.time for fact in facts)])
