"""Rows as image files."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from powertrain.data.arguments import shortened
from powertrain.data.output.formats.webdataset import encoded_image
from powertrain.data.output.writing import WriteTable
from powertrain.data.rows.formats import from_arrow, row_dicts
from powertrain.data.sources.plain import checked_columns
from powertrain.errors import DataError


def image_writer(column: str, form: str) -> WriteTable:
    """Return a writer of tables with one row, whose pixels are in ``column``."""

    def write(table: pa.Table, path: str) -> None:
        checked_columns([column], table.column_names, "the data")
        (row,) = row_dicts(from_arrow(table.select([column]), np.arange(1)))
        try:
            content = encoded_image(row[column], form)
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise DataError(
                f"A value of the column {column!r} cannot be written as an image of the format {form!r} "
                f"({type(error).__name__}: {shortened(str(error), 200)}). Write uint8 arrays of (height, width) or "
                "(height, width, channels), in a format that Pillow knows."
            ) from error
        with open(path, "wb") as file:
            file.write(content)

    return write
