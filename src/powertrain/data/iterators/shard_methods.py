"""The methods of a rank's part of a dataset: epochs, batches, and the position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.data.batching import BATCH_SIZE, UNWATCHED
from powertrain.data.consuming import PlanReader
from powertrain.data.epochs import EpochReader, ReaderHooks
from powertrain.data.iterating import iter_batches, iter_rows, iter_torch_batches
from powertrain.data.loading.own_skips import ResumedEpoch
from powertrain.data.options.refused import ITERATOR_METHODS, RefusesNames, missing_member
from powertrain.data.plan.prepared import Prepared
from powertrain.data.rows.tf_batches import TensorflowBatches
from powertrain.data.rows.torch_datasets import TorchDatasets

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from powertrain.data.batching import Seat, Watch
    from powertrain.data.epochs import Batches


class ShardMethods(TensorflowBatches, TorchDatasets, metaclass=RefusesNames):
    """The methods of :class:`powertrain.data.DataShard` and of the iterators of a dataset."""

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
        """Make the shard of one rank; ``get_dataset_shard`` does so.

        ``resume``, ``requested``, ``began`` and ``warn`` are those of :class:`~powertrain.data.epochs.ReaderHooks`;
        ``device`` is the one that "auto" stands for; ``watch`` is notified of each wait.
        """
        seat: Seat = {
            "rank": rank,
            "world_size": world_size,
            "local_world_size": local_world_size,
            "cache_directory": cache_directory,
            "disk_bytes": disk_bytes,
            "memory_bytes": memory_bytes,
        }
        hooks = ReaderHooks(resume, requested, began, warn)
        self._reader = EpochReader(prepared, seat, hooks, on_change=on_change, watch=watch)
        self._device = device
        self._schema: pa.Schema | None = None

    _refused_names = ITERATOR_METHODS

    def __getattr__(self, name: str) -> Any:
        raise missing_member(type(self), name)

    def __repr__(self) -> str:
        seat, at = self._reader.seat, self._reader.state_dict()
        return (
            f"{type(self).__name__}({self._reader.prepared.name!r}, rank {seat['rank']} of {seat['world_size']}, "
            f"epoch {at['epoch']}, position {max(at['position'], 0)} of {self._reader.count()})"
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
        """Return batches of tensors, each a dict from column to tensor (text: a list of str).

        Args:
            prefetch_batches: Batches to prepare ahead.
            batch_size: Rows of one rank's batch.
            dtypes: A type for all tensors, or a dict from column to type; None keeps those of the data.
            device: The device of the tensors; "auto" is the worker's own.
            collate_fn: Makes the batch instead: see :mod:`powertrain.data.collate_fn`.
            drop_last: The same as ``tail="drop"``.
            local_shuffle_buffer_size: Shuffles data that is not shuffled otherwise, within windows of so many rows.
            local_shuffle_seed: The seed, under its name in Ray Data.
            pin_memory: Return CPU tensors in pinned memory.
            global_batch_size: Rows of all ranks together, in place of ``batch_size``: the same at any number of ranks.
            tail: Handling of rows that do not fill the last step: a smaller step (``"partial"``), left out
                (``"drop"``), or part of the first step of the next epoch (``"carry"``).
            seed: Orders epochs in place of the dataset's own seed.

        Returns:
            An iterable; each iteration over it is one epoch.

        Raises:
            DataError: An argument has a wrong value, or, while iterating, rows cannot be read or made tensors.

        Example::

            for batch in shard.iter_torch_batches(batch_size=32, dtypes={"features": torch.float32}):
                loss = model(batch["features"]).sum()
        """
        return iter_torch_batches(
            self._reader,
            prefetch_batches=prefetch_batches,
            batch_size=batch_size,
            dtypes=dtypes,
            device=device,
            collate_fn=collate_fn,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
            pin_memory=pin_memory,
            global_batch_size=global_batch_size,
            tail=tail,
            seed=seed,
            auto_device=self._device,
        )

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
        """Return batches as dicts of numpy arrays, DataFrames or tables. Iterate it once per epoch.

        Args:
            prefetch_batches: Batches to prepare ahead.
            batch_size: Rows of one rank's batch.
            batch_format: ``"numpy"`` (the default), ``"pandas"`` or ``"pyarrow"``.
            drop_last: As for :meth:`iter_torch_batches`, like the arguments below.
            local_shuffle_buffer_size: Likewise.
            local_shuffle_seed: Likewise.
            global_batch_size: Likewise.
            tail: Likewise.
            seed: Likewise.

        Returns:
            An iterable; each iteration over it is one epoch.

        Raises:
            DataError: An argument has a wrong value, or, while iterating, rows cannot be read.

        Example::

            for frame in shard.iter_batches(batch_size=256, batch_format="pandas"):
                ...
        """
        return iter_batches(
            self._reader,
            prefetch_batches=prefetch_batches,
            batch_size=batch_size,
            batch_format=batch_format,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
            global_batch_size=global_batch_size,
            tail=tail,
            seed=seed,
        )

    def iter_rows(self, *, prefetch_batches: int = 1) -> Iterator[dict[str, Any]]:
        """Return the rows of one epoch, each as a dict.

        Args:
            prefetch_batches: Batches to prepare ahead.

        Returns:
            An iterator over the rows.

        Raises:
            DataError: The rows cannot be read.

        Example::

            for row in shard.iter_rows():
                print(row["label"])
        """
        return iter_rows(self._reader, prefetch_batches)

    def peek(self, **options: Any) -> Any:
        """Return the next batch without moving on: the loop gets it again.

        It may be called at any time, also within a loop over batches, and does not count as part of an epoch.

        Args:
            **options: Those of :meth:`iter_torch_batches`, for a batch as it would give it; or, with ``batch_format``,
                those of :meth:`iter_batches`.

        Returns:
            The batch: a dict of tensors, or the result of ``collate_fn`` or ``batch_format``.

        Raises:
            DataError: An option has a wrong value, or no batch can be made of the rows.

        Example::

            width = shard.peek(batch_size=1)["features"].shape[1]
        """
        return (self.iter_batches if "batch_format" in options else self.iter_torch_batches)(**options).peek()

    def tables(self) -> list[pa.Table]:
        """Return this rank's rows of the first epoch as tables in memory. The position does not move."""
        from powertrain.data.rows.formats import to_arrow

        began = self.watch.wait()
        try:
            return list(self._reader.all_batches(to_arrow)) or [self.schema().empty_table()]
        finally:
            self.watch.finish(began)

    def schema(self) -> pa.Schema:
        """Return columns and types; where functions make them, those of the first row, which is computed once."""
        if self._schema is None:
            self._schema = PlanReader(self._reader.prepared.inspected.plan).schema()
        return self._schema

    def stats(self) -> str:
        """Return the cost of reading this shard so far as text, with the time of each operation."""
        return self._reader.stats()

    def count(self) -> int:
        """Return the rows of one epoch, over all ranks."""
        return self._reader.count()

    def __len__(self) -> int:
        """Return the rows as :meth:`count` does, for frameworks that call ``len``."""
        return self._reader.count()

    def __bool__(self) -> bool:
        """Return True also without rows: ``if shard:`` tests for None."""
        return True

    @property
    def weight(self) -> float:
        """Gradient weight of the batch handed out last: rows times ranks by the rows of all ranks.

        0 for a row that only keeps a rank without rows in step.
        """
        return self._reader.weight

    @property
    def is_split(self) -> bool:
        """True where each rank has rows of its own."""
        return self._reader.is_split

    @property
    def watch(self) -> Watch:
        """The object that is notified of each wait for rows."""
        return self._reader.watch

    @watch.setter
    def watch(self, watch: Watch) -> None:
        self._reader.watch = watch

    # -- epochs and positions

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way, or of the next one."""
        return self._reader.epoch

    def epochs(self, total: int) -> Iterator[int]:
        """Return the numbers of the remaining epochs, to be read one after the other.

        Args:
            total: The number of epochs of the whole training.

        Returns:
            An iterator from the next epoch up to ``total``.

        Raises:
            DataError: ``total`` is not a whole number.

        Example::

            for epoch in shard.epochs(10):
                for batch in shard.iter_torch_batches(batch_size=32):
                    ...
        """
        return self._reader.epochs(total)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch as plain values: the same on every rank.

        Every checkpoint contains it anyway; to keep it elsewhere, pass it to ``get_dataset_shard(name,
        state_dict=...)`` later.

        Returns:
            The position.

        Example::

            position = shard.state_dict()
            shard = powertrain.get_dataset_shard("train", state_dict=position)
        """
        return self._reader.state_dict()

    def kept(self) -> dict[str, Any]:
        """Return the state of this shard for a checkpoint."""
        return self.state_dict()

    def reached(self) -> dict[str, Any]:
        """Return the position of the batch handed out last, for people to look at."""
        return self._reader.reached()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a position returned by :meth:`state_dict`.

        Args:
            state: The position.

        Raises:
            DataError: It is not a position, or belongs to other data.

        Example::

            shard.load_state_dict(saved["position"])
        """
        self._reader.load_state_dict(state)

    def close(self) -> None:
        """End threads and processes, and release all blocks."""
        self._reader.close()
