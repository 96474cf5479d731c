"""Completion of rows: the k-th report of every rank forms row k.

Reports never block, so one rank may be far ahead of another. A row closes when every rank that takes part has made
that report. A rank that has ended takes no part in rows it did not reach; one that is declared absent takes no part
until it reports after all. Metrics of rows that wait for a slow rank are kept up to a limit; beyond it the oldest
closes without the missing ranks, so that memory stays bounded. Shares of a checkpoint are never given up that way.

Each row comes out once with its metrics. It comes out again without them, for its shares and for waiting ranks, when it
was shown early and is now complete, or when an absent rank reports it after all.

A report costs the same however many ranks there are; only the report that closes a row examines all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from powertrain.wire.values import CheckpointPart, Point

#: Rows that may wait for slower ranks with their metrics in memory, and reports in them.
WINDOW = 10_000
WINDOW_REPORTS = 200_000


@dataclass
class Row:
    """One row: the report of each rank, in rank order, ``None`` for ranks without one; [] if shown before."""

    number: int
    metrics: list[dict[str, object] | None]
    parts: dict[int, CheckpointPart] = field(default_factory=dict)
    #: Reports of ranks that had been declared absent when the row was shown.
    late: dict[int, dict[str, object]] = field(default_factory=dict)
    #: False when it was closed early for memory's sake; its parts then come later, in a row without metrics.
    complete: bool = True


class _Awaited:
    """The progress of awaited ranks: each is counted at its newest row."""

    def __init__(self, ranks: int, row: int) -> None:
        self._at = Counter({row: ranks})
        self._lowest = row

    def arrive(self, row: int) -> None:
        """Count one more rank at ``row``."""
        self._lowest = min(self._lowest, row) if self._at else row
        self._at[row] += 1

    def leave(self, row: int) -> None:
        """Count one rank less at ``row``."""
        self._at[row] -= 1
        if not self._at[row]:
            del self._at[row]

    def lowest(self) -> int | None:
        """Return the row of the rank that is furthest behind; None where none is awaited."""
        if not self._at:
            return None
        if self._lowest not in self._at:
            self._lowest = min(self._at)
        return self._lowest


class RowTable:
    """The open rows of one attempt."""

    def __init__(self, world_size: int, first_row: int, window: int = 0) -> None:
        """``window`` rows may wait with their metrics; 0 for as many as memory allows."""
        self._size = world_size
        self._window = window or max(1, min(WINDOW, WINDOW_REPORTS // max(1, world_size)))
        self._last = [first_row - 1] * world_size
        self._first = first_row
        self._newest = first_row - 1
        #: Ranks without any report in this attempt, those that report no more, and those declared absent.
        self._unheard = set(range(world_size))
        self._ended: set[int] = set()
        self._absent: set[int] = set()
        #: All others.
        self._awaited = _Awaited(world_size, first_row - 1)
        self._metrics: dict[int, dict[int, dict[str, object]]] = {}
        self._parts: dict[int, dict[int, CheckpointPart]] = {}
        self._closed = first_row - 1
        self._shown = first_row - 1

    @property
    def closed(self) -> int:
        """Return the newest row that every participating rank has reached."""
        return self._closed

    @property
    def newest(self) -> int:
        """Return the newest row that any rank has reached."""
        return self._newest

    @property
    def waits_for_first_reports(self) -> bool:
        """Return True while :meth:`never_reported` has any."""
        return bool(self._unheard - self._absent) if self._absent else bool(self._unheard)

    def last_row(self, rank: int) -> int:
        """Return the newest row of one rank; 0 where it has made no report in this attempt."""
        return self._last[rank] if self._last[rank] >= self._first else 0

    def never_reported(self) -> list[int]:
        """Return the ranks without any report in this attempt that are still expected to make one."""
        return sorted(self._unheard - self._absent)

    def silent(self) -> list[int]:
        """Return the ranks that have made no report in this attempt and still may: also those declared absent."""
        return sorted(self._unheard)

    def behind(self) -> list[int]:
        """Return the ranks that the next row waits for, while others have reached it."""
        if self._newest <= self._closed:
            return []
        return [rank for rank, row in enumerate(self._last) if row <= self._closed and self._is_awaited(rank)]

    def add(self, rank: int, point: Point) -> list[Row]:
        """Add one report; return the rows it closes, oldest first."""
        self._move(rank, point.row)
        if point.row <= self._closed:  # it was declared absent and comes after all
            parts = {} if point.part is None else {rank: point.part}
            return [Row(point.row, [], parts, {rank: point.metrics})]
        if point.row > self._shown:
            self._metrics.setdefault(point.row, {})[rank] = point.metrics
        if point.part is not None:
            self._parts.setdefault(point.row, {})[rank] = point.part
        return self._close()

    def reach(self, rank: int, row: int) -> list[Row]:
        """Note that the rank made every report up to ``row`` although not all of them arrived; return the rows this
        closes."""
        if row <= self._last[rank]:
            return []
        self._move(rank, row)
        return self._close()

    def abandon(self) -> dict[int, dict[int, CheckpointPart]]:
        """Give up and return the shares of checkpoints in rows that never closed, by row and rank."""
        parts, self._parts = self._parts, {}
        return parts

    def end(self, rank: int) -> list[Row]:
        """Note that the rank will report no more; return the rows this closes."""
        if self._is_awaited(rank):
            self._awaited.leave(self._last[rank])
        self._ended.add(rank)
        self._unheard.discard(rank)
        return self._close()

    def declare_absent(self, ranks: Iterable[int]) -> list[Row]:
        """Continue without these ranks; return the rows this closes."""
        for rank in ranks:
            if self._is_awaited(rank):
                self._awaited.leave(self._last[rank])
            self._absent.add(rank)
        return self._close()

    def _is_awaited(self, rank: int) -> bool:
        return rank not in self._absent and rank not in self._ended

    def _move(self, rank: int, row: int) -> None:
        """Move the rank to ``row``; it is not absent any more."""
        if self._is_awaited(rank):
            self._awaited.leave(self._last[rank])
        self._absent.discard(rank)
        self._last[rank] = row
        self._newest = max(self._newest, row)
        self._unheard.discard(rank)
        if self._is_awaited(rank):
            self._awaited.arrive(row)

    def _close(self) -> list[Row]:
        rows = []
        lowest = self._awaited.lowest()
        reached = self._newest if lowest is None else lowest
        for number in range(self._closed + 1, reached + 1):
            shown_before = number <= self._shown
            metrics = self._metrics.pop(number, {})
            parts = self._parts.pop(number, {})
            rows.append(Row(number, [] if shown_before else self._in_order(metrics), parts))
        self._closed = max(self._closed, reached)
        self._shown = max(self._shown, self._closed)
        while len(self._metrics) > self._window:
            self._shown += 1
            early = self._metrics.pop(self._shown, {})
            rows.append(Row(self._shown, self._in_order(early), complete=False))
        return rows

    def _in_order(self, metrics: dict[int, dict[str, object]]) -> list[dict[str, object] | None]:
        return [metrics.get(rank) for rank in range(self._size)]
