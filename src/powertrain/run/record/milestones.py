"""Milestones of a run by row: failures, restarts, changes of size. For plots of its metrics. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from powertrain.run import events as ev


class Milestone(NamedTuple):
    """An event of the whole run that its curves may show."""

    kind: Literal["failure", "restart", "resize"]
    #: The last row before a failure; the first of an attempt that began again. 0 before any row.
    row: int
    #: Unix seconds.
    time: float
    #: A few words: "rank 1 raised ValueError", "again from row 4", "4 workers instead of 2".
    words: str


def milestones(facts: Iterable[ev.Event]) -> list[Milestone]:
    """Return the milestones in order. The first attempt is none."""
    found: list[Milestone] = []
    world_size = 0
    for fact in facts:
        if isinstance(fact, ev.Failed) and fact.failures:
            row = max(failure.row for failure in fact.failures)
            found.append(Milestone("failure", row, fact.time, _of_failure(fact.failures[0])))
        elif isinstance(fact, ev.AttemptStarted):
            if world_size and fact.world_size != world_size:
                workers = "1 worker" if fact.world_size == 1 else f"{fact.world_size} workers"
                words = f"{workers} instead of {world_size}"
                found.append(Milestone("resize", fact.first_row, fact.time, words))
            elif world_size:
                words = f"again from row {fact.first_row}"
                found.append(Milestone("restart", fact.first_row, fact.time, words))
            world_size = fact.world_size
    return found


def _of_failure(failure: ev.WorkerFailure) -> str:
    if failure.error_type:
        return f"rank {failure.rank} raised {failure.error_type}"
    return failure.summary.partition("\n")[0] or f"rank {failure.rank} failed"
