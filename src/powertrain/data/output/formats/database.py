"""Rows into a table of a database, in one transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from powertrain.data.sources.formats.sql import connected

#: Rows of one call of the driver.
_ROWS_AT_A_TIME = 1024


def write_sql(tables: Iterable[pa.Table], sql: str, connection_factory: Callable[[], Any]) -> None:
    """Run a statement for each row, with the row's values as parameters: all of them or, after a failure, none."""
    with connected("write_sql", sql, connection_factory) as cursor:
        for table in tables:
            for batch in table.to_batches(max_chunksize=_ROWS_AT_A_TIME):
                columns = [column.to_pylist() for column in batch.columns]
                rows = list(zip(*columns, strict=True))
                if rows:
                    cursor.executemany(sql, rows)
