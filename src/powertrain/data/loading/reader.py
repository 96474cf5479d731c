"""Rows of any slots of an epoch, after all operations."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from powertrain.data.plan.order import EpochOrder, Ints, Located
from powertrain.data.plan.plan import Inspected
from powertrain.data.rows.rows import Rows

if TYPE_CHECKING:
    from powertrain.data.loading.cache import BlockStore
    from powertrain.data.operations.operation import Applied
    from powertrain.data.operations.runner import Runner
    from powertrain.data.rows.gather import BlockView

K = TypeVar("K")
V = TypeVar("V")
#: Rows made by a batch-wise operation and not yet read take about this many bytes of the source.
_WAITING_BYTES = 16 * 2**20
#: A batch of a batch-wise operation is never cut below this many rows for that.
_FEWEST_ROWS = 16


@dataclass(frozen=True)
class LocatedSlots:
    """Slots of an epoch, and the location of their rows."""

    order: EpochOrder
    slots: Ints
    located: Located

    def between(self, low: int, high: int) -> LocatedSlots:
        """Return the slots from ``low`` to before ``high``."""
        located = Located(self.located.blocks[low:high], self.located.offsets[low:high])
        return LocatedSlots(self.order, self.slots[low:high], located)


class RowReader:
    """Reads rows of a dataset for one rank: holds the state shared by its epochs."""

    def __init__(self, inspected: Inspected, store: BlockStore, runners: Sequence[Runner]) -> None:
        """``runners`` has one for each part of the plan."""
        self._inspected, self._store, self._runners = inspected, store, runners
        blocks = inspected.blocks
        self._part_of_block = np.fromiter((b.part for b in blocks), np.int64, len(blocks))
        self._starts = np.fromiter((b.start for b in blocks), np.int64, len(blocks))
        #: Number of the first row of each block, counted over all of them.
        self._firsts = np.concatenate([[0], np.cumsum(inspected.block_rows)]).astype(np.int64)
        self._views: _Recent[tuple[int, int], BlockView] = _Recent()
        self._chunks: _Recent[tuple[int, int, int], Applied] = _Recent()

    def blocks_of(self, pieces: Iterable[LocatedSlots]) -> list[tuple[int, int]]:
        """Return the (part, block of its source) needed by these pieces, in order of first use."""
        numbers = [number for piece in pieces for number in _first_of_each(piece.located.blocks)]
        return [(self._inspected.blocks[n].part, self._inspected.blocks[n].index) for n in numbers]

    def expect(self, blocks: int, slots: int) -> None:
        """Set the number of blocks in use at a time, and of a lane's slots between two visits: they size the caches."""
        self._views.most = blocks
        self._chunks.most = slots

    def read(self, piece: LocatedSlots, python_text: bool = False) -> tuple[Rows, Ints | None]:
        """Return the rows of these slots in this order, and the number that each has become; None for one each.

        ``python_text`` asks for text as Python strings; rows without operations are returned so.
        """
        order, slots, located = piece.order, piece.slots, piece.located
        if python_text and len(self._runners) == 1 and not self._runners[0].does_anything:
            return self._gather(located.blocks, located.offsets, python_text=True), None
        if len(self._runners) == 1:
            return self._read_part(0, order, slots, located.blocks, located.offsets)
        parts = self._part_of_block[located.blocks]
        present = np.unique(parts)
        if len(present) == 1:
            return self._read_part(int(present[0]), order, slots, located.blocks, located.offsets)
        return self._read_parts(present, parts, order, slots, located.blocks, located.offsets)

    def _read_parts(
        self, present: Ints, parts: Ints, order: EpochOrder, slots: Ints, blocks: Ints, offsets: Ints
    ) -> tuple[Rows, Ints | None]:
        """Return rows of several parts: each part read on its own, then merged in order."""
        from powertrain.data.rows.gather import concat_rows, take_rows

        read, counts = [], np.ones(len(slots), np.int64)
        origin = []
        exact = True
        for part in present.tolist():
            mine = np.flatnonzero(parts == part)
            rows, made = self._read_part(part, order, slots[mine], blocks[mine], offsets[mine])
            if made is not None:
                counts[mine], exact = made, False
            read.append(rows)
            origin.append(np.repeat(mine, counts[mine]))
        ordered = np.argsort(np.concatenate(origin), kind="stable")
        return take_rows(concat_rows(read), ordered), None if exact else counts

    def _read_part(
        self, part: int, order: EpochOrder, slots: Ints, blocks: Ints, offsets: Ints
    ) -> tuple[Rows, Ints | None]:
        size = self.chunk_rows(part, order)
        if size:
            return self._read_chunks(part, order, slots, size)
        applied = self._runners[part].run(self._gather(blocks, offsets), order.epoch)
        return applied.rows, applied.counts

    def chunk_rows(self, part: int, order: EpochOrder) -> int:
        """Return the rows that a batch-wise operation of this part gets at a time; 0 where there is no such operation.

        The number follows from the data and the operation, never from the number of ranks.
        """
        size = self._runners[part].batch_size
        if size is None:
            return 0
        if order.lanes == 1:
            return size
        facts = self._inspected.plan.parts[part].source.inspect()
        rows, nbytes = sum(b.rows for b in facts.blocks), sum(b.nbytes for b in facts.blocks)
        fitting = _WAITING_BYTES * max(rows, 1) // (max(nbytes, 1) * order.lanes)
        return max(min(size, fitting), min(size, _FEWEST_ROWS))

    def _read_chunks(self, part: int, order: EpochOrder, slots: Ints, size: int) -> tuple[Rows, Ints | None]:
        """Return rows that are computed with their neighbours: each chunk once, then the requested rows of it."""
        from powertrain.data.rows.gather import concat_rows, take_rows

        firsts = order.chunks(slots, size)
        by_chunk = np.argsort(firsts, kind="stable")
        edges = np.flatnonzero(np.diff(firsts[by_chunk])) + 1
        chosen = np.split(by_chunk, edges)
        chunks = [self._own(part, order, order.chunk(int(firsts[mine[0]]), size)) for mine in chosen]
        read: list[Rows] = []
        counts = np.ones(len(slots), np.int64)
        exact = True
        for mine, members, applied in zip(chosen, chunks, self._compute(part, order, chunks), strict=True):
            picked = np.searchsorted(members, slots[mine])
            if applied.counts is not None:
                counts[mine], exact = applied.counts[picked], False
                picked = _expanded(applied.counts, picked)
            read.append(take_rows(applied.rows, picked))
        ordered = np.argsort(np.repeat(by_chunk, counts[by_chunk]), kind="stable")
        return take_rows(concat_rows(read), ordered), None if exact else counts

    def _compute(self, part: int, order: EpochOrder, chunks: list[Ints]) -> Iterable[Applied]:
        """Yield the result of each chunk; as many at a time as there are processes."""
        at_once = min(self._runners[part].processes, len(chunks))
        if at_once < 2:
            return (self._chunk(part, order, members) for members in chunks)
        with ThreadPoolExecutor(at_once, thread_name_prefix="powertrain-chunks") as threads:
            return list(threads.map(lambda members: self._chunk(part, order, members), chunks))

    def _chunk(self, part: int, order: EpochOrder, members: Ints) -> Applied:
        def compute() -> Applied:
            located = order.locate(members)
            return self._runners[part].run(self._gather(located.blocks, located.offsets), order.epoch)

        return self._chunks.get((part, order.epoch, int(members[0])), compute)

    def _own(self, part: int, order: EpochOrder, members: Ints) -> Ints:
        """Return the slots whose rows belong to a part: rows of another have other columns and operations."""
        if len(self._runners) == 1:
            return members
        own: Ints = members[self._part_of_block[order.locate(members).blocks] == part]
        return own

    def _gather(self, blocks: Ints, offsets: Ints, *, python_text: bool = False) -> Rows:
        from powertrain.data.rows.gather import gather

        # Rows of a block mostly follow each other: there are far fewer runs than rows.
        starts = np.concatenate([[0], np.flatnonzero(blocks[1:] != blocks[:-1]) + 1])
        used, which_run = np.unique(blocks[starts], return_inverse=True)
        which = np.repeat(which_run, np.diff(starts, append=len(blocks)))
        views = [self._view(int(block)) for block in used]
        rows, numbers = offsets + self._starts[blocks], offsets + self._firsts[blocks]
        gathered = gather(views, which, rows, numbers, python_text=python_text)
        # A block evicted from the store's memory must not stay alive through its view.
        self._views.drop(self._store.evicted(self._views.keys()))
        return gathered

    def _view(self, number: int) -> BlockView:
        from powertrain.data.rows.gather import BlockView

        block = self._inspected.blocks[number]
        key = (block.part, block.index)
        return self._views.get(
            key, lambda: BlockView(self._store.open(*key)), dropped=lambda old: self._store.release(*old)
        )

    def forget(self) -> None:
        """Release everything that is kept between reads."""
        for key in self._views.clear():
            self._store.release(*key)
        self._chunks.clear()


class _Recent(Generic[K, V]):
    """The most recently used values, each made once even if several threads request it at once."""

    def __init__(self) -> None:
        #: Number of values to keep.
        self.most = 1
        self._lock = threading.Lock()
        self._kept: OrderedDict[K, _Slot[V]] = OrderedDict()

    def get(self, key: K, make: Callable[[], V], dropped: Callable[[K], None] = lambda key: None) -> V:
        """Return the value of ``key``, made by ``make`` if absent; ``dropped`` is called with each evicted key."""
        slot = self._kept.get(key)
        if slot is not None and slot.value is not None:  # the usual case, without a lock
            with contextlib.suppress(KeyError):  # it may be evicted at this very moment
                self._kept.move_to_end(key)
            return slot.value
        gone: list[K] = []
        with self._lock:
            slot = self._kept.setdefault(key, _Slot())
            while len(self._kept) > self.most:
                gone.append(self._kept.popitem(last=False)[0])
        for old in gone:
            if old != key:
                dropped(old)
        with slot.lock:
            if slot.value is None:
                try:
                    slot.value = make()
                except BaseException:
                    with self._lock:
                        self._kept.pop(key, None)
                    raise
            return slot.value

    def keys(self) -> list[K]:
        with self._lock:
            return list(self._kept)

    def drop(self, keys: Iterable[K]) -> None:
        """Remove these values."""
        with self._lock:
            for key in keys:
                self._kept.pop(key, None)

    def clear(self) -> list[K]:
        """Remove all values and return their keys."""
        with self._lock:
            keys = list(self._kept)
            self._kept.clear()
            return keys


class _Slot(Generic[V]):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: V | None = None


def _first_of_each(blocks: Ints) -> list[int]:
    """Return every block once, in the order of its first row."""
    return list(dict.fromkeys(blocks[np.flatnonzero(np.diff(blocks, prepend=-1))].tolist()))


def _expanded(counts: Ints, picked: Ints) -> Ints:
    """Return the indices of the output rows of the ``picked`` input rows, where row i has become ``counts[i]`` rows."""
    ends = np.cumsum(counts)
    made = counts[picked]
    before = np.repeat(ends[picked] - made, made)
    within = np.arange(len(before)) - np.repeat(np.cumsum(made) - made, made)
    return before + within


def name_row(inspected: Inspected, number: int) -> str:
    """Return the location of row ``number`` of all rows, for messages."""
    first = 0
    for block in inspected.blocks:
        if number < first + block.rows:
            source = inspected.plan.parts[block.part].source
            return source.name_row(block.index, block.start + number - first)
        first += block.rows
    return f"row {number}"
