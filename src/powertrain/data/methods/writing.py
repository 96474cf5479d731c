"""Rows written to files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from powertrain.data.arguments import column_names
from powertrain.data.options.scheduling import writer_arguments
from powertrain.data.readable import ReadableDataset


class WritingMethods(ReadableDataset):
    """The methods of :class:`powertrain.data.Dataset` that write files."""

    __slots__ = ()

    def write_parquet(
        self,
        path: str,
        *,
        partition_cols: Sequence[str] | None = None,
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
            partition_cols: Columns by whose values the files are put into directories "column=value"; reading them adds
                these columns as text. A file has the rows of one combination of values.
            filesystem: A pyarrow or fsspec file system that ``path`` belongs to.
            min_rows_per_file: The least rows of a file.
            max_rows_per_file: The most rows of a file.
            mode: Existing files stay (``"append"``), are removed afterwards (``"overwrite"``), or cause the call to do
                nothing (``"ignore"``) or to raise (``"error"``).
            on: As for ``materialize``.
            **arrow_parquet_args: Those of ``pyarrow.parquet.write_table``, and Ray Data's ``num_rows_per_file``; its
                arguments about scheduling have no effect.

        Raises:
            DataError: The rows cannot be computed, or do not have one schema.

        Example::

            dataset.write_parquet("data/prepared")
        """
        from powertrain.data.output.writing import parquet_writer

        arrow_parquet_args, rows = writer_arguments("write_parquet", arrow_parquet_args, True)
        self._reader.write(
            path,
            "parquet",
            parquet_writer(arrow_parquet_args),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file if rows is None else rows,
            max_rows_per_file=max_rows_per_file,
            on=on,
            partition_cols=() if partition_cols is None else column_names("write_parquet", partition_cols),
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
        """Write all rows to CSV files with a header line, in the directory (or bucket) ``path``.

        Args:
            path: The directory, or an address such as "s3://bucket/data".
            filesystem: A pyarrow or fsspec file system that ``path`` belongs to.
            min_rows_per_file: The least rows of a file.
            mode: As for :meth:`write_parquet`.
            on: As for ``materialize``.
            **arrow_csv_args: Those of ``pyarrow.csv.write_csv``, and Ray Data's ``num_rows_per_file``; its arguments
                about scheduling have no effect.

        Raises:
            DataError: The rows cannot be computed, or do not have one schema.

        Example::

            dataset.write_csv("data/table")
        """
        from powertrain.data.output.writing import csv_writer

        arrow_csv_args, rows = writer_arguments("write_csv", arrow_csv_args, True)
        self._reader.write(
            path,
            "csv",
            csv_writer(arrow_csv_args),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file if rows is None else rows,
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
        **ray_arguments: Any,
    ) -> None:
        """Write all rows as JSON lines, in files of the directory (or bucket) ``path``.

        Times and decimals become text, NaN becomes null.

        Args:
            path: The directory, or an address such as "s3://bucket/data".
            filesystem: A pyarrow or fsspec file system that ``path`` belongs to.
            min_rows_per_file: The least rows of a file.
            mode: As for :meth:`write_parquet`.
            on: As for ``materialize``.
            **ray_arguments: Ray Data's ``num_rows_per_file``; its arguments about scheduling have no effect.

        Raises:
            DataError: The rows cannot be computed, or do not have one schema.

        Example::

            dataset.write_json("data/lines")
        """
        from powertrain.data.output.writing import json_writer

        _, rows = writer_arguments("write_json", ray_arguments, False)
        self._reader.write(
            path,
            "json",
            json_writer(),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file if rows is None else rows,
            on=on,
        )

    def write_numpy(
        self,
        path: str,
        *,
        column: str,
        filesystem: Any = None,
        min_rows_per_file: int | None = None,
        mode: str = "append",
        on: str | None = None,
        **ray_arguments: Any,
    ) -> None:
        """Write one column as ``.npy`` files, in the directory (or bucket) ``path``.

        Args:
            path: The directory, or an address such as "s3://bucket/data".
            column: The column: numbers, or arrays of one shape.
            filesystem: A pyarrow or fsspec file system that ``path`` belongs to.
            min_rows_per_file: The least rows of a file.
            mode: As for :meth:`write_parquet`.
            on: As for ``materialize``.
            **ray_arguments: Ray Data's ``num_rows_per_file``; its arguments about scheduling have no effect.

        Raises:
            DataError: The rows cannot be computed, or the column cannot be an array.

        Example::

            dataset.write_numpy("data/features", column="features")
        """
        from powertrain.data.output.writing import numpy_writer

        _, rows = writer_arguments("write_numpy", ray_arguments, False)
        self._reader.write(
            path,
            "npy",
            numpy_writer(column_names("write_numpy", column)[0]),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file if rows is None else rows,
            on=on,
        )
