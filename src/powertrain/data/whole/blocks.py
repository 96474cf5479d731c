"""Rows cut into blocks, by their values alone: the same rows make the same blocks on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from powertrain.data.output.materialized import BLOCK_BYTES
from powertrain.data.plan.order import MOST_SHUFFLED

_pt = pa.types
#: First rows whose size determines the number of rows of a block.
_SAMPLED_ROWS = 256


def value_bytes(values: Any) -> int:
    """Return the bytes of the values of an Arrow array, without the buffers whose size depends on how it was made."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        return value_bytes(values.storage)
    if _pt.is_string(kind) or _pt.is_large_string(kind) or _pt.is_binary(kind) or _pt.is_large_binary(kind):
        return 4 * len(values) + int(pc.sum(pc.binary_length(values)).as_py() or 0)
    if _pt.is_list(kind) or _pt.is_large_list(kind) or _pt.is_fixed_size_list(kind):
        return 4 * len(values) + value_bytes(values.flatten())
    if _pt.is_struct(kind):
        return sum(value_bytes(each) for each in values.flatten())
    if _pt.is_primitive(kind) or _pt.is_decimal(kind):
        return int(-(-kind.bit_width * len(values) // 8))
    return int(values.nbytes)


def rows_of_block(table: pa.Table) -> int:
    """Return the number of rows of a block, given the first rows."""
    sample = table.slice(0, _SAMPLED_ROWS)
    size = sum(value_bytes(chunk) for column in sample.columns for chunk in column.chunks)
    rows = BLOCK_BYTES * sample.num_rows // max(size, 1)
    return max(1, min(rows, MOST_SHUFFLED))


def cut_evenly(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the same rows in blocks of equally many."""
    waiting: list[pa.Table] = []
    rows = 0
    size = 0
    for table in tables:
        if not size:
            if table.num_rows + rows < _SAMPLED_ROWS:  # too few to tell
                waiting, rows = [*waiting, table], rows + table.num_rows
                continue
            size = rows_of_block(pa.concat_tables([*waiting, table]))
        waiting, rows = [*waiting, table], rows + table.num_rows
        while rows >= size:
            whole = pa.concat_tables(waiting)
            yield whole.slice(0, size)
            waiting, rows = [whole.slice(size)], rows - size
    if rows:
        yield from _at_most(pa.concat_tables(waiting), size)


def _at_most(table: pa.Table, size: int) -> Iterator[pa.Table]:
    size = size or rows_of_block(table)
    for start in range(0, table.num_rows, size):
        yield table.slice(start, size)


def cut_at_changes(tables: Iterable[pa.Table], columns: Sequence[str], *, each: bool) -> Iterator[pa.Table]:
    """Yield the same rows in blocks that end where the values of ``columns`` change: at each change, or at the last
    one of the rows that fill a block."""
    waiting: list[pa.Table] = []
    rows, size = 0, 0
    for table in tables:
        if not size:
            size = 1 if each else rows_of_block(table)
        before = waiting[-1].slice(waiting[-1].num_rows - 1) if waiting else None
        ends = changes(table, columns, before)
        done = 0
        for end in ends.tolist():
            if each or rows + (end - done) >= size:
                if rows + (end - done):
                    yield pa.concat_tables([*waiting, table.slice(done, end - done)])
                waiting, rows, done = [], 0, end
        if done < table.num_rows:
            waiting.append(table.slice(done))
            rows += table.num_rows - done
    if rows:
        yield pa.concat_tables(waiting)


def changes(table: pa.Table, columns: Sequence[str], before: pa.Table | None = None) -> npt.NDArray[np.int64]:
    """Return the rows whose values differ from those of the row before them; row 0 only if ``before`` is given.

    Null equals null and NaN equals NaN.
    """
    rows = table if before is None else pa.concat_tables([before, table])
    if rows.num_rows < 2:
        return np.empty(0, np.int64)
    differs = np.zeros(rows.num_rows - 1, bool)
    for name in columns:
        column: Any = rows.column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks)
        one, other = column.slice(0, len(column) - 1), column.slice(1)
        unequal = pc.fill_null(pc.not_equal(one, other), True).to_numpy(zero_copy_only=False)
        if _pt.is_floating(column.type):
            both = pc.fill_null(pc.and_(pc.is_nan(one), pc.is_nan(other)), False)
            unequal = unequal & ~both.to_numpy(zero_copy_only=False)
        if column.null_count:
            nulls = pc.and_(pc.is_null(one), pc.is_null(other)).to_numpy(zero_copy_only=False)
            unequal = unequal & ~nulls
        differs |= unequal
    return np.flatnonzero(differs) + (0 if before is not None else 1)
