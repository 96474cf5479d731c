"""A rank's part of a dataset for its training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from powertrain.data.iterators.shard_methods import ShardMethods

if TYPE_CHECKING:
    from powertrain.data.dataset import Dataset


class DataShard(ShardMethods):
    """One rank's part of a dataset, returned by ``powertrain.get_dataset_shard(name)``.

    Each iteration over the result of :meth:`iter_torch_batches` or :meth:`iter_batches` is one epoch, in an order of
    its own where the dataset is shuffled. All ranks make equally many steps. Every row comes exactly once per epoch
    at any number of ranks, also when a run resumes in mid-epoch with another number of them: each checkpoint contains
    the position.

    Example::

        shard = powertrain.get_dataset_shard("train")
        for epoch in shard.epochs(10):
            for batch in shard.iter_torch_batches(batch_size=32):
                ...
    """

    def materialize(self) -> Dataset:
        """Read this rank's rows of the first epoch into memory, for libraries that need all of them at once.

        The ranks have each row exactly once between them, and the same rows after a restart with as many ranks. The
        position of the shard does not move, whether or not a checkpoint was loaded.

        Returns:
            The rows as a dataset in memory, for example for ``to_pandas()``.

        Raises:
            DataError: The rows cannot be read.

        Example::

            frame = powertrain.get_dataset_shard("train").materialize().to_pandas()
        """
        from powertrain.data.reading import from_arrow

        return from_arrow(self.tables())
