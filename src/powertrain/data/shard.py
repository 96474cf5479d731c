"""A rank's part of a dataset, as its training loop sees it: epochs, batches, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.data.batching import BATCH_SIZE, UNWATCHED
from powertrain.data.epochs import EpochReader, ReaderHooks
from powertrain.data.iterating import iter_batches, iter_rows, iter_torch_batches
from powertrain.data.loading.own_skips import ResumedEpoch
from powertrain.data.plan.prepared import Prepared
from powertrain.data.rows.tf_batches import TensorflowBatches

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

    from powertrain.data.batching import Seat, Watch
    from powertrain.data.dataset import Dataset
    from powertrain.data.epochs import Batches


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
        """``resume``, ``requested``, ``began`` and ``warn`` are those of :class:`~powertrain.data.epochs.ReaderHooks`;
        ``device`` is the one that "auto" stands for; ``watch`` is notified of each wait."""
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

    def __repr__(self) -> str:
        seat, at = self._reader.seat, self._reader.state_dict()
        return (
            f"DataShard({self._reader.prepared.name!r}, rank {seat['rank']} of {seat['world_size']}, "
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
        """Batches of tensors, as a dict from column to tensor (text: a list of str). Iterate it once per epoch.

        ``batch_size`` is the rows of one rank; ``global_batch_size`` instead those of all ranks together, which then
        stay the same at any number of ranks. ``tail`` says what becomes of rows that do not fill the last step: they
        come as a smaller one (``"partial"``), are left out (``"drop"``, as ``drop_last=True``) or come with the first
        step of the next epoch (``"carry"``). ``device="auto"`` is the worker's own device. ``collate_fn`` makes the
        batch instead: see :mod:`powertrain.data.collate_fn`. ``seed`` orders epochs in place of the dataset's own.
        ``local_shuffle_buffer_size`` shuffles data that is not shuffled otherwise, within windows of so many rows.
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
        """Batches as a dict of numpy arrays (``"numpy"``), a pandas DataFrame or a pyarrow Table. The rest is as for
        :meth:`iter_torch_batches`."""
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
        """One dict per row, for one epoch."""
        return iter_rows(self._reader, prefetch_batches)

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
            tables = list(self._reader.all_batches(to_arrow))
        finally:
            self.watch.go_on(began)
        return from_arrow(tables or self.schema().empty_table())

    def schema(self) -> pa.Schema:
        """Columns and types of the data as it is stored."""
        return self._reader.prepared.inspected.schema()

    def count(self) -> int:
        """Rows of one epoch, over all ranks."""
        return self._reader.count()

    def __len__(self) -> int:
        """As :meth:`count`, for frameworks that ask a dataset for its length."""
        return self._reader.count()

    def __bool__(self) -> bool:
        """True also without rows: ``if shard:`` asks whether there is one."""
        return True

    @property
    def weight(self) -> float:
        """Weight of the batch handed out last in the gradient: rows times ranks by the rows of all ranks.

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
        """The numbers of the epochs up to ``total``, from the one that comes next, to be read one after the other:
        ``for epoch in shard.epochs(10): for batch in shard.iter_torch_batches(batch_size=32): ...``"""
        return self._reader.epochs(total)

    def state_dict(self) -> dict[str, Any]:
        """What the next iteration would give, as plain values: the same on every rank. It is in every checkpoint
        anyway; to keep it elsewhere, hand it to ``get_dataset_shard(name, state_dict=...)`` later."""
        return self._reader.state_dict()

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of this shard."""
        return self.state_dict()

    def reached(self) -> dict[str, Any]:
        """How far this shard was read: the position of the batch handed out last, for people to look at."""
        return self._reader.reached()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position that :meth:`state_dict` has given."""
        self._reader.load_state_dict(state)

    def close(self) -> None:
        """End threads and processes; let go of all blocks."""
        self._reader.close()
