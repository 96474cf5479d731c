"""The rows of a dataset: metadata, rows in memory, batches and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from powertrain.data.arguments import shown
from powertrain.data.consuming import PlanReader, Row
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch

    from powertrain.data.epochs import Batches
    from powertrain.data.operations.operation import Operation
    from powertrain.data.options.context import DataContext
    from powertrain.data.plan.plan import Plan

_D = TypeVar("_D", bound="ReadableDataset")


class ReadableDataset:
    """The methods of :class:`powertrain.data.Dataset` that read its rows."""

    __slots__ = ("_name", "_reader")

    def __init__(self, plan: Plan, name: str | None = None) -> None:
        self._reader = PlanReader(plan)
        self._name = name

    @property
    def plan(self) -> Plan:
        """The plan of this dataset."""
        return self._reader.plan

    def _of_plan(self: _D, plan: Plan) -> _D:
        """Return a dataset of another plan."""
        return self if plan is self.plan else type(self)(plan)

    def _then(self: _D, operation: Operation) -> _D:
        return self._of_plan(self.plan.then(operation))

    # -- names

    @property
    def name(self) -> str | None:
        """The name that :meth:`set_name` has given; None without one."""
        return self._name

    def set_name(self, name: str | None) -> None:
        """Give this dataset a name, which ``stats()`` and its ``repr`` show.

        Args:
            name: The name; None for none.

        Raises:
            DataError: It is not text.
        """
        if name is not None and not isinstance(name, str):
            raise DataError(f"set_name({shown(name)}) takes text. Give a name as str, or None.")
        self._name = name

    @property
    def context(self) -> DataContext:
        """The settings of this process: see :class:`powertrain.data.DataContext`."""
        from powertrain.data.options.context import DataContext

        return DataContext.get_current()

    # -- metadata

    def count(self) -> int:
        """Return the number of rows: known from the files, or found by running functions that change it.

        Raises:
            DataError: The data cannot be read.

        Example::

            assert powertrain.data.range(10).count() == 10
        """
        return self._reader.count()

    def schema(self, fetch_if_missing: bool = True) -> pa.Schema:
        """Return the columns and their types; where functions make them, those of the first row, which is computed.

        Args:
            fetch_if_missing: Accepted for compatibility: the schema is always found.

        Raises:
            DataError: The data cannot be read.

        Example::

            print(dataset.schema().field("label").type)
        """
        return self._reader.schema()

    def columns(self, fetch_if_missing: bool = True) -> list[str]:
        """Return the names of the columns.

        Args:
            fetch_if_missing: Accepted for compatibility: the schema is always found.
        """
        return list(self.schema().names)

    def num_blocks(self) -> int:
        """Return the number of blocks, the unit of reading, caching and shuffling."""
        return len(self.plan.inspected().blocks)

    def size_bytes(self) -> int:
        """Return the approximate bytes of the source's rows once decoded."""
        return self._reader.size_bytes()

    def input_files(self) -> list[str]:
        """Return the paths of the files that the rows come from; none for rows in memory."""
        return self._reader.input_files()

    def stats(self) -> str:
        """Return the cost of the newest reading of this dataset as text, with the time of each operation."""
        return self._reader.stats(self._name)

    def explain(self) -> None:
        """Print the plan: sources, operations and order."""
        print(self._reader.explained())

    # -- rows

    def take(self, limit: int = 20) -> list[Row]:
        """Return the first rows, each as a dict.

        Args:
            limit: The number of rows, at most.

        Returns:
            The rows, in order.

        Raises:
            DataError: ``limit`` is not a whole number, or the rows cannot be read.

        Example::

            first = dataset.take(1)[0]
        """
        return self._reader.take(limit)

    def take_all(self, limit: int | None = None) -> list[Row]:
        """Return all rows, each as a dict.

        Args:
            limit: Refuse to return more rows than this; None for no limit.

        Returns:
            The rows, in order.

        Raises:
            DataError: There are more rows than ``limit``, or the rows cannot be read.

        Example::

            labels = [row["label"] for row in dataset.take_all(limit=10_000)]
        """
        return self._reader.take_all(limit)

    def take_batch(self, batch_size: int = 20, *, batch_format: str | None = "default") -> Any:
        """Return the first rows as one batch.

        Args:
            batch_size: The number of rows, at most.
            batch_format: ``"numpy"`` (the default), ``"pandas"`` or ``"pyarrow"``.

        Returns:
            A dict of numpy arrays, a DataFrame or a table.

        Raises:
            DataError: An argument has a wrong value, or the rows cannot be read.

        Example::

            frame = dataset.take_batch(100, batch_format="pandas")
        """
        return self._reader.take_batch(batch_size, batch_format)

    def show(self, limit: int = 20) -> None:
        """Print the first rows.

        Args:
            limit: The number of rows, at most.

        Example::

            dataset.show(3)
        """
        for row in self.take(limit):
            print(row)

    def iter_rows(self) -> Iterator[Row]:
        """Return an iterator over the rows, each as a dict, in order.

        Raises:
            DataError: While iterating: the rows cannot be read.

        Example::

            for row in dataset.iter_rows():
                print(row["label"])
        """
        return self._reader.row_dicts()

    def iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        tail: str | None = None,
        seed: int | None = None,
    ) -> Batches[Any]:
        """Return batches as dicts of numpy arrays, DataFrames or tables.

        Args:
            prefetch_batches: Batches to prepare ahead.
            batch_size: Rows of a batch.
            batch_format: ``"numpy"`` (the default), ``"pandas"`` or ``"pyarrow"``.
            drop_last: The same as ``tail="drop"``.
            local_shuffle_buffer_size: Shuffles data that is not shuffled otherwise, within windows of so many rows.
            local_shuffle_seed: The seed, under its name in Ray Data.
            tail: Handling of rows that do not fill the last batch: a smaller batch (``"partial"``), left out
                (``"drop"``), or part of the first batch of the next epoch (``"carry"``).
            seed: Orders epochs in place of the dataset's own seed.

        Returns:
            An iterable; each iteration over it is a new epoch.

        Raises:
            DataError: An argument has a wrong value, or, while iterating, rows cannot be read.

        Example::

            for batch in dataset.iter_batches(batch_size=256):
                ...
        """
        from powertrain.data.iterating import iter_batches

        return iter_batches(
            self._reader.epochs(),
            prefetch_batches=prefetch_batches,
            batch_size=batch_size,
            batch_format=batch_format,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
            tail=tail,
            seed=seed,
        )

    def iter_torch_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None,
        device: str | torch.device = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
        tail: str | None = None,
        seed: int | None = None,
    ) -> Batches[Any]:
        """Return batches as dicts of tensors.

        Args:
            prefetch_batches: Batches to prepare ahead.
            batch_size: Rows of a batch.
            dtypes: A type for all tensors, or a dict from column to type; None keeps those of the data.
            device: The device of the tensors; "auto" is the CPU.
            collate_fn: Makes the batch instead: see :mod:`powertrain.data.collate_fn`.
            drop_last: As for :meth:`iter_batches`.
            local_shuffle_buffer_size: As for :meth:`iter_batches`.
            local_shuffle_seed: As for :meth:`iter_batches`.
            pin_memory: Return CPU tensors in pinned memory.
            tail: As for :meth:`iter_batches`.
            seed: As for :meth:`iter_batches`.

        Returns:
            An iterable; each iteration over it is a new epoch.

        Raises:
            DataError: An argument has a wrong value, or, while iterating, rows cannot be read or made tensors.

        Example::

            for batch in dataset.iter_torch_batches(batch_size=256, device="cpu"):
                ...
        """
        from powertrain.data.iterating import iter_torch_batches

        return iter_torch_batches(
            self._reader.epochs(),
            prefetch_batches=prefetch_batches,
            batch_size=batch_size,
            dtypes=dtypes,
            device=device,
            collate_fn=collate_fn,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
            pin_memory=pin_memory,
            tail=tail,
            seed=seed,
        )

    def to_pandas(self, limit: int | None = None) -> pd.DataFrame:
        """Return all rows as one DataFrame in memory.

        Args:
            limit: Refuse to return more rows than this; None for no limit.

        Returns:
            The DataFrame.

        Raises:
            DataError: There are more rows than ``limit``, or the rows cannot be read.

        Example::

            dataset.limit(1000).to_pandas().describe()
        """
        return self._reader.to_pandas(limit)


def check_no_mixture(method: str, plan: Plan) -> None:
    """Raise :class:`DataError` for a mixture that ends early, whose order determines the rows of an epoch."""
    from powertrain.data.plan.mixing import SHORTEST

    if plan.mixture is not None and plan.mixture.stop == SHORTEST:
        raise DataError(
            f"{method}() cannot follow mix() with STOP_ON_SHORTEST, which chooses rows by their order. "
            "Call random_shuffle() on the datasets before mix(), or materialize() after it."
        )
