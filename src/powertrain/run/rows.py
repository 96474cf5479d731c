"""Which rows are complete: the k-th report of every rank forms row k.

Reports never block, so one rank may be far ahead of another. A row closes when every rank that takes part has made
that report. A rank that has ended takes no part in rows it did not reach; one that is declared absent takes no part
until it reports after all. Metrics of rows that wait for a slow rank are kept up to a limit; beyond it the oldest
closes without the missing ranks, so that memory stays bounded. Shares of a checkpoint are never given up that way.

Each row comes out once with its metrics. It comes out again without them, for its shares and for those who wait at it,
when it was shown early and is now complete, or when an absent rank reports it after all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from powertrain.wire import Part, Point

#: Rows that may wait for slower ranks with their metrics in memory.
WINDOW = 10_000


@dataclass
class Row:
    """One row: what each rank reported, in rank order, ``None`` for ranks that did not; [] if shown before."""

    number: int
    metrics: list[dict[str, object] | None]
    parts: dict[int, Part] = field(default_factory=dict)
    #: What ranks reported that had been declared absent when the row was shown.
    late: dict[int, dict[str, object]] = field(default_factory=dict)
    #: False when it was closed early for memory's sake; its parts then come later, in a row without metrics.
    complete: bool = True


class RowTable:
    """The open rows of one attempt."""

    def __init__(self, world_size: int, first_row: int, window: int = WINDOW) -> None:
        self._size = world_size
        self._window = window
        self._last = [first_row - 1] * world_size
        self._first = first_row
        self._ended: set[int] = set()
        self._absent: set[int] = set()
        self._metrics: dict[int, dict[int, dict[str, object]]] = {}
        self._parts: dict[int, dict[int, Part]] = {}
        self._closed = first_row - 1
        self._shown = first_row - 1

    @property
    def closed(self) -> int:
        """The newest row that every rank taking part has reached."""
        return self._closed

    @property
    def newest(self) -> int:
        """The newest row any rank has reached."""
        return max(self._last)

    def last_row(self, rank: int) -> int:
        """The newest row of one rank; 0 where it has made no report in this attempt."""
        return self._last[rank] if self._last[rank] >= self._first else 0

    def never_reported(self) -> list[int]:
        """Ranks without any report in this attempt that are still expected to make one."""
        return [
            rank
            for rank in range(self._size)
            if self._last[rank] < self._first and rank not in self._ended and rank not in self._absent
        ]

    def silent(self) -> list[int]:
        """Ranks that have made no report in this attempt and may still: also those declared absent."""
        return [r for r in range(self._size) if self._last[r] < self._first and r not in self._ended]

    def behind(self) -> list[int]:
        """Ranks the next row waits for, while others have reached it."""
        if self.newest <= self._closed:
            return []
        return [rank for rank in self._taking_part() if self._last[rank] <= self._closed]

    def add(self, rank: int, point: Point) -> list[Row]:
        """Take one report; returns the rows it closes, oldest first."""
        self._last[rank] = point.row
        self._absent.discard(rank)
        if point.row <= self._closed:  # it was declared absent and comes after all
            parts = {} if point.part is None else {rank: point.part}
            return [Row(point.row, [], parts, {rank: point.metrics})]
        if point.row > self._shown:
            self._metrics.setdefault(point.row, {})[rank] = point.metrics
        if point.part is not None:
            self._parts.setdefault(point.row, {})[rank] = point.part
        return self._close()

    def reach(self, rank: int, row: int) -> list[Row]:
        """The rank made every report up to ``row`` although not all of them arrived; returns the rows this closes."""
        if row <= self._last[rank]:
            return []
        self._last[rank] = row
        self._absent.discard(rank)
        return self._close()

    def abandon(self) -> dict[int, dict[int, Part]]:
        """The shares of checkpoints in rows that never closed, by row and rank; they are given up."""
        parts, self._parts = self._parts, {}
        return parts

    def end(self, rank: int) -> list[Row]:
        """The rank will report no more; returns the rows this closes."""
        self._ended.add(rank)
        return self._close()

    def declare_absent(self, ranks: Iterable[int]) -> list[Row]:
        """Go on without these ranks; returns the rows this closes."""
        self._absent.update(ranks)
        return self._close()

    def _taking_part(self) -> list[int]:
        return [
            rank
            for rank in range(self._size)
            if rank not in self._absent and not (rank in self._ended and self._last[rank] < self.newest)
        ]

    def _reached_by_all(self) -> int:
        """The newest row that no rank still to come is short of."""
        waiting_for = [
            self._last[rank]
            for rank in range(self._size)
            if rank not in self._absent and rank not in self._ended
        ]
        return min(waiting_for) if waiting_for else self.newest

    def _close(self) -> list[Row]:
        rows = []
        reached = self._reached_by_all()
        for number in range(self._closed + 1, reached + 1):
            shown_before = number <= self._shown
            metrics = self._metrics.pop(number, {})
            parts = self._parts.pop(number, {})
            in_order = [] if shown_before else [metrics.get(rank) for rank in range(self._size)]
            rows.append(Row(number, in_order, parts))
        self._closed = max(self._closed, reached)
        self._shown = max(self._shown, self._closed)
        while len(self._metrics) > self._window:
            self._shown += 1
            early = self._metrics.pop(self._shown, {})
            rows.append(Row(self._shown, [early.get(r) for r in range(self._size)], complete=False))
        return rows
