"""The rows of a dataset: metadata, rows in memory, batches and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.data.consuming import PlanReader, Row

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch

    from powertrain.data.epochs import Batches
    from powertrain.data.plan.plan import Plan


class ReadableDataset:
    """The methods of :class:`powertrain.data.Dataset` that read its rows."""

    __slots__ = ("_reader",)

    def __init__(self, plan: Plan) -> None:
        self._reader = PlanReader(plan)

    @property
    def plan(self) -> Plan:
        """The plan of this dataset."""
        return self._reader.plan

    # -- metadata

    def count(self) -> int:
        """Return the number of rows: known from the files, or found by running functions that change it."""
        return self._reader.count()

    def schema(self) -> pa.Schema:
        """Return the columns and their types; where functions make them, those of the first row, which is computed."""
        return self._reader.schema()

    def columns(self) -> list[str]:
        """Return the names of the columns."""
        return list(self.schema().names)

    def num_blocks(self) -> int:
        """Return the number of blocks, the unit of reading, caching and shuffling."""
        return len(self.plan.inspected().blocks)

    def size_bytes(self) -> int:
        """Return the approximate bytes of the source's rows once decoded."""
        return self._reader.size_bytes()

    def stats(self) -> str:
        """Return the cost of the newest reading of this dataset as text."""
        return self._reader.stats()

    # -- rows

    def take(self, limit: int = 20) -> list[Row]:
        """Return the first ``limit`` rows."""
        return self._reader.take(limit)

    def take_all(self, limit: int | None = None) -> list[Row]:
        """Return all rows; refuses if there are more than ``limit``."""
        return self._reader.take_all(limit)

    def take_batch(self, batch_size: int = 20, *, batch_format: str | None = "default") -> Any:
        """Return the first ``batch_size`` rows as one batch: see :meth:`iter_batches`."""
        return self._reader.take_batch(batch_size, batch_format)

    def show(self, limit: int = 20) -> None:
        """Print the first ``limit`` rows."""
        for row in self.take(limit):
            print(row)

    def iter_rows(self) -> Iterator[Row]:
        """Return an iterator over the rows, each as a dict, in order."""
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
        """Return batches as dicts of numpy arrays, DataFrames or tables. Each iteration over them is a new epoch.

        The arguments are those of :meth:`powertrain.data.DataShard.iter_batches`, for a single rank.

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
        """Return batches as dicts of tensors. Each iteration over them is a new epoch.

        The arguments are those of :meth:`powertrain.data.DataShard.iter_torch_batches`, for a single rank.

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
        """Return all rows as one DataFrame in memory; refuses if there are more than ``limit``."""
        return self._reader.to_pandas(limit)

    # -- files

    def write_parquet(
        self,
        path: str,
        *,
        filesystem: Any = None,
        min_rows_per_file: int | None = None,
        max_rows_per_file: int | None = None,
        mode: str = "append",
        on: str | None = None,
        **arrow_parquet_args: Any,
    ) -> None:
        """Write all rows to Parquet files in the directory (or bucket) ``path``. They appear when all are complete.

        Args:
            path: The directory, or an address such as "s3://bucket/data".
            filesystem: A pyarrow or fsspec file system that ``path`` belongs to.
            min_rows_per_file: The least rows of a file.
            max_rows_per_file: The most rows of a file.
            mode: Existing files stay (``"append"``), are removed afterwards (``"overwrite"``), or cause the call to do
                nothing (``"ignore"``) or to raise (``"error"``).
            on: As for ``materialize``.
            **arrow_parquet_args: Those of ``pyarrow.parquet.write_table``.

        Raises:
            DataError: The rows cannot be computed, or do not have one schema.

        Example::

            dataset.write_parquet("data/prepared")
        """
        from powertrain.data.output.writing import parquet_writer

        self._reader.write(
            path,
            "parquet",
            parquet_writer(arrow_parquet_args),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file,
            max_rows_per_file=max_rows_per_file,
            on=on,
        )

    def write_csv(
        self,
        path: str,
        *,
        filesystem: Any = None,
        min_rows_per_file: int | None = None,
        mode: str = "append",
        on: str | None = None,
        **arrow_csv_args: Any,
    ) -> None:
        """Write all rows to CSV files with a header line. ``arrow_csv_args`` are those of ``pyarrow.csv.write_csv``;
        see :meth:`write_parquet` for the others."""
        from powertrain.data.output.writing import csv_writer

        self._reader.write(
            path,
            "csv",
            csv_writer(arrow_csv_args),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file,
            max_rows_per_file=None,
            on=on,
        )

    def write_json(
        self,
        path: str,
        *,
        filesystem: Any = None,
        min_rows_per_file: int | None = None,
        mode: str = "append",
        on: str | None = None,
    ) -> None:
        """Write all rows as JSON lines. Times and decimals become text, NaN becomes null. See :meth:`write_parquet` for
        the arguments."""
        from powertrain.data.output.writing import json_writer

        self._reader.write(
            path,
            "json",
            json_writer(),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file,
            max_rows_per_file=None,
            on=on,
        )
