"""A rank's part of a Ray dataset. Another process, which runs in Ray, reads it; the rank itself needs no Ray.

Between the two is a Unix socket. The rank opens a connection for each request:

    rank   one byte: EPOCH or SCHEMA
    feed   EPOCH: any number of ROWS, then END or FAILED. SCHEMA: one ROWS without rows, or FAILED.

A frame is its kind (one byte), the length of its content (eight bytes, little-endian) and the content: an Arrow IPC
stream, or text. A rank that leaves an epoch closes the connection. The socket's buffer limits how far the feed is
ahead.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic

from powertrain.data.arguments import flag, one_of, seed_number, whole
from powertrain.data.batch_arguments import LARGEST_BATCH
from powertrain.data.batching import BATCH_SIZE, UNWATCHED, Watch, formatted, watched_copies
from powertrain.data.loading.early_ends import EarlyEnds, is_peek
from powertrain.data.loading.pipeline import Pipeline
from powertrain.data.options.refused import STREAM_METHODS, RefusesNames, missing_member
from powertrain.data.ray.cutting import StreamCut, T
from powertrain.data.ray.protocol import EPOCH, SCHEMA, FeedRequest
from powertrain.data.rows.rows import Rows
from powertrain.data.rows.tf_batches import TensorflowBatches
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from powertrain.data.dataset import Dataset

#: Ray's own types that cannot be used outside Ray, and the remedies.
_ONLY_IN_RAY = {
    "ray.data.arrow_pickled_object": "holds Python objects. Let map() or map_batches() turn them into numbers, text or "
    "lists",
    "ray.data.arrow_variable_shaped_tensor": "holds arrays of different shapes. Let map() bring them to one shape, or "
    "return them as lists",
}


def refuse_ray_only_types(schema: pa.Schema) -> None:
    """Raise :class:`DataError` for a column whose values can only be read in Ray."""
    for field in schema:
        name = getattr(field.type, "extension_name", "")
        if name in _ONLY_IN_RAY:
            raise DataError(
                f"The column {field.name!r} of a Ray dataset {_ONLY_IN_RAY[name]}, or drop it with drop_columns()."
            )


class StreamedShard(TensorflowBatches, metaclass=RefusesNames):
    """One rank's part of a Ray dataset, streamed from Ray while it is computed there.

    Each iteration over the result of :meth:`iter_torch_batches` or :meth:`iter_batches` is one epoch: one execution of
    the Ray dataset, which all ranks begin together. Every rank gets the same number of rows. The position in an epoch
    is not known: after a restart it begins again. With ``DataConfig(snapshot=True)`` the rows are written once and
    every guarantee of :class:`~powertrain.data.shard.DataShard` holds.
    """

    def __init__(
        self,
        name: str,
        address: str,
        *,
        is_split: bool = True,
        world_size: int = 1,
        resume: Callable[[], Mapping[str, Any] | None] = lambda: None,
        began: Callable[[float | None], None] = lambda weight: None,
        device: str = "cpu",
        warn: Callable[[str], None] = lambda message: None,
        watch: Watch = UNWATCHED,
    ) -> None:
        """``address`` is the path of the feed's socket. ``resume`` is called once for the state that :meth:`kept`
        returned before a restart; ``began``, ``device``, ``warn`` and ``watch`` are as for
        :class:`~powertrain.data.shard.DataShard`."""
        self.name, self._address, self._device, self.watch = name, address, device, watch
        self.is_split, self._ranks = is_split, world_size if is_split else 1
        self._resume, self._began = resume, began
        #: Ranks have equally many rows, so each has the same weight.
        self.weight = 1.0
        self._next: int | None = None
        self.early_ends = EarlyEnds(name, warn, "shard.peek()")
        self._live: weakref.ref[StreamedEpoch[Any]] | None = None
        self._schema: pa.Schema | None = None
        self._given = 0

    _refused_names = STREAM_METHODS

    def __getattr__(self, name: str) -> Any:
        raise missing_member(type(self), name)

    def __repr__(self) -> str:
        return f"StreamedShard({self.name!r}, epoch {self.epoch})"

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
    ) -> StreamedBatches[Any]:
        """Return batches of tensors: see :meth:`powertrain.data.DataShard.iter_torch_batches`.

        ``tail="carry"`` and ``seed`` are refused, because Ray decides the order; ``global_batch_size`` must be a
        multiple of the number of ranks. ``local_shuffle_buffer_size`` draws each batch from so many more rows.
        """
        from powertrain.data.rows.torch_batches import TorchConversion

        chosen = self._device if isinstance(device, str) and device == "auto" else device
        conversion = TorchConversion(dtypes, chosen, collate_fn, pin_memory, prefetch_batches)
        cut = self._cut(
            conversion.make,
            self._rows_of_batch(batch_size, global_batch_size),
            _keeps_rest(drop_last, tail),
            prefetch_batches,
        )
        cut = _shuffled(cut, local_shuffle_buffer_size, local_shuffle_seed, seed)
        return StreamedBatches(self, cut, watched_copies(self.watch, conversion.hand_out, chosen))

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
    ) -> StreamedBatches[Any]:
        """Return batches as dicts of numpy arrays (``"numpy"``), pandas DataFrames or pyarrow Tables. See
        :meth:`iter_torch_batches` for the other arguments."""
        cut = self._cut(
            formatted(batch_format),
            self._rows_of_batch(batch_size, global_batch_size),
            _keeps_rest(drop_last, tail),
            prefetch_batches,
        )
        return StreamedBatches(self, _shuffled(cut, local_shuffle_buffer_size, local_shuffle_seed, seed))

    def iter_rows(self, *, prefetch_batches: int = 1) -> Iterator[dict[str, Any]]:
        """Yield one dict per row, for one epoch."""
        from powertrain.data.rows.formats import row_dicts

        for rows in StreamedBatches(self, self._cut(row_dicts, BATCH_SIZE, True, prefetch_batches)):
            yield from rows

    def materialize(self) -> Dataset:
        """Read this rank's rows of one epoch into memory: see :meth:`powertrain.data.DataShard.materialize`.

        Ray computes the dataset for it, on all ranks together: call it on every rank. Ray chooses the rows of each
        rank, and may choose others after a restart.
        """
        from powertrain.data.reading import from_arrow

        tables = list(self.iter_batches(batch_format="pyarrow"))
        return from_arrow(tables or self.schema().empty_table())

    def _cut(self, convert: Callable[[Rows], T], rows: int, keeps_rest: bool, prefetch: int) -> StreamCut[T]:
        ahead = min(whole("prefetch_batches", prefetch, 0), LARGEST_BATCH)
        return StreamCut(min(rows, LARGEST_BATCH), keeps_rest, convert, ahead)

    def _rows_of_batch(self, batch_size: int | None, global_batch_size: int | None) -> int:
        if global_batch_size is None:
            if batch_size is None:
                raise DataError(
                    "batch_size=None gives batches of whatever size Ray's blocks have, which differs from rank to "
                    "rank. Give the rows of one rank as batch_size."
                )
            return whole("batch_size", batch_size, 1)
        global_batch_size = whole("global_batch_size", global_batch_size, 1)
        if global_batch_size % self._ranks:
            raise DataError(
                f"global_batch_size={global_batch_size} is not a multiple of the {self._ranks} ranks, and each gets as "
                "many rows of a Ray dataset as every other. Give a multiple, or DataConfig(snapshot=True), with which "
                "any size works."
            )
        return global_batch_size // self._ranks

    def peek(self, **options: Any) -> Any:
        """Return the first batch of the next epoch without counting as an epoch: the loop gets its rows again.

        Ray begins to compute the dataset for it, on all ranks together: call it on every rank, before the loop.

        Args:
            **options: Those of :meth:`iter_torch_batches`; or, with ``batch_format``, those of :meth:`iter_batches`.

        Returns:
            The batch: a dict of tensors, or the result of ``collate_fn`` or ``batch_format``.

        Raises:
            DataError: An epoch is under way, an option has a wrong value, or there are no rows.
        """
        batches = (self.iter_batches if "batch_format" in options else self.iter_torch_batches)(**options)
        if self._live_epoch() is not None:
            raise DataError(
                f"The next rows of the Ray dataset {self.name!r} cannot be looked at while an epoch is under way, "
                "because Ray gives each row once. Call peek() before the loop."
            )
        epoch = iter(batches)
        try:
            return next(epoch)
        except StopIteration:
            raise DataError(f"The Ray dataset {self.name!r} has no batch for this rank to look at.") from None
        finally:
            epoch.close()
            self.early_ends.forget()

    # -- metadata

    def schema(self) -> pa.Schema:
        """Return columns and types. Ray may compute the first rows for it, unless rows have arrived already."""
        if self._schema is not None:
            return self._schema
        if self._live_epoch() is not None:
            raise DataError(
                f"The columns of the Ray dataset {self.name!r} cannot be asked for while an epoch waits for its first "
                "rows. Call schema() before the loop, or after its first batch."
            )
        request = FeedRequest(self.name, self._address, SCHEMA)
        try:
            self._schema = next(request.tables()).schema
        finally:
            request.hang_up()
        return self._schema

    def count(self) -> int:
        """Raise :class:`DataError`: the number of streamed rows is not known."""
        raise DataError(
            f"How many rows the Ray dataset {self.name!r} has is only known when it was read to its end. Ask Ray in "
            "the driver (dataset.count()) and hand the number over in train_loop_config, or use "
            "DataConfig(snapshot=True)."
        )

    # -- epochs

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or of the next one."""
        live = self._live_epoch()
        return live.epoch if live is not None else self._following()

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs up to ``total``, from the next one: see ``DataShard.epochs``."""
        total = whole("total", total, 0)
        while (epoch := self._following()) < total:
            yield epoch
            live = self._live_epoch()
            if live is not None and live.is_peek:
                live.give_up(f"epochs() has moved on to epoch {epoch + 1}, which has ended this iteration.")
            if self._live_epoch() is None and self._following() == epoch:
                self._next = epoch + 1  # it was not read, or only inspected: continue all the same
                self.early_ends.forget()

    def state_dict(self) -> dict[str, Any]:
        """Raise :class:`DataError`: streamed rows have no position."""
        raise DataError(_no_position(self.name))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise :class:`DataError`: streamed rows have no position to resume from."""
        raise DataError(_no_position(self.name))

    def kept(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the epoch that the next attempt begins with."""
        return {"epoch": self.epoch}

    def reached(self) -> dict[str, Any]:
        """Return the position in this shard, for people to look at."""
        return {"epoch": self.epoch, "batches": self._given}

    def close(self) -> None:
        """Abandon the epoch under way."""
        live = self._live_epoch()
        if live is not None:
            live.close()

    def _following(self) -> int:
        """Return the number of the epoch that the next iteration begins."""
        if self._next is None:
            saved = self._resume()
            if saved is None:  # not stored: the loop may still request its checkpoint before it iterates
                return 0
            self._next = int(saved["epoch"])
        return self._next

    def _live_epoch(self) -> StreamedEpoch[Any] | None:
        live = self._live() if self._live is not None else None
        return live if live is not None and not live.over else None

    def _begin(self, cut: StreamCut[T], hand_out: Callable[[T], Any]) -> StreamedEpoch[T]:
        live = self._live_epoch()
        if live is not None:
            live.give_up(
                f"Another iteration over the dataset {self.name!r} was begun, which has ended this one. Read a dataset "
                "in one loop at a time; give one that is to be read twice at once under two names."
            )
        epoch = self._following()
        before = self._next  # None as long as a saved position may still be requested
        request = FeedRequest(self.name, self._address, EPOCH)
        self.early_ends.begin(epoch)
        self._next, self._given = epoch + 1, 0
        begun = StreamedEpoch(self, request, epoch, cut, hand_out)
        begun.before = before
        self._live = weakref.ref(begun)
        return begun

    def _on_peek(self, looked: StreamedEpoch[Any]) -> None:
        """Handle an epoch abandoned before its second batch was requested: it does not count."""
        self._next = looked.before
        if looked.requested:
            self.early_ends.note_peek(looked.epoch)

    def _handed_out(self) -> None:
        self._given += 1
        self._began(self.weight if self.is_split else None)


def _keeps_rest(drop_last: bool, tail: str | None) -> bool:
    drop_last = flag("drop_last", drop_last)
    advice = "A Ray dataset that is streamed takes no other; DataConfig(snapshot=True) makes them possible."
    tail = one_of("tail", tail, (None, "partial", "drop"), advice)
    if drop_last and tail == "partial":
        raise DataError("drop_last=True and tail='partial' contradict each other. Leave one of them out.")
    return not drop_last and tail != "drop"


def _shuffled(
    cut: StreamCut[T], window: int | None, local_seed: int | None, seed: int | None
) -> StreamCut[T]:
    if seed is not None or (local_seed is not None and window is None):
        raise DataError(
            "Ray decides the order of a dataset that is streamed, so a seed has no part in it. Call "
            "random_shuffle(seed=...) on the Ray dataset, or give local_shuffle_seed together with "
            "local_shuffle_buffer_size."
        )
    if window is None:
        return cut
    window = min(whole("local_shuffle_buffer_size", window, 1), LARGEST_BATCH)
    return replace(cut, window=window, seed=seed_number("local_shuffle_seed", local_seed))


def _no_position(name: str) -> str:
    return (
        f"The dataset {name!r} is Ray's and is streamed, so nobody knows where an epoch of it stands: a restart begins "
        "the epoch again. For a position that can be kept and gone on from, give the trainer "
        "dataset_config=DataConfig(snapshot=True), which writes the rows once into the run's storage."
    )


class StreamedBatches(Generic[T]):
    """The batches of a shard's ``iter_...`` methods: each iteration over it is one epoch."""

    def __init__(
        self,
        shard: StreamedShard,
        cut: StreamCut[T],
        hand_out: Callable[[T], Any] = lambda batch: batch,
    ) -> None:
        self._shard, self._cut, self._hand_out = shard, cut, hand_out

    @property
    def source(self) -> StreamedShard:
        """The shard that the batches come from."""
        return self._shard

    def __iter__(self) -> StreamedEpoch[T]:
        watch = self._shard.watch
        began = watch.wait()
        try:
            return self._shard._begin(self._cut, self._hand_out)
        finally:
            watch.finish(began)

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or of the next one."""
        return self._shard.epoch


class StreamedEpoch(Generic[T]):
    """The batches of one epoch."""

    def __init__(
        self,
        shard: StreamedShard,
        request: FeedRequest,
        epoch: int,
        cut: StreamCut[T],
        hand_out: Callable[[T], Any],
    ) -> None:
        self._shard, self._request, self._hand_out = shard, request, hand_out
        self.epoch = epoch
        self.requested = 0
        #: The number of the shard's next epoch before this one was begun.
        self.before: int | None = epoch
        #: True once it was read to its end, or abandoned.
        self.over = False
        self._error: BaseException | None = None
        tables = _seen_by(shard, request.tables())
        self._is_made_ahead = cut.prefetch > 0
        self._pipeline: Pipeline[_Drawn, _Made[T]] = Pipeline(
            _Drawing(cut.batches(tables, epoch)),
            lambda drawn: _made(drawn, cut),
            threads=1 if cut.prefetch else 0,
            depth=cut.prefetch,
        )

    def __iter__(self) -> StreamedEpoch[T]:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._error
        if self.over:
            raise StopIteration
        self.requested += 1
        watch = self._shard.watch
        began = watch.wait()
        try:
            made = next(self._pipeline)
        except StopIteration:
            self.over = True
            self._close()
            raise
        except BaseException as error:
            self._error = error  # rows are missing from here on, which is not the end of the epoch
            self._close()
            raise
        finally:
            watch.finish(began)
        batch = self._hand_out(made.batch)
        watch.record(began, batch, made.rows, made.seconds if self._is_made_ahead else None)
        self._shard._handed_out()
        return batch

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
            self._shard._on_peek(self)
        elif not is_meant:
            self._shard.early_ends.note_rest(self.epoch, f"{self._shard._given} batches")
        self.over = True
        self._error = DataError(reason) if reason else None
        self._close()

    def _close(self) -> None:
        self._request.hang_up()  # first, because the prefetching thread may be waiting for rows
        self._pipeline.close()

    def __del__(self) -> None:
        if hasattr(self, "_pipeline"):  # the constructor finished
            self.give_up("")


@dataclass(frozen=True)
class _Drawn:
    """A batch's rows as received from Ray, and the seconds that they were awaited."""

    rows: Rows
    seconds: float


class _Drawing:
    """Draws the rows of batches. Not a generator, which would keep the newest until the next request."""

    def __init__(self, batches: Iterator[Rows]) -> None:
        self._batches = batches

    def __iter__(self) -> _Drawing:
        return self

    def __next__(self) -> _Drawn:
        began = time.perf_counter()
        rows = next(self._batches)
        return _Drawn(rows, time.perf_counter() - began)


@dataclass(frozen=True)
class _Made(Generic[T]):
    """A batch, and the seconds that it took to make, including the wait for its rows."""

    batch: T
    rows: int
    seconds: float


def _made(drawn: _Drawn, cut: StreamCut[T]) -> _Made[T]:
    began = time.perf_counter()
    batch = cut.convert(drawn.rows)
    return _Made(batch, len(drawn.rows), drawn.seconds + time.perf_counter() - began)


def _seen_by(shard: StreamedShard, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Yield the same tables; the shard learns its columns from the first. Holds the shard no longer than that."""
    first = next(tables, None)
    if first is None:
        return
    shard._schema = first.schema
    del shard
    yield first
    del first
    yield from tables
