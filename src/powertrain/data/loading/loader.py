"""One rank's steps through an epoch: which rows, in which batches, read ahead on threads."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypedDict, TypeVar

import numpy as np

from powertrain.data.loading.pipeline import Pipeline
from powertrain.data.loading.reader import LocatedSlots, RowReader, name_row
from powertrain.data.options.context import LEAST_MEMORY, memory_limit
from powertrain.data.plan.mixing import MixedOrder
from powertrain.data.plan.order import EpochOrder, Ints, Shuffle, part_of, steps_left
from powertrain.data.plan.plan import Inspected, Part, Plan
from powertrain.data.plan.prepared import Prepared, prepare_alone
from powertrain.data.rows.rows import Rows
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.loading.cache import BlockStore
    from powertrain.data.loading.pixels import PixelCache
    from powertrain.data.operations.runner import Runner

T = TypeVar("T")
#: Narrow rows are gathered this many at a time, over several steps, to spread the cost of the calls.
_ROWS_AT_ONCE = 16384
#: At most this many bytes are gathered at a time, as they are copied once more; text is cut without a copy.
_BYTES_AT_ONCE = 2**20
_TEXT_BYTES_AT_ONCE = 16 * 2**20
_ARROW_TEXT = ("string", "large_string", "binary", "large_binary")
#: More threads than this do not read ahead faster: they share one interpreter.
_MOST_THREADS = 4
#: Blocks are decoded this many work items before their rows are needed.
_DECODE_AHEAD = 4
#: Where an opaque filter has left a rank without a row, this many following slots are tried at a time.
_FILLER_SLOTS = 64


@dataclass(frozen=True)
class Cut(Generic[T]):
    """How an epoch is cut into batches, and how each is converted."""

    #: Rows of all ranks together.
    global_batch: int
    #: Handling of rows that do not fill a step: "partial", "drop" or "carry".
    tail: str
    #: Converts a batch's rows to the user's format. Called on any thread.
    convert: Callable[[Rows], T]
    #: Number of prefetched batches; 0 makes each batch on request.
    prefetch: int = 1
    #: True where every step yields a batch, if need be of one row without weight: ranks must stay in step. A process
    #: that reads alone leaves out steps without rows.
    in_step: bool = True
    #: True where ``convert`` turns text into Python strings: they may be made earlier then.
    python_text: bool = False
    #: The shuffle of the epoch; None for the dataset's own.
    shuffle: Shuffle | None = None


@dataclass(frozen=True)
class ReadyBatch(Generic[T]):
    """One batch of one rank."""

    batch: T
    #: Position of the epoch once this batch is handed out.
    position: int
    #: Weight of this rank's gradient: its rows times ranks by all rows.
    weight: float
    rows: int
    nbytes: int
    #: Rows made from ``position`` on, read ``step`` slots at a time, that are handed out as well.
    skip: int = 0
    step: int = 0


@dataclass(frozen=True)
class _Step:
    """One rank's part of one step."""

    #: (epoch, slots) of its rows, in order; more than one where rows are carried over.
    slots: tuple[tuple[int, Ints], ...]
    position: int
    weight: float

    def __len__(self) -> int:
        return sum(len(slots) for _, slots in self.slots)


@dataclass(frozen=True)
class _Work:
    """Some steps, and the location of their rows."""

    steps: list[_Step]
    #: Of one epoch each; more than one where rows are carried over.
    pieces: list[LocatedSlots]


class Loader:
    """Reads one dataset for one rank."""

    def __init__(
        self,
        prepared: Prepared,
        *,
        rank: int = 0,
        world_size: int = 1,
        local_world_size: int = 1,
        cache_directory: str,
        disk_bytes: int,
        memory_bytes: int,
        seed: int | None = None,
        lanes: int | None = None,
        warn: Callable[[str], None] = lambda message: None,
        keep_pixels: bool = True,
    ) -> None:
        """``keep_pixels`` keeps decoded images for later epochs, where there is disk for it."""
        self._prepared = prepared
        self.rank, self.world_size = (rank, world_size) if prepared.split else (0, 1)
        self.rows = prepared.rows
        self.seed = prepared.seed if seed is None else seed
        self._lanes = lanes or prepared.lanes
        self._memory = memory_bytes
        self._warn = warn
        self._warned_of_missing_rows = False
        self._threads = max(1, min(_MOST_THREADS, _usable_cores() // max(1, local_world_size)))
        inspected = prepared.inspected
        parts = inspected.plan.parts
        self._store = _make_store(
            [part.source for part in parts],
            directory=cache_directory,
            disk_bytes=disk_bytes,
            memory_bytes=memory_bytes,
            threads=self._threads,
            warn=warn,
        )
        #: The pixel cache of each part.
        self._pixels = [
            _make_pixels(self._store, inspected, number, keep_pixels) for number in range(len(parts))
        ]
        self._runners = [
            _make_runner(
                part,
                self.seed,
                lambda number: name_row(inspected, number),
                local_world_size,
                self._threads,
                pixels,
            )
            for part, pixels in zip(parts, self._pixels, strict=True)
        ]
        self._reader = RowReader(inspected, self._store, self._runners)
        self._orders: dict[tuple[int, Shuffle], EpochOrder] = {}
        self._ordering = threading.Lock()

    @property
    def store(self) -> BlockStore:
        """The store of decoded blocks."""
        return self._store

    @property
    def runners(self) -> Sequence[Runner]:
        return self._runners

    @property
    def images_decoded(self) -> int:
        """Number of cacheable images decoded by this process."""
        return sum(pixels.counters.decoded for pixels in self._pixels)

    @property
    def images_found(self) -> int:
        """Number of images found decoded, by this process or another one of the node."""
        return sum(pixels.counters.found for pixels in self._pixels)

    def order(self, epoch: int, shuffle: Shuffle | None = None) -> EpochOrder:
        """Return the order of an epoch."""
        kind = self._prepared.shuffle if shuffle is None else shuffle
        with self._ordering:
            found = self._orders.get((epoch, kind))
            if found is None:
                for old in [key for key in self._orders if abs(key[0] - epoch) > 1 or key[1] != kind]:
                    del self._orders[old]
                found = self._prepared.inspected.order(
                    seed=self.seed, epoch=epoch, shuffle=kind, lanes=self._lanes
                )
                self._orders[epoch, kind] = found
            return found

    def epoch(self, epoch: int, position: int, cut: Cut[T]) -> Pipeline[Any, Any]:
        """Return this rank's batches from ``position`` to the end of an epoch, as lists of :class:`ReadyBatch`."""
        order = self.order(epoch, cut.shuffle)
        mine = min(order.lanes, order.lanes // self.world_size + 2) if cut.global_batch >= order.lanes else 0
        if isinstance(order, MixedOrder):  # each rank's part of a step has rows of all lanes
            mine = order.lanes
        open_at_once = 2 * (mine or order.lanes) + 8
        self._reader.expect(open_at_once, open_at_once)
        steps = self._steps(epoch, position, cut)
        at_once = self._steps_at_once(cut)
        depth = self._depth(cut, at_once)
        groups = _in_groups(steps, at_once if cut.prefetch else 1)
        tasks = self._with_blocks_ahead(groups, cut) if cut.prefetch else self._one_by_one(groups, cut)
        return Pipeline(
            tasks,
            lambda work: self._build(work, cut),
            threads=self._building_threads() if cut.prefetch else 0,
            depth=depth,
        )

    def close(self) -> None:
        for runner in self._runners:
            runner.close()
        self._reader.forget()
        self._store.close()
        for pixels in self._pixels:
            pixels.close()

    # -- choosing rows

    def _steps(self, epoch: int, position: int, cut: Cut[T]) -> Iterator[_Step]:
        count = steps_left(self.rows, position, cut.global_batch, cut.tail)
        for _ in range(count):
            end = min(position + cut.global_batch, self.rows)
            step = self._step(epoch, position, end, cut)
            if step.weight or cut.in_step:
                yield step
            position = end

    def _step(self, epoch: int, start: int, end: int, cut: Cut[T]) -> _Step:
        """Return this rank's part of the slots from ``start`` to ``end``; slots below 0 belong to earlier epochs."""
        pieces: list[tuple[int, Ints]] = []
        at = start
        while at < end:
            back = -(at // self.rows)  # how many epochs ago this slot was
            until = min(end, (1 - back) * self.rows)
            first = at + back * self.rows
            slots = self.order(epoch - back, cut.shuffle).step(first, first + until - at)
            pieces.append((epoch - back, slots))
            at = until
        total = end - start
        low, high = part_of(total, self.rank, self.world_size)
        weight = (high - low) * self.world_size / total
        if low == high:  # a rank without a row still has to take part in the step
            return _Step(((pieces[0][0], pieces[0][1][:1]),), end, 0.0)
        return _Step(tuple(_between(pieces, low, high)), end, weight)

    # -- amount of work at a time

    def _steps_at_once(self, cut: Cut[T]) -> int:
        """Return the number of steps gathered together: several where rows are narrow and not transformed."""
        if any(runner.does_anything for runner in self._runners):
            return 1
        rows_of_step = max(1, cut.global_batch // self.world_size)
        nbytes = _TEXT_BYTES_AT_ONCE if self._has_text() else _BYTES_AT_ONCE
        rows = max(1, min(_ROWS_AT_ONCE, int(nbytes / self._row_bytes())))
        return max(1, rows // rows_of_step)

    def _has_text(self) -> bool:
        return any(
            str(field.type) in _ARROW_TEXT
            for part in self._prepared.inspected.plan.parts
            for field in part.source.inspect().schema
        )

    def _building_threads(self) -> int:
        """Return the number of threads. Copying rows holds the GIL too often for a second one; transforming may not."""
        if all(runner.keeps_threads_busy for runner in self._runners):
            return 1
        return max(self._threads, *(runner.processes for runner in self._runners))

    def _row_bytes(self) -> float:
        facts = [part.source.inspect() for part in self._prepared.inspected.plan.parts]
        nbytes = sum(block.nbytes for fact in facts for block in fact.blocks)
        return max(nbytes / max(1, sum(block.rows for fact in facts for block in fact.blocks)), 1.0)

    def _depth(self, cut: Cut[T], at_once: int) -> int:
        """Return how many work items may be under way or waiting, within half of the memory."""
        wanted = self._building_threads() + -(-cut.prefetch // at_once)
        nbytes = self._row_bytes() * at_once * max(1, cut.global_batch // self.world_size)
        return max(1, min(wanted, int(self._memory / 2 / nbytes)))

    def _one_by_one(self, groups: Iterator[list[_Step]], cut: Cut[T]) -> Iterator[_Work]:
        for group in groups:
            yield from self._located([group], cut)

    def _with_blocks_ahead(self, groups: Iterator[list[_Step]], cut: Cut[T]) -> Iterator[_Work]:
        """Yield the work of each group, while the blocks of the following groups are being decoded."""
        for work in self._located(itertools.islice(groups, 1), cut):
            self._store.prefetch(
                self._reader.blocks_of(work.pieces)
            )  # the first batch comes before anything else
            yield work
        works = self._located(itertools.islice(groups, _DECODE_AHEAD), cut)
        while works:
            following = self._located(itertools.islice(groups, _DECODE_AHEAD), cut)
            wanted = [block for work in (*works, *following) for block in self._reader.blocks_of(work.pieces)]
            self._store.prefetch(list(dict.fromkeys(wanted)))
            yield from works
            works = following

    def _located(self, groups: Iterable[list[_Step]], cut: Cut[T]) -> list[_Work]:
        """Locate the rows of each group; those of all groups together where that is possible."""
        chosen = list(groups)
        pieces = [_joined(group) for group in chosen]
        epochs = {epoch for found in pieces for epoch, _ in found}
        if len(epochs) != 1:
            return [
                _Work(group, [self._piece(epoch, slots, cut) for epoch, slots in found])
                for group, found in zip(chosen, pieces, strict=True)
            ]
        slots = [found[0][1] for found in pieces]
        whole = self._piece(epochs.pop(), np.concatenate(slots), cut)
        ends = np.cumsum([len(part) for part in slots]).tolist()
        return [
            _Work(group, [whole.between(end - len(part), end)])
            for group, part, end in zip(chosen, slots, ends, strict=True)
        ]

    def _piece(self, epoch: int, slots: Ints, cut: Cut[T]) -> LocatedSlots:
        order = self.order(epoch, cut.shuffle)
        return LocatedSlots(order, slots, order.locate(slots))

    # -- batches

    def _build(self, work: _Work, cut: Cut[T]) -> list[ReadyBatch[T]]:
        """Return the batches of some steps."""
        group = work.steps
        rows, counts = self._read(work.pieces, cut.python_text)
        if counts is not None and cut.in_step:
            self._warn_of_missing_rows()
        if len(group) == 1 and len(rows):
            return [self._ready(rows, cut, group[0])]
        ends = np.arange(len(rows) + 1) if counts is None else np.concatenate([[0], np.cumsum(counts)])
        ready, at = [], 0
        for step in group:
            low, high = int(ends[at]), int(ends[at + len(step)])
            at += len(step)
            if low == high and not cut.in_step:
                continue
            if low == high:
                ready.append(self._ready(self._filler(step, cut), cut, replace(step, weight=0.0)))
            else:
                ready.append(self._ready(rows.between(low, high), cut, step))
        return ready

    @staticmethod
    def _ready(rows: Rows, cut: Cut[T], step: _Step) -> ReadyBatch[T]:
        return ReadyBatch(cut.convert(rows), step.position, step.weight, len(rows), rows.nbytes)

    def _warn_of_missing_rows(self) -> None:
        """Warn once that steps have fewer rows than they were cut to have."""
        was_warned, self._warned_of_missing_rows = self._warned_of_missing_rows, True
        if not was_warned:
            self._warn(
                "A function leaves rows out or adds some, so batches differ in size, and the weight of each rank's "
                "gradient counts rows before that. Every row still comes once per epoch. For even batches call "
                "materialize() once, or filter by an expression, which is counted beforehand."
            )

    def _read(self, pieces: list[LocatedSlots], python_text: bool) -> tuple[Rows, Ints | None]:
        from powertrain.data.rows.gather import concat_rows

        read = [self._reader.read(piece, python_text) for piece in pieces]
        if len(read) == 1:
            return read[0]
        counts = [
            np.ones(len(piece.slots), np.int64) if made is None else made
            for piece, (_, made) in zip(pieces, read, strict=True)
        ]
        return concat_rows([rows for rows, _ in read]), np.concatenate(counts)

    def _filler(self, step: _Step, cut: Cut[T]) -> Rows:
        """Return one row without weight, for a rank that a filter has left without a row in this step."""
        epoch, slots = step.slots[-1]
        for first in range(0, self.rows, _FILLER_SLOTS):
            around = (
                int(slots[-1]) + 1 + np.arange(first, min(first + _FILLER_SLOTS, self.rows))
            ) % self.rows
            rows, _ = self._reader.read(self._piece(epoch, around, cut))
            if len(rows):
                return rows.between(0, 1)
        raise DataError(
            f"Filters have left no row of the {self.rows} that this dataset has. Check what they keep, for example "
            "with dataset.count()."
        )


def stream(
    plan: Plan, *, batch_rows: int = 1024, observe: Callable[[Loader], None] | None = None
) -> Iterator[Rows]:
    """Yield all rows of a plan in its order, read by this process alone, in bounded memory.

    ``observe`` is given the loader before it begins.
    """
    from powertrain.data.loading.scratch import scratch_directory

    prepared = prepare_alone(plan)
    if not prepared.rows:
        return
    with scratch_directory() as directory:
        budgets = budgets_alone(prepared, directory)
        loader = Loader(prepared, cache_directory=directory, keep_pixels=False, **budgets)
        if observe is not None:
            observe(loader)
        try:
            cut = Cut(batch_rows, "partial", lambda rows: rows, prefetch=2, in_step=False)
            for group in loader.epoch(0, 0, cut):
                yield from (ready.batch for ready in group)
        finally:
            loader.close()


#: Memory and disk for a process that reads a dataset by itself.
MEMORY_ALONE = 256 * 2**20


class Budgets(TypedDict):
    """Bytes that a rank may use."""

    disk_bytes: int
    memory_bytes: int


def budgets_alone(prepared: Prepared, directory: str, readers: int = 1) -> Budgets:
    """Return the budgets of one of ``readers`` that read outside a run: no disk where every block is read once, in
    sequence."""
    largest = max(
        (block.nbytes for part in prepared.inspected.plan.parts for block in part.source.inspect().blocks),
        default=0,
    )
    memory = max(memory_limit(MEMORY_ALONE) // readers, LEAST_MEMORY)
    in_turn = prepared.shuffle == "none" and largest <= memory // 32
    return {
        "disk_bytes": 0 if in_turn else default_disk_bytes(directory) // readers,
        "memory_bytes": memory,
    }


def default_disk_bytes(directory: str) -> int:
    """Return a quarter of the free disk at ``directory``, which need not exist yet."""
    place = os.path.abspath(directory)
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    return shutil.disk_usage(place).free // 4


def _in_groups(steps: Iterator[_Step], most: int) -> Iterator[list[_Step]]:
    """Yield steps in groups that grow to ``most``, for a quick first batch. Carried rows stay by themselves."""
    size = 1
    group: list[_Step] = []
    for step in steps:
        if group and (len(step.slots) > 1 or step.slots[0][0] != group[0].slots[0][0]):
            yield group
            group = []
        if len(step.slots) > 1:
            yield [step]
            continue
        group.append(step)
        if len(group) >= size:
            yield group
            group, size = [], min(most, size * 2)
    if group:
        yield group


def _joined(group: list[_Step]) -> list[tuple[int, Ints]]:
    """Return (epoch, slots) of a group: those of one epoch together, in order."""
    if len(group) == 1:
        return list(group[0].slots)
    return [(group[0].slots[0][0], np.concatenate([step.slots[0][1] for step in group]))]


def _between(pieces: list[tuple[int, Ints]], low: int, high: int) -> Iterator[tuple[int, Ints]]:
    """Yield elements ``low`` to ``high`` of the concatenated pieces."""
    at = 0
    for epoch, slots in pieces:
        part = slots[max(low - at, 0) : max(high - at, 0)]
        if len(part):
            yield epoch, part
        at += len(slots)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _make_store(sources: Sequence[Any], **options: Any) -> BlockStore:
    from powertrain.data.loading.cache import BlockStore

    return BlockStore(sources, [None] * len(sources), **options)


def _make_pixels(store: BlockStore, inspected: Inspected, part: int, wanted: bool) -> PixelCache:
    from powertrain.data.loading.pixels import PixelCache

    directory = store.directory if wanted else None
    return PixelCache(directory, store.identity(part), inspected.blocks, part)


def _make_runner(
    part: Part,
    seed: int,
    name: Callable[[int], str],
    local_world_size: int,
    threads: int,
    pixels: PixelCache,
) -> Runner:
    from powertrain.data.operations.decode import decoding_of, keeping_pixels
    from powertrain.data.operations.runner import Runner

    schema = part.source.inspect().schema
    operations = keeping_pixels((*decoding_of(schema), *part.operations), schema.names, pixels.images)
    return Runner(operations, seed=seed, name_row=name, local_world_size=local_world_size, threads=threads)
