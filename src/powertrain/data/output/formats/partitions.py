"""Rows in directories by the values of some columns: "year=2026/month=1". Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from powertrain.data.sources.plain import checked_columns
from powertrain.errors import DataError

_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


def partitions(table: pa.Table, columns: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """Yield (directory, its rows without ``columns``) for each combination of values, in the order of first rows.

    Without columns, yields all rows for the directory "".
    """
    if not columns:
        yield "", table
        return
    checked_columns(columns, table.column_names, "the data")
    if len(columns) == table.num_columns:
        raise DataError(
            f"partition_cols={list(columns)} are all columns of the data, so that nothing is left for the files. Leave "
            "at least one column out."
        )
    for name in columns:
        kind = table.schema.field(name).type
        if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType) or pa.types.is_binary(kind):
            raise DataError(
                f"The column {name!r} of partition_cols has the type {kind}, and directories are named after plain "
                "values. Choose columns of text or numbers."
            )
    names = _directories(table, columns)
    if not table.num_rows:
        return
    encoded = names.dictionary_encode().combine_chunks()
    codes = encoded.indices.to_numpy()
    sorted_rows = table.drop_columns(list(columns)).take(np.argsort(codes, kind="stable"))
    ends = np.cumsum(np.bincount(codes))
    for directory, end, rows in zip(encoded.dictionary.to_pylist(), ends, np.bincount(codes), strict=True):
        yield directory, sorted_rows.slice(int(end - rows), int(rows))


def _directories(table: pa.Table, columns: Sequence[str]) -> Any:
    """Return the directory of each row."""
    values = [table.column(name).to_pylist() for name in columns]
    made = [
        "/".join(f"{_key(name)}={_text(value)}" for name, value in zip(columns, row, strict=True))
        for row in zip(*values, strict=True)
    ]
    return pa.chunked_array([pa.array(made, pa.string())])


def _key(name: str) -> str:
    quoted = quote(name, safe=" ")
    # A directory whose name begins with a dot would be hidden.
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted


def _text(value: Any) -> str:
    return _HIVE_NULL if value is None else quote(str(value), safe=" ")


def is_partitioned(name: str) -> bool:
    """Return whether a file lies in directories of this form, or in none."""
    return all("=" in directory for directory in name.split("/")[:-1])
