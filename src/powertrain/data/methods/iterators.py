"""Iterators over a dataset, and datasets of other frameworks made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powertrain.data.methods.packing import PackingMethods

if TYPE_CHECKING:
    import pyarrow as pa

    from powertrain.data.iterators.alone import DatasetIterator


class IteratorMethods(PackingMethods):
    """The methods of :class:`powertrain.data.Dataset` that return iterators."""

    __slots__ = ()

    def streaming_split(
        self, n: int, *, equal: bool = False, locality_hints: Any = None
    ) -> list[DatasetIterator]:
        """Return iterators for ``n`` consumers that share each epoch: every row comes to one of them.

        In a training function use ``powertrain.get_dataset_shard`` instead, whose position is part of checkpoints. The
        iterators can be pickled for other processes of this machine, and do not wait for each other.

        Args:
            n: The number of iterators.
            equal: Give all of them equally many rows; up to ``n - 1`` rows are in none.
            locality_hints: Accepted for compatibility, without effect.

        Returns:
            The iterators.

        Raises:
            DataError: An argument has a wrong value, or the data cannot be read.

        Example::

            first, second = dataset.streaming_split(2, equal=True)
        """
        from powertrain.data.iterators.alone import split_iterators

        return split_iterators(self._reader, n, equal, type(self)._of_tables)

    def iterator(self) -> DatasetIterator:
        """Return an iterator over all rows with the methods of a shard, for code that takes one.

        Returns:
            The iterator, of this process alone.

        Raises:
            DataError: The data cannot be read.

        Example::

            validate(dataset.iterator())
        """
        from powertrain.data.iterators.alone import split_iterators

        return split_iterators(self._reader, 1, False, type(self)._of_tables)[0]

    @classmethod
    def _of_tables(cls, tables: list[pa.Table]) -> Any:
        from powertrain.data.plan.plan import Part, Plan
        from powertrain.data.sources.joined import joined
        from powertrain.data.sources.memory import TableSource

        return cls(Plan((Part(TableSource(joined(tables, "tables"))),)))

    def to_tf(self, feature_columns: Any, label_columns: Any, **options: Any) -> Any:
        """Return a ``tf.data.Dataset``: see :meth:`DataShard.to_tf`.

        Args:
            feature_columns: A column, or several.
            label_columns: A column, or several.
            **options: Those of :meth:`DataShard.to_tf`.
        """
        return self.iterator().to_tf(feature_columns, label_columns, **options)

    def iter_tf_batches(self, **options: Any) -> Any:
        """Return batches of TensorFlow's tensors: see :meth:`DataShard.iter_tf_batches`.

        Args:
            **options: Those of :meth:`DataShard.iter_tf_batches`.
        """
        return self.iterator().iter_tf_batches(**options)

    def to_torch(self, **options: Any) -> Any:
        """Return an iterable dataset of torch's: see :meth:`DataShard.to_torch`.

        Args:
            **options: Those of :meth:`DataShard.to_torch`.
        """
        return self.iterator().to_torch(**options)
