"""Rows written in the formats and databases of other tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from powertrain.data.arguments import column_names, shown
from powertrain.data.methods.writing import WritingMethods
from powertrain.data.options.scheduling import take_ray_arguments, writer_arguments
from powertrain.errors import DataError


class FormatWritingMethods(WritingMethods):
    """The methods of :class:`powertrain.data.Dataset` that write other formats."""

    __slots__ = ()

    def write_tfrecords(
        self,
        path: str,
        *,
        filesystem: Any = None,
        min_rows_per_file: int | None = None,
        mode: str = "append",
        on: str | None = None,
        **ray_arguments: Any,
    ) -> None:
        """Write all rows as ``tf.train.Example`` messages, in TFRecord files of the directory (or bucket) ``path``.

        Numbers become lists of int64 or float32, text and bytes lists of bytes. A null is left out. Arrays of several
        dimensions are serialized as ``tf.io.serialize_tensor`` does.

        Args:
            path: The directory, or an address such as "s3://bucket/data".
            filesystem: A pyarrow or fsspec file system that ``path`` belongs to.
            min_rows_per_file: The least rows of a file.
            mode: As for :meth:`write_parquet`.
            on: As for ``materialize``.
            **ray_arguments: Ray Data's ``num_rows_per_file``; its arguments about scheduling have no effect.

        Raises:
            DataError: The rows cannot be computed, or a column has no form in these files.

        Example::

            dataset.write_tfrecords("data/records")
        """
        from powertrain.data.output.formats.tfrecords import write_tfrecords

        _, rows = writer_arguments("write_tfrecords", ray_arguments, False)
        self._reader.write(
            path,
            "tfrecords",
            write_tfrecords,
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file if rows is None else rows,
            on=on,
        )

    def write_webdataset(
        self,
        path: str,
        *,
        encoder: bool | str | Callable[[dict[str, Any]], dict[str, Any]] | list[Any] | None = True,
        filesystem: Any = None,
        min_rows_per_file: int | None = None,
        mode: str = "append",
        on: str | None = None,
        **ray_arguments: Any,
    ) -> None:
        """Write all rows as samples of tar files, in the directory (or bucket) ``path``: a member for each column.

        The column "__key__" names a sample; without it a name is made. Columns are encoded by their endings: "txt",
        "cls", "json", "npy", "mp", "pt", "pkl", and those of images.

        Args:
            path: The directory, or an address such as "s3://bucket/data".
            encoder: True encodes by ending, None expects bytes or text; a function that takes and returns a sample
                encodes it, and a list of these is applied in order.
            filesystem: A pyarrow or fsspec file system that ``path`` belongs to.
            min_rows_per_file: The least rows of a file.
            mode: As for :meth:`write_parquet`.
            on: As for ``materialize``.
            **ray_arguments: Ray Data's ``num_rows_per_file``; its arguments about scheduling have no effect.

        Raises:
            DataError: The rows cannot be computed, or a value cannot be encoded.

        Example::

            dataset.rename_columns({"image": "png", "label": "cls"}).write_webdataset("data/shards")
        """
        from powertrain.data.output.formats.webdataset import webdataset_writer

        steps = [] if encoder is None else encoder if isinstance(encoder, list) else [encoder]
        if not all(callable(step) or isinstance(step, (bool, str)) for step in steps):
            raise DataError(
                f"write_webdataset(encoder={shown(encoder)}) is not valid. Give True, None, a function, or a list of "
                "these."
            )
        _, rows = writer_arguments("write_webdataset", ray_arguments, False)
        self._reader.write(
            path,
            "tar",
            webdataset_writer([step if callable(step) else None for step in steps]),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file if rows is None else rows,
            on=on,
            has_schema=False,
        )

    def write_images(
        self,
        path: str,
        column: str,
        file_format: str = "png",
        *,
        filesystem: Any = None,
        mode: str = "append",
        on: str | None = None,
        **ray_arguments: Any,
    ) -> None:
        """Write one column as image files, one for each row, in the directory (or bucket) ``path``.

        The names sort in the order of the rows.

        Args:
            path: The directory, or an address such as "s3://bucket/data".
            column: The column: uint8 arrays of (height, width) or (height, width, channels).
            file_format: A format of Pillow, such as "png" or "jpeg".
            filesystem: A pyarrow or fsspec file system that ``path`` belongs to.
            mode: As for :meth:`write_parquet`.
            on: As for ``materialize``.
            **ray_arguments: Ray Data's arguments about scheduling, without effect.

        Raises:
            DataError: The rows cannot be computed, or a value is not an image.

        Example::

            dataset.write_images("data/thumbnails", column="image")
        """
        from powertrain.data.output.formats.images import image_writer

        if not isinstance(file_format, str) or not file_format.isalnum():
            raise DataError(
                f"write_images(file_format={shown(file_format)}) is not a format. Give 'png' or 'jpeg'."
            )
        take_ray_arguments("write_images", ray_arguments)
        self._reader.write(
            path,
            file_format.lower(),
            image_writer(column_names("write_images", column)[0], file_format),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=None,
            on=on,
            rows_are_files=True,
        )

    def write_orc(
        self,
        path: str,
        *,
        filesystem: Any = None,
        min_rows_per_file: int | None = None,
        mode: str = "append",
        on: str | None = None,
        **arrow_orc_args: Any,
    ) -> None:
        """Write all rows to ORC files, in the directory (or bucket) ``path``.

        Args:
            path: The directory, or an address such as "s3://bucket/data".
            filesystem: A pyarrow or fsspec file system that ``path`` belongs to.
            min_rows_per_file: The least rows of a file.
            mode: As for :meth:`write_parquet`.
            on: As for ``materialize``.
            **arrow_orc_args: Those of ``pyarrow.orc.write_table``, and Ray Data's ``num_rows_per_file``; its arguments
                about scheduling have no effect.

        Raises:
            DataError: The rows cannot be computed, or a type has no form in these files.

        Example::

            dataset.write_orc("data/table")
        """
        from powertrain.data.output.formats.orc import orc_writer

        arrow_orc_args, rows = writer_arguments("write_orc", arrow_orc_args, True)
        self._reader.write(
            path,
            "orc",
            orc_writer(arrow_orc_args),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file if rows is None else rows,
            on=on,
        )

    def write_sql(
        self,
        sql: str,
        connection_factory: Callable[[], Any],
        ray_remote_args: dict[str, Any] | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Run a statement for each row, with the values of its columns as parameters, in one transaction.

        Args:
            sql: The statement, such as ``"INSERT INTO t VALUES (?, ?)"`` in the form of the driver.
            connection_factory: A function without arguments that returns a connection of a driver after PEP 249.
            ray_remote_args: Without effect.
            concurrency: Without effect.

        Raises:
            DataError: The rows cannot be computed, or the database refuses them; then none is written.

        Example::

            dataset.write_sql("INSERT INTO scores VALUES (?, ?)", lambda: sqlite3.connect("scores.db"))
        """
        from contextlib import closing

        from powertrain.data.output.formats.database import write_sql

        take_ray_arguments("write_sql", {"ray_remote_args": ray_remote_args, "concurrency": concurrency})
        if not isinstance(sql, str) or not sql.strip():
            raise DataError(f"write_sql({shown(sql)}) is not a statement. Give an INSERT statement, as str.")
        if not callable(connection_factory):
            raise DataError(
                f"write_sql(): connection_factory={shown(connection_factory)} cannot be called. Give a function that "
                "connects: lambda: sqlite3.connect(path)."
            )
        with closing(self._reader.tables(None)) as tables:
            write_sql(tables, sql, connection_factory)
