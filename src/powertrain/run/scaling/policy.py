"""The number of workers. Pure: bounds, capacity and requests in, a size out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: Seconds for which more slots must have been there before a run grows: short-lived room is not worth a restart.
GROW_DELAY_S = 5.0


def in_words(workers: int) -> str:
    return f"{workers} worker" if workers == 1 else f"{workers} workers"


def sizes_to_try(min_workers: int, max_workers: int) -> Iterator[int]:
    """Yield world sizes in the order of preference: as many as allowed, down to the fewest."""
    return iter(range(max_workers, min_workers - 1, -1))


@dataclass(frozen=True)
class Resize:
    """Another number of workers for the run, not before ``when``."""

    workers: int
    reason: str
    when: float


class Elastic:
    """The room that a run has. Times are given by the caller."""

    def __init__(self, min_workers: int, max_workers: int) -> None:
        self.min_workers, self.max_workers = min_workers, max_workers
        #: Available slots, held ones included; None while unknown.
        self.capacity: int | None = None
        #: A limit below the maximum: set by a request, or because a rank was preempted; and since when.
        self.limit = max_workers
        self._limit_reason = ""
        self._limited_at = float("-inf")
        #: Since when there has been room for at least so many.
        self._room_since: dict[int, float] = {}

    @property
    def is_elastic(self) -> bool:
        return self.min_workers < self.max_workers

    def set_capacity(self, count: int, now: float) -> None:
        """Set the number of available slots, held ones included."""
        self.capacity = count
        for size in range(self.min_workers, self.max_workers + 1):
            if size <= count:
                self._room_since.setdefault(size, now)
            else:
                self._room_since.pop(size, None)

    def set_limit(self, workers: int, reason: str, now: float) -> None:
        """Use no more workers than this from now on."""
        self.limit = max(self.min_workers, min(workers, self.max_workers))
        self._limit_reason, self._limited_at = reason, now

    def size(self, held: int = 0) -> int:
        """Return how many workers to start with now, with ``held`` slots: within bounds and limit."""
        room = self.limit if self.capacity is None else max(self.capacity, held)
        return max(self.min_workers, min(room, self.limit))

    def wanted(self, size: int) -> Resize | None:
        """Return the resize for a run of ``size`` workers; ``None`` where its size is right."""
        target = self.size(size)
        if target < size:
            return Resize(target, self._limit_reason, self._limited_at)
        if target == size or self.capacity is None:
            return None
        since = self._room_since[target]
        if target == self.limit and self._limit_reason:
            return Resize(target, f"{self._limit_reason}, and there is room", max(since, self._limited_at))
        return Resize(target, f"there is room for {in_words(target)}", since + GROW_DELAY_S)

    def prospect(self, workers: int, size: int) -> str:
        """Describe the effect of a request for ``workers`` in a run that has ``size``."""
        room = self.size(size)
        if size == 0:
            return f"It has not started yet, and starts with at most {in_words(workers)}."
        if workers == size:
            return f"It has {in_words(size)}, and keeps {'it' if size == 1 else 'them'}."
        if room != workers:
            return f"It has {in_words(size)}, and there is room for {room} now; it grows to {workers} as room comes."
        return f"It goes on with {in_words(workers)} instead of {size} after its next checkpoint."
