"""The order of an epoch: a pure function of (rows of each block, seed, epoch), never of the number of ranks.

An epoch has N **slots**. :class:`EpochOrder` maps each slot to a row. There are four ways:

- ``"none"``: slot i is row i, in the order of the files.
- ``"rows"``: one permutation of all rows, for data that is in memory anyway.
- ``"blocks"``: the rows of each block are shuffled among themselves; blocks are permuted and laid end to end on a
  line of N rows; the line is cut into L **lanes** of nearly equal length. Slot i is row (i div L) of lane (i mod L).
  So a reader of some lanes reads each of its blocks about once, and a batch still has rows from L places of the
  data. A giant block counts as several of :data:`MOST_SHUFFLED` rows, so that no permutation is huge.
- a number k: as ``"none"``, but shuffled within each window of k slots.

Random words are those of Philox, and permutations are made from them here, so that the order does not depend on the
version of a library.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
#: "none", "rows", "blocks", or the size of a window.
Shuffle = Union[str, int]
#: Rows of an epoch come from this many places of the data at once, unless a state says otherwise.
LANES = 64
#: At most this many rows of a block are shuffled among themselves.
MOST_SHUFFLED = 2**18
#: Permutations kept beyond two for each lane: the current one, and the next.
_KEPT_BEYOND = 16
#: Rows of a lane that are located together, and the number of such tables kept.
_TABLE_ROWS = 512
_KEPT_TABLES = 4


def permutation(size: int, *key: object) -> Ints:
    """Return the numbers from 0 to ``size - 1`` in an order that follows from ``key`` alone."""
    if size <= 1:
        return np.zeros(size, np.int64)
    words = np.random.Philox(key=_philox_key(key)).random_raw(size)
    order = np.argsort(words)  # fast, but the order of equal words is undefined
    ordered = words[order]
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(words, kind="stable")
    return order.astype(np.int64, copy=False)


def _philox_key(parts: tuple[object, ...]) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


@dataclass(frozen=True)
class Located:
    """The location of the rows of some slots: a block of the data, and the row's number within it."""

    blocks: Ints
    offsets: Ints


@dataclass
class _Table:
    """Block and offset of some rows of each lane."""

    blocks: Ints
    offsets: Ints
    #: The lanes that are filled in.
    filled: npt.NDArray[np.bool_]


class EpochOrder:
    """The mapping from the slots of one epoch to rows."""

    def __init__(
        self, block_rows: Sequence[int] | Ints, *, seed: int, epoch: int, shuffle: Shuffle, lanes: int = LANES
    ) -> None:
        rows = np.asarray(block_rows, np.int64)
        self.rows = int(rows.sum())
        self.seed, self.epoch, self.shuffle = seed, epoch, shuffle
        self.lanes = max(1, min(lanes, self.rows)) if shuffle == "blocks" else 1
        self._blocks, self._firsts, sizes = _cells(rows)
        #: Cells in their order on the line, and the start of each there.
        self._sequence = np.arange(len(sizes), dtype=np.int64)
        if shuffle == "blocks":
            self._sequence = permutation(len(sizes), seed, epoch, "blocks")
        self._line = np.concatenate([[0], np.cumsum(sizes[self._sequence])]).astype(np.int64)
        lane_rows = (self.rows - np.arange(self.lanes) + self.lanes - 1) // self.lanes
        self._lane_starts = np.concatenate([[0], np.cumsum(lane_rows)]).astype(np.int64)
        self._permutations: OrderedDict[int, npt.NDArray[np.int32]] = OrderedDict()
        self._keeping = threading.Lock()
        self._tables: OrderedDict[int, _Table] = OrderedDict()
        self._looking_up = threading.Lock()

    def locate(self, slots: Ints) -> Located:
        """Return the location of the rows of these slots; any slots, in any order. Any thread."""
        if self.shuffle == "blocks":
            return self._in_lanes(slots)
        on_line = self._on_line(slots)
        at = np.searchsorted(self._line, on_line, side="right") - 1
        return Located(self._blocks[at], self._firsts[at] + on_line - self._line[at])

    def chunks(self, slots: Ints, size: int) -> Ints:
        """Return the first slot of the chunk of each slot.

        A chunk is at most ``size`` neighbours of one lane and one block. Chunks partition the slots of the epoch
        independently of the reader: a result computed from the rows of a chunk is the same at any number of ranks.
        """
        lanes = slots % self.lanes
        lane_starts = self._lane_starts[lanes]
        places = lane_starts + slots // self.lanes
        starts, _ = self._stretches(places, lanes)
        inside = (places - starts) % size
        return (places - inside - lane_starts) * self.lanes + lanes

    def chunk(self, slot: int, size: int) -> Ints:
        """Return all slots of the chunk of ``slot``, in order."""
        lane = slot % self.lanes
        lane_start = int(self._lane_starts[lane])
        place = lane_start + slot // self.lanes
        starts, stops = self._stretches(np.array([place]), np.array([lane]))
        first = place - (place - int(starts[0])) % size
        places = np.arange(first, min(first + size, int(stops[0])), dtype=np.int64)
        return (places - lane_start) * self.lanes + lane

    def step(self, start: int, stop: int) -> Ints:
        """Return the slots from ``start`` to ``stop`` (at most N), grouped by lane."""
        slots = np.arange(start, min(stop, self.rows), dtype=np.int64)
        if self.lanes == 1:
            return slots
        return slots[np.argsort(slots % self.lanes, kind="stable")]

    def _on_line(self, slots: Ints) -> Ints:
        """Return the place on the line of the row of each slot, where there is one lane."""
        if self.shuffle == "none":
            return slots
        if self.shuffle == "rows":
            return self._shuffled(0, self.rows)[slots].astype(np.int64)
        assert isinstance(self.shuffle, int)
        return self._windowed(slots, self.shuffle)

    def _windowed(self, slots: Ints, size: int) -> Ints:
        found = np.empty_like(slots)
        windows = slots // size
        for window in np.unique(windows):
            mine = windows == window
            start = int(window) * size
            found[mine] = start + self._shuffled(start, min(start + size, self.rows))[slots[mine] - start]
        return found

    def _in_lanes(self, slots: Ints) -> Located:
        """Locate slots with tables of a few hundred rows of each lane, filled lane by lane as needed."""
        lanes, places = slots % self.lanes, slots // self.lanes
        windows = places // _TABLE_ROWS
        found = Located(np.empty_like(slots), np.empty_like(slots))
        for window in np.unique(windows):
            table = self._table(int(window), np.unique(lanes[windows == window]))
            mine = slice(None) if windows[0] == windows[-1] == window else windows == window
            at = lanes[mine] * _TABLE_ROWS + places[mine] % _TABLE_ROWS
            found.blocks[mine] = table.blocks.reshape(-1)[at]
            found.offsets[mine] = table.offsets.reshape(-1)[at]
        return found

    def _table(self, window: int, lanes: Ints) -> _Table:
        """Return the table of a window, with at least these lanes filled in."""
        with self._looking_up:
            table = self._tables.get(window)
            if table is None:
                shape = (self.lanes, _TABLE_ROWS)
                table = _Table(
                    np.empty(shape, np.int64), np.empty(shape, np.int64), np.zeros(self.lanes, bool)
                )
                self._tables[window] = table
                while len(self._tables) > _KEPT_TABLES:
                    self._tables.popitem(last=False)
            for lane in lanes[~table.filled[lanes]].tolist():
                self._fill(table, lane, window * _TABLE_ROWS)
                table.filled[lane] = True
            return table

    def _fill(self, table: _Table, lane: int, first: int) -> None:
        """Store the location of rows ``first`` and following of a lane."""
        at = int(self._lane_starts[lane]) + first
        end = min(at + _TABLE_ROWS, int(self._lane_starts[lane + 1]))
        cell = int(np.searchsorted(self._line, at, side="right")) - 1
        to = 0
        while at < end:
            start, stop = int(self._line[cell]), int(self._line[cell + 1])
            count = min(stop, end) - at
            if count > 0:
                number = int(self._sequence[cell])
                table.blocks[lane, to : to + count] = self._blocks[number]
                rows = self._shuffled(start, stop)[at - start : at - start + count]
                table.offsets[lane, to : to + count] = rows + self._firsts[number]
                at, to = at + count, to + count
            cell += 1

    def _stretches(self, places: Ints, lanes: Ints) -> tuple[Ints, Ints]:
        """Return the stretch of each place's neighbours on the line: within one lane, and one block or window."""
        if self.shuffle == "rows":
            return np.zeros_like(places), np.full_like(places, self.rows)
        if isinstance(self.shuffle, int):
            starts = places // self.shuffle * self.shuffle
            return starts, np.minimum(starts + self.shuffle, self.rows)
        ends = np.searchsorted(self._line, places, side="right")
        starts = np.maximum(self._line[ends - 1], self._lane_starts[lanes])
        return starts, np.minimum(self._line[ends], self._lane_starts[lanes + 1])

    def _shuffled(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """Return the places of a stretch of the line in shuffled order, counted from its start."""
        with self._keeping:
            found = self._permutations.get(start)
            if found is not None:
                self._permutations.move_to_end(start)
                return found
        found = permutation(stop - start, self.seed, self.epoch, "rows", start).astype(np.int32)
        with self._keeping:
            self._permutations[start] = found
            if len(self._permutations) > 2 * self.lanes + _KEPT_BEYOND:
                self._permutations.popitem(last=False)
        return found


def _cells(block_rows: Ints) -> tuple[Ints, Ints, Ints]:
    """Return (block, first row in it, rows) of each cell that is shuffled as one: a block or a part of a giant one."""
    counts = np.maximum(-(-block_rows // MOST_SHUFFLED), 1)
    blocks = np.repeat(np.arange(len(block_rows), dtype=np.int64), counts)
    firsts = (np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)) * MOST_SHUFFLED
    return blocks, firsts, np.minimum(block_rows[blocks] - firsts, MOST_SHUFFLED)


# --------------------------------------------------------------------------- steps and shares


def part_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the range of ``count`` items that belongs to ``rank``, end excluded. Parts differ by at most one."""
    return rank * count // world_size, (rank + 1) * count // world_size


def share(slots: Ints, rank: int, world_size: int) -> Ints:
    """Return the part of a step's slots that ``rank`` takes."""
    start, stop = part_of(len(slots), rank, world_size)
    return slots[start:stop]


def steps_left(rows: int, position: int, batch: int, tail: str) -> int:
    """Return the steps of ``batch`` rows left in an epoch of ``rows`` after ``position``; the same on every rank.

    ``position`` is negative where rows of the epoch before are carried into this one.
    """
    left = rows - position
    return -(-left // batch) if tail == "partial" else left // batch


def after_epoch(rows: int, position: int, batch: int, tail: str) -> int:
    """Return the position at which the next epoch begins, after all steps of this one up to ``position``."""
    return position - rows if tail == "carry" and position < rows else 0
