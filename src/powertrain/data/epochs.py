"""Epochs of a prepared dataset as one process reads them: batches, positions, and where the next epoch begins."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic

from powertrain.data.arguments import shown, whole
from powertrain.data.batch_arguments import LARGEST_BATCH, checked_tail, rows_of_rank
from powertrain.data.batching import UNWATCHED, T, TimedLoader
from powertrain.data.loading.early_ends import EarlyEnds, is_peek
from powertrain.data.loading.epoch_batches import first_batch, open_epoch
from powertrain.data.loading.execution import Execution
from powertrain.data.loading.loader import Cut, Loader, ReadyBatch, budgets_alone
from powertrain.data.loading.own_skips import ResumedEpoch
from powertrain.data.plan.changes import changed_message
from powertrain.data.plan.order import after_epoch, steps_left
from powertrain.data.plan.plan import Plan
from powertrain.data.plan.position import Position
from powertrain.data.plan.prepared import Prepared, prepare_alone
from powertrain.data.rows.rows import Rows
from powertrain.errors import DataChangedError, DataError

if TYPE_CHECKING:
    from powertrain.data.batching import Seat, Watch
    from powertrain.data.loading.scratch import Scratch

#: Rows of a batch where its size is left to the blocks, which may be huge.
_MOST_ROWS_OF_A_BLOCK = 2**16


@dataclass
class ReaderHooks:
    """Calls from a reader to the session of its rank."""

    #: Returns the saved position. Called once, when the first position is needed.
    resume: Callable[[], Mapping[str, Any] | None] = lambda: None
    #: Called at each request for a batch; with the resumed epoch at the first request of one.
    requested: Callable[[ResumedEpoch | None], None] = lambda resumed: None
    #: Called with the weight of each batch before it is handed out; None where every rank has the same rows.
    began: Callable[[float | None], None] = lambda weight: None
    warn: Callable[[str], None] = lambda message: None


class EpochReader:
    """Reads a prepared dataset epoch by epoch, and tracks the position that a checkpoint keeps."""

    def __init__(
        self,
        prepared: Prepared,
        seat: Seat,
        hooks: ReaderHooks | None = None,
        *,
        on_change: str = "refuse",
        watch: Watch = UNWATCHED,
    ) -> None:
        """``on_change`` is that of ``DataConfig``; ``watch`` is notified of each wait."""
        self.prepared, self.seat, self.hooks = prepared, seat, hooks or ReaderHooks()
        self.watch, self._on_change = watch, on_change
        self.ranks = seat["world_size"] if prepared.split else 1
        self.is_split = prepared.split
        #: The position that ``hooks.resume`` returned.
        self._resumed_at: Position | None = None
        #: True outside a run: blocks may decide the size of batches, and batches are filled up after functions.
        self.is_alone = self.fills_batches = False
        #: True where every step of all ranks yields a batch, if need be of one row without weight.
        self.stays_in_step = self.ranks > 1
        #: The cost of reading, for stats().
        self.execution = Execution(prepared.name or "dataset", len(prepared.inspected.blocks))
        self.open = _Open()
        weakref.finalize(self, self.open.close)
        #: Position at which the next iteration begins; None until it is needed.
        self._next: Position | None = None
        self._live: weakref.ref[EpochIterator[Any]] | None = None
        self.early_ends = EarlyEnds(prepared.name or "dataset", self.hooks.warn, "shard.peek()")
        #: Weight of the batch handed out last in the gradient: rows times ranks by the rows of all ranks. 0 for a row
        #: that only keeps a rank without rows in step.
        self.weight = 1.0
        self.reached_position: Position | None = None

    @classmethod
    def alone(cls, plan: Plan, execution: Execution | None = None) -> EpochReader:
        """Return a reader of all rows of a plan, for a process without other ranks; ``execution`` counts its cost."""
        from powertrain.data.loading.scratch import Scratch

        prepared, scratch = prepare_alone(plan), Scratch()
        seat: Seat = {
            "rank": 0,
            "world_size": 1,
            "local_world_size": 1,
            "cache_directory": scratch.path,
            **budgets_alone(prepared, scratch.path),
        }
        reader = cls(prepared, seat)
        reader.open.scratch, reader.is_alone = scratch, True
        reader.execution = execution or reader.execution
        # There is no other rank to stay in step with: batches are full, whatever was filtered out before.
        reader.fills_batches = not prepared.inspected.is_exact
        return reader

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as a wait for rows."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.execution.waited += time.perf_counter() - began
            self.execution.seconds = time.perf_counter() - self.execution.began

    def _largest_block(self) -> int:
        """Rows of the largest block: the batch size where blocks decide."""
        return min(_MOST_ROWS_OF_A_BLOCK, max(int(self.prepared.inspected.block_rows.max(initial=1)), 1))

    def make_cut(
        self,
        batch_size: int | None,
        global_batch_size: int | None,
        tail: str | None,
        drop_last: bool,
        prefetch: int,
        window: int | None,
        convert: Callable[[Rows], T],
    ) -> Cut[T]:
        """Return the cut into batches for these arguments of ``iter_torch_batches``."""
        tail = checked_tail(tail, drop_last)
        if batch_size is None and global_batch_size is None and self.is_alone:
            batch_size = self._largest_block()
        if global_batch_size is not None:
            size = whole("global_batch_size", global_batch_size, 1)
        else:
            size = rows_of_rank(batch_size) * self.ranks
        prefetch = whole("prefetch_batches", prefetch, 0)
        shuffle = None
        if window is not None and self.prepared.shuffle == "mix":
            raise DataError(
                f"local_shuffle_buffer_size={shown(window)} cannot shuffle a mixture, whose order its weights fix. "
                "Shuffle the datasets before: one.random_shuffle().mix(other.random_shuffle(), weights=...)."
            )
        if window is not None:
            window = min(whole("local_shuffle_buffer_size", window, 1), max(self.prepared.rows, 1))
            shuffle = window if self.prepared.shuffle == "none" else None
        # A step never has more rows than an epoch and the rows carried into it; arithmetic has 64 bits.
        size, prefetch = min(size, LARGEST_BATCH), min(prefetch, LARGEST_BATCH)
        return Cut(size, tail, convert, prefetch=prefetch, shuffle=shuffle, in_step=self.stays_in_step)

    def count(self) -> int:
        """Return the rows of one epoch, over all ranks."""
        return self.prepared.rows

    def stats(self) -> str:
        """Return the cost of reading so far as text."""
        return self.execution.text()

    def all_batches(self, convert: Callable[[Rows], T]) -> Iterator[T]:
        """Yield this rank's batches of the first epoch, without filler rows. The position does not move."""
        rows = max(1, min(self._largest_block(), -(-self.prepared.rows // self.ranks)))
        cut = self.make_cut(rows, None, None, False, 1, None, convert)
        start = self._start(Position.beginning(self.prepared), cut, None)
        epoch = open_epoch(
            self._loader_for(start), start, replace(cut, shuffle=start.shuffle), self.fills_batches
        )
        try:
            yield from (
                ready.batch for group in epoch.groups for ready in group if ready.weight and ready.rows
            )
        finally:
            epoch.pipeline.close()

    # -- epochs and positions

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or of the next one."""
        return self._position().epoch

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs up to ``total``: see :meth:`powertrain.data.DataShard.epochs`."""
        total = whole("total", total, 0)
        while (epoch := self._following().epoch) < total:
            yield epoch
            live = self._live_iterator()
            if live is not None and live.is_peek:
                live.give_up(f"epochs() has moved on to epoch {epoch + 1}, which has ended this iteration.")
            if self._live_iterator() is None and self._following().epoch == epoch:
                # It was not read, or only inspected: continue with the next epoch all the same.
                self._next = Position.at(self._following(), epoch + 1, 0)
                self.early_ends.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch as plain values: the same on every rank."""
        return self._position().as_dict()

    def reached(self) -> dict[str, Any]:
        """Return the position of the batch handed out last, for people to look at."""
        return (self._position() if self.reached_position is None else self.reached_position).as_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a position returned by :meth:`state_dict`."""
        self._abandon()
        self._next = self._checked(Position.from_dict(state, self.prepared.name))
        self.early_ends.forget()
        self.open.close_loader()

    def _position(self) -> Position:
        live = self._live_iterator()
        return live.position if live is not None else self._following()

    def _following(self) -> Position:
        """Return the position at which the next iteration begins."""
        if self._next is None:
            saved = self.hooks.resume()
            if saved is None:  # not stored: the loop may still request its checkpoint before it iterates
                return Position.beginning(self.prepared)
            self._next = self._resumed_at = self._checked(Position.from_dict(saved, self.prepared.name))
        return self._next

    def _checked(self, position: Position) -> Position:
        if self.prepared.is_of(position.fingerprint):
            return replace(position, fingerprint=self.prepared.fingerprint)
        if self._on_change == "restart_epoch":
            at_its_end = position.position >= position.rows
            return Position.beginning(self.prepared, epoch=position.epoch + at_its_end)
        raise DataChangedError(changed_message(self.prepared, position))

    def _live_iterator(self) -> EpochIterator[Any] | None:
        live = self._live() if self._live is not None else None
        return live if live is not None and not live.over else None

    def _abandon(self, reason: str = "") -> None:
        """Abandon the iteration under way, and its epoch with it. A later request for a batch of it raises
        ``reason``."""
        live = self._live_iterator()
        if live is not None:
            live.give_up(reason)

    def begin(
        self, cut: Cut[T], seed: int | None, hand_out: Callable[[T], Any], by_row: bool = False
    ) -> EpochIterator[T]:
        """Begin an epoch, which ends the iteration under way."""
        self._abandon(
            f"Another iteration over the dataset {self.prepared.name!r} was begun, which has ended this one. Read a "
            "dataset in one loop at a time; give one that is to be read twice at once under two names."
        )
        start = self._start(self._following(), cut, seed)
        cut = replace(cut, shuffle=start.shuffle)
        loader = self._loader_for(start)
        self.early_ends.begin(start.epoch)
        before = self._next  # None as long as a saved position may still be requested
        self._next = Position.at(start, start.epoch + 1, 0)
        iterator = EpochIterator(self, loader, start, cut, hand_out, by_row)
        iterator.before = before
        if start == self._resumed_at and not start.is_beginning and start.position >= 0 and not by_row:
            iterator.resumed = self._resumed_epoch(start, cut)
        self._live = weakref.ref(iterator)
        return iterator

    def _resumed_epoch(self, start: Position, cut: Cut[Any]) -> ResumedEpoch:
        left = steps_left(self.prepared.rows, start.position, cut.global_batch, cut.tail)
        skipped = -(-start.position // cut.global_batch)
        return ResumedEpoch(start.epoch, skipped, skipped + left)

    def _start(self, at: Position, cut: Cut[Any], seed: int | None) -> Position:
        """Return the position that reading begins at: ``at``, in the order that the options request."""
        if seed is not None and seed != at.seed:
            at = at.with_seed(seed)
        if at.is_beginning:  # an epoch under way continues in its own order
            at = replace(at, shuffle=self.prepared.shuffle if cut.shuffle is None else cut.shuffle)
        return at

    def peek(self, cut: Cut[T], seed: int | None) -> T:
        """Return the next batch: of the iteration under way, or of the next one. The position does not move."""
        live = self._live_iterator()
        start = self._position()
        if live is not None and seed not in (None, start.seed):
            raise DataError(
                f"peek(seed={seed}) cannot be answered while an iteration with seed {start.seed} is under way. Leave "
                "the seed out, or call peek() before the loop."
            )
        start = self._start(start, cut, seed)
        if not steps_left(self.prepared.rows, start.position, cut.global_batch, cut.tail):
            after = after_epoch(self.prepared.rows, start.position, cut.global_batch, cut.tail)
            start = Position.at(start, start.epoch + 1, after)
        cut = replace(cut, shuffle=start.shuffle, prefetch=0)
        found = first_batch(open_epoch(self._loader_for(start), start, cut, self.fills_batches))
        if found is None:
            raise DataError(
                f"The dataset {self.prepared.name!r} has no batch to look at: {self.prepared.rows} rows make none of "
                f"{cut.global_batch} rows with tail={cut.tail!r}, or filters leave none. Choose a smaller batch."
            )
        made: T = found.batch
        return made

    def on_peek(self, iterator: EpochIterator[Any]) -> None:
        """Handle an iteration abandoned before its second batch was requested: the next one begins where it began."""
        self._next = iterator.before
        if iterator.requested:
            self.early_ends.note_peek((iterator.start.epoch, iterator.start.position))

    def on_end(self, iterator: EpochIterator[Any], cut: Cut[Any]) -> None:
        """Handle an epoch that was read to its end."""
        self.execution.is_whole = True
        at = iterator.position
        carried = after_epoch(self.prepared.rows, at.position, cut.global_batch, cut.tail)
        skip, step = (at.skip, at.step) if carried else (0, 0)
        self._next = Position.at(at, at.epoch + 1, carried, skip, step)

    # -- state shared by epochs

    def _loader_for(self, start: Position) -> Loader:
        if self.open.loader is not None and self.open.loader.seed != start.seed:
            self.open.close_loader()
        if self.open.loader is None:
            self.open.loader = TimedLoader(
                self.prepared, seed=start.seed, lanes=start.lanes, warn=self.hooks.warn, **self.seat
            )
            self.execution.observe(self.open.loader)
        return self.open.loader

    def close(self) -> None:
        """End threads and processes, and release all blocks."""
        self._abandon()
        self.open.close()


class _Open:
    """The loader and the scratch files of a reader, closed when the reader is dropped."""

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
    """The batches of a shard's ``iter_...`` methods: each iteration over it is one epoch."""

    def __init__(
        self,
        reader: EpochReader,
        cut: Cut[T],
        seed: int | None,
        hand_out: Callable[[T], Any] = lambda batch: batch,
        by_row: bool = False,
    ) -> None:
        self._reader, self._cut, self._seed, self._hand_out = reader, cut, seed, hand_out
        self._by_row = by_row

    @property
    def source(self) -> EpochReader:
        """The reader that the batches come from."""
        return self._reader

    def __iter__(self) -> EpochIterator[T]:
        watch = self._reader.watch
        began = watch.wait()
        try:
            return self._reader.begin(self._cut, self._seed, self._hand_out, self._by_row)
        finally:
            watch.finish(began)

    def peek(self) -> Any:
        """Return the batch that comes next, without moving on: see :meth:`powertrain.data.DataShard.peek`."""
        watch = self._reader.watch
        began = watch.wait()
        try:
            return self._hand_out(self._reader.peek(self._cut, self._seed))
        finally:
            watch.finish(began)

    def __len__(self) -> int:
        """Return the steps of a whole epoch."""
        return steps_left(self._reader.count(), 0, self._cut.global_batch, self._cut.tail)

    def batches_left(self) -> int:
        """Return the number of steps left in the epoch under way, or in the next one."""
        position = self._reader.state_dict()["position"]
        return steps_left(self._reader.count(), position, self._cut.global_batch, self._cut.tail)

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or of the next one."""
        return self._reader.epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the shard: see :meth:`powertrain.data.DataShard.state_dict`."""
        return self._reader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a position returned by :meth:`state_dict`."""
        self._reader.load_state_dict(state)


class EpochIterator(Generic[T]):
    """The batches of one epoch, from its start position to its end."""

    def __init__(
        self,
        reader: EpochReader,
        loader: Loader,
        start: Position,
        cut: Cut[T],
        hand_out: Callable[[T], Any],
        by_row: bool = False,
    ) -> None:
        """``by_row`` means that a batch is one row, which the shard's watch records in groups only."""
        self._reader, self._cut, self._hand_out, self._by_row = reader, cut, hand_out, by_row
        #: Seconds that each of the waiting batches took to make; None where they are made on request.
        self._seconds: float | None = None
        #: Position of the batch handed out last; never of prefetched ones.
        self.position = self.start = start
        #: True once it was read to its end, or abandoned.
        self.over = False
        self._waiting: list[ReadyBatch[T]] = []
        self._error: BaseException | None = None
        self.requested = 0
        #: The resumed epoch, until its first batch is requested.
        self.resumed: ResumedEpoch | None = None
        #: Position of the shard before, which is restored if this iteration does not count.
        self.before: Position | None = start
        self._groups: Iterator[list[ReadyBatch[T]]]
        self._groups, self._pipeline = open_epoch(loader, start, cut, reader.fills_batches)

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
            self._reader.hooks.requested(resumed)
        # Recording each single row would cost more than the row.
        is_recorded = not self._by_row or not self._waiting
        began = self._await() if is_recorded else 0
        rows, seconds = self._delivered() if is_recorded else (0, None)
        ready = self._waiting.pop()
        batch = self._hand_out(ready.batch)
        if is_recorded:
            self._reader.watch.record(began, batch, rows, seconds)
        self._reader.execution.count(ready.rows, ready.nbytes)
        self._reader.weight = ready.weight
        self._reader.hooks.began(ready.weight if self._reader.is_split else None)
        self.position = self._reader.reached_position = Position.at(
            self.position, self.position.epoch, ready.position, ready.skip, ready.step
        )
        return batch

    def _await(self) -> int:
        """Wait until at least one batch is there; return the start of the wait, as given by the shard's watch."""
        watch = self._reader.watch
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
            watch.finish(began)
        return began

    def _delivered(self) -> tuple[int, float | None]:
        """Return the rows that came, without filler rows, and the seconds that they took to make."""
        came = self._waiting if self._by_row else self._waiting[-1:]
        rows = sum(ready.rows for ready in came if ready.weight)
        return rows, None if self._seconds is None else self._seconds * len(came)

    def _next_group(self) -> list[ReadyBatch[T]]:
        """Return the next batches, the last one first; never an empty list."""
        while True:
            with self._reader.waiting():
                group = next(self._groups)
            if group:
                self._seconds = getattr(group, "seconds", 0.0) / len(group) if self._cut.prefetch else None
                return group[::-1]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the shard: see :meth:`powertrain.data.DataShard.state_dict`."""
        return self._reader.state_dict()

    def close(self) -> None:
        """Abandon the rest of the epoch. Before the second batch was requested, the epoch does not count as begun."""
        self.give_up("", is_meant=True)

    @property
    def is_peek(self) -> bool:
        """True as long as it would not count as an epoch if it were abandoned."""
        return is_peek(self.requested)

    def give_up(self, reason: str, is_meant: bool = False) -> None:
        """Close as :meth:`close` does; ``reason`` is raised by a later request for a batch. Warns unless it
        ``is_meant``."""
        if self.over:
            return
        if self.is_peek:
            self._reader.on_peek(self)
        elif not steps_left(
            self._reader.count(), self.position.position, self._cut.global_batch, self._cut.tail
        ):
            self._end()  # no batch was left
            return
        elif not is_meant:
            read = f"{max(self.position.position, 0)} of {self._reader.count()} rows"
            self._reader.early_ends.note_rest(self.position.epoch, read)
        self.over = True
        self._error = DataError(reason) if reason else None
        self._waiting = []
        self._pipeline.close()

    def _end(self) -> None:
        self.over = True
        self._reader.on_end(self, self._cut)
        self._pipeline.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # At interpreter shutdown the names of modules are unset, and threads have ended.
        if hasattr(self, "_pipeline") and not is_finalizing():
            self.give_up("")
