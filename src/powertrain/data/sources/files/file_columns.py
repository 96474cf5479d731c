"""Columns derived from the path of a file: those of "key=value" directories, and the path itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from powertrain.data.sources.files.files import DataFile
from powertrain.errors import DataError

#: The name of the column that ``include_paths`` adds.
PATH = "path"


def with_file_columns(schema: pa.Schema, files: Sequence[DataFile], include_paths: bool) -> pa.Schema:
    """Return ``schema`` of the files' contents, followed by the columns of their paths. A column that the files have
    themselves is not added."""
    names = list(files[0].partitions)
    for file in files:
        if list(file.partitions) != names:
            raise DataError(
                f"The directories of {file.shown!r} give it the partition columns {list(file.partitions)}, those of "
                f"{files[0].shown!r} {names}. Read data that is laid out in different ways apart, and use union()."
            )
    if include_paths and PATH in (*schema.names, *names):
        raise DataError(
            f"include_paths=True would add a column {PATH!r}, and the data at {files[0].shown!r} has one of that name "
            "already. Leave include_paths out."
        )
    added = [name for name in names if name not in schema.names] + [PATH] * include_paths
    return pa.schema([*schema, *(pa.field(name, pa.string()) for name in added)])


def file_column(file: DataFile, name: str, rows: int) -> Any:
    """Return the values of a column derived from the path of ``file``."""
    value = file.partitions.get(name, file.shown)
    return pa.repeat(pa.scalar(value, pa.string()), rows)
