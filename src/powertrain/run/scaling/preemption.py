"""Preemption notices for ranks or the whole run, and their consequences. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from powertrain.run.workers.placement import Placement
from powertrain.wire.from_controller import Preemption

#: Of the time that a notice leaves, the part in which the ranks may come to their boundary; the rest is for storage.
_SHARE_FOR_BOUNDARY = 0.7


@dataclass(frozen=True)
class PreemptionNotice:
    """The slots that will be taken away, why, and when (Unix seconds)."""

    reason: str
    deadline: float
    #: Slots by id; empty for the whole run.
    slots: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Regroup:
    """The reason an attempt is brought to a boundary in order to continue with other workers."""

    #: "resize" (more or fewer are wanted) or "notice" (some will be taken away).
    cause: str
    reason: str
    workers: int
    #: Slots that will not be used any more, and the ranks that are on them.
    drop: frozenset[str] = frozenset()
    ranks: tuple[int, ...] = ()


def workers_after(
    notice: PreemptionNotice, size: int, min_workers: int, max_workers: int, *, restarts: bool, replaces: bool
) -> int:
    """Return how many workers the run continues with; 0 when it must end.

    ``restarts``: this engine can start workers again. ``replaces``: a slot that was taken away can be had elsewhere.
    """
    if not notice.slots or not restarts:
        return 0
    if replaces and min_workers == max_workers:
        return size
    left = size - len(notice.slots)
    if replaces:
        return max(left, min_workers)
    return left if left >= min_workers else 0


def merged(first: PreemptionNotice | None, second: PreemptionNotice) -> PreemptionNotice:
    """Merge two notices: all slots of both, at the earlier time."""
    if first is None:
        return second
    known = [deadline for deadline in (first.deadline, second.deadline) if deadline]
    everybody = not first.slots or not second.slots
    slots = frozenset[str]() if everybody else first.slots | second.slots
    return PreemptionNotice(first.reason, min(known, default=0.0), slots)


def preemption_of(notice: PreemptionNotice, placements: Iterable[Placement]) -> Preemption:
    """Return the notice as ranks receive it."""
    ranks: dict[str, list[int]] = {}
    for place in placements:
        if not notice.slots or place.slot.id in notice.slots:
            ranks.setdefault(place.slot.host, []).append(place.rank)
    deadline = int(notice.deadline * 1000) if notice.deadline else None
    return Preemption(deadline_ms=deadline, ranks=ranks)


def boundary_within(notice: PreemptionNotice, now: float) -> float:
    """Return the seconds in which the ranks must reach a boundary; ``now`` in Unix seconds."""
    return max(0.0, notice.deadline - now) * _SHARE_FOR_BOUNDARY
