"""The order of an epoch: a pure function of (rows of each block, seed, epoch), never of the number of ranks.

An epoch has N **slots**. :class:`EpochOrder` says which row each slot holds. There are four ways:

- ``"none"``: slot i is row i, in the order of the files.
- ``"rows"``: one permutation of all rows, for data that is in memory anyway.
- ``"blocks"``: the rows of each block are shuffled among themselves; blocks are permuted and laid end to end on a
  line of N rows; the line is cut into L **lanes** of nearly equal length. Slot i is row (i div L) of lane (i mod L).
  So whoever reads some lanes reads each of its blocks about once, and a batch still has rows from L places of the
  data. A giant block counts as several of :data:`MOST_SHUFFLED` rows, so that no permutation is huge.
- a number k: as ``"none"``, but shuffled within each window of k slots.

Random words are those of Philox, and permutations are made from them here, so that the order does not depend
on the version of a library.
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
#: Permutations that are kept beyond two for each lane: one that it reads, and one that it goes on to.
_KEPT_BEYOND = 16
#: Rows of a lane that are looked up together, and how many such tables are kept.
_TABLE_ROWS = 512
_KEPT_TABLES = 4


def permutation(size: int, *key: object) -> Ints:
    """The numbers from 0 to ``size - 1`` in an order that follows from ``key`` alone."""
    if size <= 1:
        return np.zeros(size, np.int64)
    words = np.random.Philox(key=_philox_key(key)).random_raw(size)
    order = np.argsort(words)  # fast, but equal words might come either way round
    ordered = words[order]
    if (ordered[1:] == ordered[:-1]).any():
        order = np.argsort(words, kind="stable")
    return order.astype(np.int64, copy=False)


def _philox_key(parts: tuple[object, ...]) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


@dataclass(frozen=True)
class Located:
    """Where the rows of some slots are: a block of the data, and the row's number within it."""

    blocks: Ints
    offsets: Ints


@dataclass
class _Table:
    """Block and offset of some rows of each lane."""

    blocks: Ints
    offsets: Ints
    #: Which lanes have been looked at.
    filled: npt.NDArray[np.bool_]


class EpochOrder:
    """Which row each slot of one epoch holds."""

    def __init__(
        self, block_rows: Sequence[int] | Ints, *, seed: int, epoch: int, shuffle: Shuffle, lanes: int = LANES
    ) -> None:
        rows = np.asarray(block_rows, np.int64)
        self.rows = int(rows.sum())
        self.seed, self.epoch, self.shuffle = seed, epoch, shuffle
        self.lanes = max(1, min(lanes, self.rows)) if shuffle == "blocks" else 1
        self._blocks, self._firsts, sizes = _cells(rows)
        #: Cells in the order in which they lie on the line, and where each begins there.
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
        """Where the rows of these slots are; any slots, in any order. Any thread."""
        if self.shuffle == "blocks":
            return self._in_lanes(slots)
        on_line = self._on_line(slots)
        at = np.searchsorted(self._line, on_line, side="right") - 1
        return Located(self._blocks[at], self._firsts[at] + on_line - self._line[at])

    def chunks(self, slots: Ints, size: int) -> Ints:
        """The first slot of the chunk that each slot is in.

        A chunk is at most ``size`` neighbours of one lane and one block. Chunks part the slots of the epoch, whoever
        asks: what is computed from the rows of a chunk together is the same at any number of ranks.
        """
        lanes = slots % self.lanes
        lane_starts = self._lane_starts[lanes]
        places = lane_starts + slots // self.lanes
        starts, _ = self._stretches(places, lanes)
        inside = (places - starts) % size
        return (places - inside - lane_starts) * self.lanes + lanes

    def chunk(self, slot: int, size: int) -> Ints:
        """All slots of the chunk that ``slot`` is in, in order."""
        lane = slot % self.lanes
        lane_start = int(self._lane_starts[lane])
        place = lane_start + slot // self.lanes
        starts, stops = self._stretches(np.array([place]), np.array([lane]))
        first = place - (place - int(starts[0])) % size
        places = np.arange(first, min(first + size, int(stops[0])), dtype=np.int64)
        return (places - lane_start) * self.lanes + lane

    def step(self, start: int, stop: int) -> Ints:
        """The slots from ``start`` to ``stop`` (at most N), those of a lane together, in the order of the lanes."""
        slots = np.arange(start, min(stop, self.rows), dtype=np.int64)
        if self.lanes == 1:
            return slots
        return slots[np.argsort(slots % self.lanes, kind="stable")]

    def _on_line(self, slots: Ints) -> Ints:
        """The place on the line of the row that each slot holds, where there is one lane."""
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
        """Looked up in tables of a few hundred rows of each lane, which are made lane by lane as they are needed."""
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
        """The table of a window, with at least these lanes filled in."""
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
        """Write down where rows ``first`` and following of a lane are."""
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
        """From where to where on the line each place's neighbours reach: within one lane, and one block or window."""
        if self.shuffle == "rows":
            return np.zeros_like(places), np.full_like(places, self.rows)
        if isinstance(self.shuffle, int):
            starts = places // self.shuffle * self.shuffle
            return starts, np.minimum(starts + self.shuffle, self.rows)
        ends = np.searchsorted(self._line, places, side="right")
        starts = np.maximum(self._line[ends - 1], self._lane_starts[lanes])
        return starts, np.minimum(self._line[ends], self._lane_starts[lanes + 1])

    def _shuffled(self, start: int, stop: int) -> npt.NDArray[np.int32]:
        """The places of a stretch of the line in another order, counted from its start."""
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
    """What is shuffled together: (block, first row in it, rows) of each cell, a block or a part of a giant one."""
    counts = np.maximum(-(-block_rows // MOST_SHUFFLED), 1)
    blocks = np.repeat(np.arange(len(block_rows), dtype=np.int64), counts)
    firsts = (np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)) * MOST_SHUFFLED
    return blocks, firsts, np.minimum(block_rows[blocks] - firsts, MOST_SHUFFLED)


# --------------------------------------------------------------------------- steps and shares


def part_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Which of ``count`` things are ``rank``'s: from the first to before the second. Parts differ by at most one."""
    return rank * count // world_size, (rank + 1) * count // world_size


def share(slots: Ints, rank: int, world_size: int) -> Ints:
    """The part of a step's slots that ``rank`` takes."""
    start, stop = part_of(len(slots), rank, world_size)
    return slots[start:stop]


def steps_left(rows: int, position: int, batch: int, tail: str) -> int:
    """How many steps of ``batch`` rows an epoch of ``rows`` has after ``position``; every rank finds the same number.

    ``position`` is negative where rows of the epoch before are carried into this one.
    """
    left = rows - position
    return -(-left // batch) if tail == "partial" else left // batch


def after_epoch(rows: int, position: int, batch: int, tail: str) -> int:
    """The position at which the next epoch begins, when this one has given all its steps and stands at ``position``."""
    return position - rows if tail == "carry" and position < rows else 0
