"""A rank's part of a dataset, as its training loop sees it: epochs, batches, and where it stands."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

from powertrain.data.arguments import flag, one_of, whole
from powertrain.data.batching import (
    BATCH_SIZE,
    UNWATCHED,
    T,
    TimedLoader,
    formatted,
    one_seed,
    watched_copies,
)
from powertrain.data.loading.early_ends import EarlyEnds, is_look
from powertrain.data.loading.epoch_batches import first_batch, open_epoch
from powertrain.data.loading.loader import Cut, Loader, Ready, budgets_alone
from powertrain.data.loading.own_skips import ResumedEpoch
from powertrain.data.plan.changes import changed_message
from powertrain.data.plan.order import after_epoch, steps_left
from powertrain.data.plan.plan import Plan
from powertrain.data.plan.position import Position
from powertrain.data.plan.prepared import Prepared, prepare_alone
from powertrain.data.rows.rows import Rows
from powertrain.data.rows.tf_batches import TensorflowBatches
from powertrain.errors import DataChangedError, DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from powertrain.data.batching import Seat, Watch
    from powertrain.data.dataset import Dataset
    from powertrain.data.loading.execution import Execution
    from powertrain.data.loading.scratch import Scratch

TAILS = ("partial", "drop", "carry")
#: Larger batches, and more of them ahead, are the same as these.
LARGEST_BATCH = 2**40
#: Rows of a batch where the user leaves its size to the blocks, which may be huge.
_MOST_ROWS_OF_A_BLOCK = 2**16


class DataShard(TensorflowBatches):
    """One rank's part of a dataset. ``powertrain.get_dataset_shard(name)`` gives it.

    Each iteration over what :meth:`iter_torch_batches` or :meth:`iter_batches` return is one epoch, in an order of its
    own where the dataset is shuffled. All ranks make equally many steps. Every row comes exactly once per epoch,
    however many ranks there are, and also when a run goes on in mid-epoch with another number of them: the position
    goes into each checkpoint by itself.
    """

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
        resume: Callable[[], Mapping[str, Any] | None] = lambda: None,
        requested: Callable[[ResumedEpoch | None], None] = lambda resumed: None,
        began: Callable[[float | None], None] = lambda weight: None,
        on_change: str = "refuse",
        device: str = "cpu",
        warn: Callable[[str], None] = lambda message: None,
        watch: Watch = UNWATCHED,
    ) -> None:
        """``resume`` is asked once, when it first matters where to begin; ``requested`` is called when a batch is
        requested, for the first one of an epoch that goes on in its middle with where; ``began`` is told the weight of
        each batch just before it is handed out, None where every rank has the same rows; ``device`` is what "auto"
        stands for; ``watch`` is told of each wait."""
        self._device, self.watch = device, watch
        self._prepared = prepared
        self._seat: Seat = {
            "rank": rank,
            "world_size": world_size,
            "local_world_size": local_world_size,
            "cache_directory": cache_directory,
            "disk_bytes": disk_bytes,
            "memory_bytes": memory_bytes,
        }
        self._ranks = world_size if prepared.split else 1
        self.is_split = prepared.split
        self._resume, self._began, self._on_change, self._warn = resume, began, on_change, warn
        self.requested = requested
        #: Where ``resume`` said to begin.
        self._resumed_at: Position | None = None
        self._is_alone = self.fills_batches = False
        self.execution: Execution | None = None
        self._open = _Open()
        weakref.finalize(self, self._open.close)
        #: Where the next iteration begins; None until somebody needs to know.
        self._next: Position | None = None
        self._live: weakref.ref[EpochIterator[Any]] | None = None
        self.early_ends = EarlyEnds(prepared.name, warn, "shard.peek()")
        #: What the batch handed out last counts for in the gradient: rows times ranks by the rows of all ranks. 0 for a
        #: row that only keeps a rank without rows in step.
        self.weight = 1.0
        self._reached: Position | None = None

    @classmethod
    def alone(cls, plan: Plan, execution: Execution | None = None) -> DataShard:
        """All of a plan's rows, for a process that reads them by itself; ``execution`` is told what it costs."""
        from powertrain.data.loading.scratch import Scratch

        prepared, scratch = prepare_alone(plan), Scratch()
        shard = cls(prepared, cache_directory=scratch.path, **budgets_alone(prepared, scratch.path))
        shard._open.scratch, shard._is_alone, shard.execution = scratch, True, execution
        # Nobody has to stay in step with anybody: batches are full, whatever was left out before.
        shard.fills_batches = not prepared.inspected.is_exact
        return shard

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for rows."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.execution is not None:
                self.execution.waited += time.perf_counter() - began
                self.execution.seconds = time.perf_counter() - self.execution.began

    def _largest_block(self) -> int:
        """Rows of a batch where blocks decide."""
        return min(_MOST_ROWS_OF_A_BLOCK, max(int(self._prepared.inspected.block_rows.max(initial=1)), 1))

    def __repr__(self) -> str:
        position = self._position()
        return (
            f"DataShard({self._prepared.name!r}, rank {self._seat['rank']} of {self._seat['world_size']}, "
            f"epoch {position.epoch}, position {max(position.position, 0)} of {self._prepared.rows})"
        )

    # -- batches

    def iter_torch_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = BATCH_SIZE,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None,
        device: str | torch.device = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
        global_batch_size: int | None = None,
        tail: str | None = None,
        seed: int | None = None,
    ) -> Batches[Any]:
        """Batches of tensors, as a dict from column to tensor (text: a list of str). Iterate it once per epoch.

        ``batch_size`` is the rows of one rank; ``global_batch_size`` instead those of all ranks together, which then
        stay the same at any number of ranks. ``tail`` says what becomes of rows that do not fill the last step: they
        come as a smaller one (``"partial"``), are left out (``"drop"``, as ``drop_last=True``) or come with the first
        step of the next epoch (``"carry"``). ``device="auto"`` is the worker's own device. ``collate_fn`` makes the
        batch instead: see :mod:`powertrain.data.collate_fn`. ``seed`` orders epochs in place of the dataset's own.
        ``local_shuffle_buffer_size`` shuffles data that is not shuffled otherwise, within windows of so many rows.
        """
        from powertrain.data.rows.torch_batches import TorchConversion

        chosen = self._device if isinstance(device, str) and device == "auto" else device
        conversion = TorchConversion(dtypes, chosen, collate_fn, pin_memory, prefetch_batches)
        cut = self._cut(
            batch_size,
            global_batch_size,
            tail,
            drop_last,
            prefetch_batches,
            local_shuffle_buffer_size,
            conversion.make,
        )
        cut = replace(cut, python_text=collate_fn is None)
        hand_out = watched_copies(self.watch, conversion.hand_out, chosen)
        return Batches(self, cut, one_seed(seed, local_shuffle_seed), hand_out)

    def iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = BATCH_SIZE,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        global_batch_size: int | None = None,
        tail: str | None = None,
        seed: int | None = None,
    ) -> Batches[Any]:
        """Batches as a dict of numpy arrays (``"numpy"``), a pandas DataFrame or a pyarrow Table. The rest is as for
        :meth:`iter_torch_batches`."""
        cut = self._cut(
            batch_size,
            global_batch_size,
            tail,
            drop_last,
            prefetch_batches,
            local_shuffle_buffer_size,
            formatted(batch_format),
        )
        cut = replace(cut, python_text=batch_format in ("default", "numpy"))
        return Batches(self, cut, one_seed(seed, local_shuffle_seed))

    def iter_rows(self, *, prefetch_batches: int = 1) -> Iterator[dict[str, Any]]:
        """One dict per row, for one epoch."""
        from powertrain.data.rows.formats import row_dicts

        # One row of each rank is a step, so that the position is that of the row handed out.
        cut = self._cut(None, self._ranks, None, False, prefetch_batches, None, row_dicts)
        for rows in Batches(self, cut, None, by_row=True):
            if self.weight:
                yield from rows

    def peek(self, **options: Any) -> Any:
        """Return the batch that comes next, without moving on: the loop gets it again.

        It may be called at any time, also within a loop over batches, and counts as no part of an epoch.

        Args:
            **options: Those of :meth:`iter_torch_batches`, to see what it would give; or, with ``batch_format``, those
                of :meth:`iter_batches`.

        Returns:
            The batch: a dict of tensors, or what ``collate_fn`` or ``batch_format`` make of the rows.

        Raises:
            DataError: An option has a wrong value, or no batch can be made of the rows.

        Example::

            width = shard.peek(batch_size=1)["features"].shape[1]
        """
        return (self.iter_batches if "batch_format" in options else self.iter_torch_batches)(**options).peek()

    def materialize(self) -> Dataset:
        """Read this rank's rows of the first epoch into memory, for libraries that need all of them at once.

        The ranks have each row exactly once between them, and the same rows after a restart with as many ranks. The
        position of the shard does not move, and whether a checkpoint was asked for makes no difference.

        Returns:
            The rows as a dataset in memory, for example for ``to_pandas()``.

        Raises:
            DataError: The rows cannot be read.

        Example::

            frame = powertrain.get_dataset_shard("train").materialize().to_pandas()
        """
        from powertrain.data.reading import from_arrow
        from powertrain.data.rows.formats import to_arrow

        began = self.watch.wait()
        try:
            tables = list(self._all_batches(to_arrow))
        finally:
            self.watch.go_on(began)
        return from_arrow(tables or self.schema().empty_table())

    def _all_batches(self, convert: Callable[[Rows], T]) -> Iterator[T]:
        """This rank's batches of the first epoch, without rows that only keep a rank in step. Nothing moves."""
        rows = max(1, min(self._largest_block(), -(-self._prepared.rows // self._ranks)))
        cut = self._cut(rows, None, None, False, 1, None, convert)
        start = self._start(Position.beginning(self._prepared), cut, None)
        epoch = open_epoch(
            self._loader_for(start), start, replace(cut, shuffle=start.shuffle), self.fills_batches
        )
        try:
            yield from (
                ready.batch for group in epoch.groups for ready in group if ready.weight and ready.rows
            )
        finally:
            epoch.pipeline.close()

    def schema(self) -> pa.Schema:
        """Columns and types of the data as it is stored."""
        return self._prepared.inspected.schema()

    def count(self) -> int:
        """Rows of one epoch, over all ranks."""
        return self._prepared.rows

    def __len__(self) -> int:
        """As :meth:`count`, for frameworks that ask a dataset for its length."""
        return self._prepared.rows

    def __bool__(self) -> bool:
        """True also without rows: ``if shard:`` asks whether there is one."""
        return True

    def _cut(
        self,
        batch_size: int | None,
        global_batch_size: int | None,
        tail: str | None,
        drop_last: bool,
        prefetch: int,
        window: int | None,
        convert: Callable[[Rows], T],
    ) -> Cut[T]:
        drop_last = flag("drop_last", drop_last)
        if tail is None:
            tail = "drop" if drop_last else "partial"
        tail = one_of("tail", tail, TAILS)
        if drop_last and tail != "drop":
            raise DataError(f"drop_last=True and tail={tail!r} contradict each other. Leave one of them out.")
        if batch_size is None and global_batch_size is None and self._is_alone:
            batch_size = self._largest_block()
        if global_batch_size is not None:
            size = whole("global_batch_size", global_batch_size, 1)
        else:
            size = _rows_of_rank(batch_size) * self._ranks
        prefetch = whole("prefetch_batches", prefetch, 0)
        shuffle = None
        if window is not None:
            window = min(whole("local_shuffle_buffer_size", window, 1), max(self._prepared.rows, 1))
            shuffle = window if self._prepared.shuffle == "none" else None
        # A step never has more rows than an epoch and what is carried into it; arithmetic has 64 bits.
        size, prefetch = min(size, LARGEST_BATCH), min(prefetch, LARGEST_BATCH)
        return Cut(size, tail, convert, prefetch=prefetch, shuffle=shuffle, in_step=self._ranks > 1)

    # -- epochs and positions

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or of the next one."""
        return self._position().epoch

    def epochs(self, total: int) -> Iterator[int]:
        """The numbers of the epochs up to ``total``, from the one that comes next, to be read one after the other:
        ``for epoch in shard.epochs(10): for batch in shard.iter_torch_batches(batch_size=32): ...``"""
        total = whole("total", total, 0)
        while (epoch := self._following().epoch) < total:
            yield epoch
            live = self._live_iterator()
            if live is not None and live.is_look:
                live.give_up(f"epochs() has moved on to epoch {epoch + 1}, which has ended this iteration.")
            if self._live_iterator() is None and self._following().epoch == epoch:
                # It was not read, or only looked at: go on all the same.
                self._next = Position.at(self._following(), epoch + 1, 0)
                self.early_ends.forget()

    def state_dict(self) -> dict[str, Any]:
        """What the next iteration would give, as plain values: the same on every rank. It is in every checkpoint
        anyway; to keep it elsewhere, hand it to ``get_dataset_shard(name, state_dict=...)`` later."""
        return self._position().as_dict()

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of this shard."""
        return self.state_dict()

    def reached(self) -> dict[str, Any]:
        """How far this shard was read: the position of the batch handed out last, for people to look at."""
        return (self._position() if self._reached is None else self._reached).as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that :meth:`state_dict` has given."""
        self._abandon()
        self._next = self._checked(Position.from_dict(state, self._prepared.name))
        self.early_ends.forget()
        self._open.close_loader()

    def _position(self) -> Position:
        live = self._live_iterator()
        return live.position if live is not None else self._following()

    def _following(self) -> Position:
        """Where the next iteration begins."""
        if self._next is None:
            saved = self._resume()
            if saved is None:  # not kept: the loop may still ask for its checkpoint before it iterates
                return Position.beginning(self._prepared)
            self._next = self._resumed_at = self._checked(Position.from_dict(saved, self._prepared.name))
        return self._next

    def _checked(self, position: Position) -> Position:
        if self._prepared.is_of(position.fingerprint):
            return replace(position, fingerprint=self._prepared.fingerprint)
        if self._on_change == "restart_epoch":
            at_its_end = position.position >= position.rows
            return Position.beginning(self._prepared, epoch=position.epoch + at_its_end)
        raise DataChangedError(changed_message(self._prepared, position))

    def _live_iterator(self) -> EpochIterator[Any] | None:
        live = self._live() if self._live is not None else None
        return live if live is not None and not live.over else None

    def _abandon(self, reason: str = "") -> None:
        """An iteration that is not at its end yet is given up, and its epoch with it. Who goes on with it is told
        ``reason``."""
        live = self._live_iterator()
        if live is not None:
            live.give_up(reason)

    def _begin(
        self, cut: Cut[T], seed: int | None, hand_out: Callable[[T], Any], by_row: bool = False
    ) -> EpochIterator[T]:
        self._abandon(
            f"Another iteration over the dataset {self._prepared.name!r} was begun, which has ended this one. Read a "
            "dataset in one loop at a time; give one that is to be read twice at once under two names."
        )
        start = self._start(self._following(), cut, seed)
        cut = replace(cut, shuffle=start.shuffle)
        loader = self._loader_for(start)
        self.early_ends.begin(start.epoch)
        before = self._next  # None as long as a saved position may still be asked for
        self._next = Position.at(start, start.epoch + 1, 0)
        iterator = EpochIterator(self, loader, start, cut, hand_out, by_row)
        iterator.before = before
        if start == self._resumed_at and start.position > 0 and not by_row:
            iterator.resumed = self._resumed_epoch(start, cut)
        self._live = weakref.ref(iterator)
        return iterator

    def _resumed_epoch(self, start: Position, cut: Cut[Any]) -> ResumedEpoch:
        left = steps_left(self._prepared.rows, start.position, cut.global_batch, cut.tail)
        skipped = -(-start.position // cut.global_batch)
        return ResumedEpoch(start.epoch, skipped, skipped + left)

    def _start(self, at: Position, cut: Cut[Any], seed: int | None) -> Position:
        """The position that reading begins at: ``at``, in the order that the options ask for."""
        if seed is not None and seed != at.seed:
            at = at.with_seed(seed)
        if at.position == 0:  # an epoch under way goes on as it was begun
            at = replace(at, shuffle=self._prepared.shuffle if cut.shuffle is None else cut.shuffle)
        return at

    def _look(self, cut: Cut[T], seed: int | None) -> T:
        """The batch that comes next: of the iteration under way, or of the next one. Nothing moves."""
        live = self._live_iterator()
        start = self._position()
        if live is not None and seed not in (None, start.seed):
            raise DataError(
                f"peek(seed={seed}) cannot be answered while an iteration with seed {start.seed} is under way. Leave "
                "the seed out, or call peek() before the loop."
            )
        start = self._start(start, cut, seed)
        if not steps_left(self._prepared.rows, start.position, cut.global_batch, cut.tail):
            after = after_epoch(self._prepared.rows, start.position, cut.global_batch, cut.tail)
            start = Position.at(start, start.epoch + 1, after)
        cut = replace(cut, shuffle=start.shuffle, prefetch=0)
        found = first_batch(open_epoch(self._loader_for(start), start, cut, self.fills_batches))
        if found is None:
            raise DataError(
                f"The dataset {self._prepared.name!r} has no batch to look at: {self._prepared.rows} rows make none of "
                f"{cut.global_batch} rows with tail={cut.tail!r}, or filters leave none. Choose a smaller batch."
            )
        made: T = found.batch
        return made

    def _looked(self, iterator: EpochIterator[Any]) -> None:
        """An iteration was given up before its second batch was requested: the next one begins where it began."""
        self._next = iterator.before
        if iterator.requested:
            self.early_ends.note_look((iterator.start.epoch, iterator.start.position))

    def _ended(self, iterator: EpochIterator[Any], cut: Cut[Any]) -> None:
        """An epoch was read to its end."""
        if self.execution is not None:
            self.execution.is_whole = True
        at = iterator.position
        carried = after_epoch(self._prepared.rows, at.position, cut.global_batch, cut.tail)
        self._next = Position.at(at, at.epoch + 1, carried)

    # -- what epochs share

    def _loader_for(self, start: Position) -> Loader:
        if self._open.loader is not None and self._open.loader.seed != start.seed:
            self._open.close_loader()
        if self._open.loader is None:
            self._open.loader = TimedLoader(
                self._prepared, seed=start.seed, lanes=start.lanes, warn=self._warn, **self._seat
            )
            if self.execution is not None:
                self.execution.observe(self._open.loader)
        return self._open.loader

    def close(self) -> None:
        """End threads and processes; let go of all blocks."""
        self._abandon()
        self._open.close()


class _Open:
    """What a shard has opened, apart from the shard: it is closed when the shard is dropped."""

    def __init__(self) -> None:
        self.loader: Loader | None = None
        self.scratch: Scratch | None = None

    def close_loader(self) -> None:
        if self.loader is not None:
            self.loader.close()
            self.loader = None

    def close(self) -> None:
        self.close_loader()
        if self.scratch is not None:
            self.scratch.close()


class Batches(Generic[T]):
    """What a shard's ``iter_...`` methods return: each iteration over it is one epoch."""

    def __init__(
        self,
        shard: DataShard,
        cut: Cut[T],
        seed: int | None,
        hand_out: Callable[[T], Any] = lambda batch: batch,
        by_row: bool = False,
    ) -> None:
        self._shard, self._cut, self._seed, self._hand_out = shard, cut, seed, hand_out
        self._by_row = by_row

    def __iter__(self) -> EpochIterator[T]:
        watch = self._shard.watch
        began = watch.wait()
        try:
            return self._shard._begin(self._cut, self._seed, self._hand_out, self._by_row)
        finally:
            watch.go_on(began)

    def peek(self) -> Any:
        """Return the batch that comes next, without moving on: see :meth:`DataShard.peek`."""
        watch = self._shard.watch
        began = watch.wait()
        try:
            return self._hand_out(self._shard._look(self._cut, self._seed))
        finally:
            watch.go_on(began)

    def __len__(self) -> int:
        """Steps of a whole epoch."""
        return steps_left(self._shard.count(), 0, self._cut.global_batch, self._cut.tail)

    def batches_left(self) -> int:
        """Return how many steps the epoch under way, or the next one, still has."""
        position = self._shard.state_dict()["position"]
        return steps_left(self._shard.count(), position, self._cut.global_batch, self._cut.tail)

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or of the next one."""
        return self._shard.epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the shard stands: see :meth:`DataShard.state_dict`."""
        return self._shard.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that :meth:`state_dict` has given."""
        self._shard.load_state_dict(state)


class EpochIterator(Generic[T]):
    """The batches of one epoch, from where it begins to its end."""

    def __init__(
        self,
        shard: DataShard,
        loader: Loader,
        start: Position,
        cut: Cut[T],
        hand_out: Callable[[T], Any],
        by_row: bool = False,
    ) -> None:
        """``by_row`` says that a batch is one row, of which the shard's watch is told in groups only."""
        self._shard, self._cut, self._hand_out, self._by_row = shard, cut, hand_out, by_row
        #: How long each of those that wait took to make; None where that is done when they are asked for.
        self._seconds: float | None = None
        #: Of the batch handed out last; never of what is read ahead.
        self.position = self.start = start
        #: True once it was read to its end, or given up.
        self.over = False
        self._waiting: list[Ready[T]] = []
        self._error: BaseException | None = None
        self.requested = 0
        #: Where it goes on after a restart, until its first batch is requested.
        self.resumed: ResumedEpoch | None = None
        #: Where the shard stood before: what it goes back to where this iteration does not count.
        self.before: Position | None = start
        self._groups: Iterator[list[Ready[T]]]
        self._groups, self._pipeline = open_epoch(loader, start, cut, shard.fills_batches)

    def __iter__(self) -> EpochIterator[T]:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        if self.over:
            raise StopIteration
        self.requested += 1
        if not self._by_row:
            resumed, self.resumed = self.resumed, None
            self._shard.requested(resumed)
        # A word for each single row would cost more than the row.
        is_told = not self._by_row or not self._waiting
        began = self._await() if is_told else 0
        rows, seconds = self._told_of() if is_told else (0, None)
        ready = self._waiting.pop()
        batch = self._hand_out(ready.batch)
        if is_told:
            self._shard.watch.came(began, batch, rows, seconds)
        if self._shard.execution is not None:
            self._shard.execution.count(ready.rows, ready.nbytes)
        self._shard.weight = ready.weight
        self._shard._began(ready.weight if self._shard.is_split else None)
        self.position = self._shard._reached = Position.at(self.position, self.position.epoch, ready.position)
        return batch

    def _await(self) -> int:
        """At least one batch is there afterwards; says since when it was waited for, as the shard's watch does."""
        watch = self._shard.watch
        began = watch.wait()
        try:
            if not self._waiting:
                self._waiting = self._next_group()
        except StopIteration:
            self._end()
            raise
        except BaseException as error:
            self._error = error  # rows are missing from here on, which is not the end of the epoch
            self._pipeline.close()
            raise
        finally:
            watch.go_on(began)
        return began

    def _told_of(self) -> tuple[int, float | None]:
        """Rows that came, without those that count nothing, and how long they took to make."""
        came = self._waiting if self._by_row else self._waiting[-1:]
        rows = sum(ready.rows for ready in came if ready.weight)
        return rows, None if self._seconds is None else self._seconds * len(came)

    def _next_group(self) -> list[Ready[T]]:
        """The batches that come next, the last one first; never none."""
        while True:
            with self._shard.waiting():
                group = next(self._groups)
            if group:
                self._seconds = getattr(group, "seconds", 0.0) / len(group) if self._cut.prefetch else None
                return group[::-1]

    def state_dict(self) -> dict[str, Any]:
        """Where the shard stands: see :meth:`DataShard.state_dict`."""
        return self._shard.state_dict()

    def close(self) -> None:
        """Give the rest of the epoch up. Before the second batch was requested, the epoch does not count as begun."""
        self.give_up("", is_meant=True)

    @property
    def is_look(self) -> bool:
        """True as long as it would not count as an epoch if it were given up."""
        return is_look(self.requested)

    def give_up(self, reason: str, is_meant: bool = False) -> None:
        """As :meth:`close`; ``reason`` is raised by a later request for a batch. A warning follows unless it
        ``is_meant``."""
        if self.over:
            return
        if self.is_look:
            self._shard._looked(self)
        elif not steps_left(
            self._shard.count(), self.position.position, self._cut.global_batch, self._cut.tail
        ):
            self._end()  # nothing was left of it
            return
        elif not is_meant:
            read = f"{max(self.position.position, 0)} of {self._shard.count()} rows"
            self._shard.early_ends.note_rest(self.position.epoch, read)
        self.over = True
        self._error = DataError(reason) if reason else None
        self._waiting = []
        self._pipeline.close()

    def _end(self) -> None:
        self.over = True
        self._shard._ended(self, self._cut)
        self._pipeline.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At the end of the program names of modules stand for nothing any more, and threads have ended.
        if hasattr(self, "_pipeline") and not is_finalizing():
            self.give_up("")


def _rows_of_rank(batch_size: Any) -> int:
    if batch_size is None:
        raise DataError(
            "batch_size=None gives batches of whatever size blocks have, which differs from rank to rank. Give the "
            "rows of one rank as batch_size, or those of all ranks as global_batch_size."
        )
    return whole("batch_size", batch_size, 1)
