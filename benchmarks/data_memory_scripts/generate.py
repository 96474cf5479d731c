"""Writes a Parquet dataset of random token lists: python generate.py DIRECTORY SETTINGS

SETTINGS is a JSON object with "bytes" (of all values together) and "row_group_bytes". Prints a JSON object with "rows".
Columns: ``id``, the number of the row, and ``tokens``, 512 random numbers. Nothing of it can be compressed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TOKENS = 512
ROW_BYTES = 8 + 4 * TOKENS
GROUPS_PER_FILE = 16


def row_group(first: int, rows: int) -> pa.Table:
    """Rows ``first`` to ``first + rows``."""
    words = np.random.Generator(np.random.PCG64(first)).integers(0, 2**31, rows * TOKENS, np.int32)
    offsets = np.arange(0, rows * TOKENS + 1, TOKENS, dtype=np.int32)
    tokens = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(words, pa.int32()))
    ids = pa.array(np.arange(first, first + rows), pa.int64())
    return pa.table({"id": ids, "tokens": tokens})


def generate(directory: Path, total_bytes: int, row_group_bytes: int) -> int:
    """Writes at least ``total_bytes`` in whole row groups; returns how many rows that are."""
    directory.mkdir(parents=True)
    rows_per_group = max(1, row_group_bytes // ROW_BYTES)
    groups = -(-total_bytes // (rows_per_group * ROW_BYTES))
    for start in range(0, groups, GROUPS_PER_FILE):
        path = directory / f"part-{start // GROUPS_PER_FILE:05d}.parquet"
        first_group = row_group(start * rows_per_group, rows_per_group)
        with pq.ParquetWriter(path, first_group.schema, compression="none", use_dictionary=False) as writer:
            writer.write_table(first_group)
            for group in range(start + 1, min(start + GROUPS_PER_FILE, groups)):
                writer.write_table(row_group(group * rows_per_group, rows_per_group))
    return groups * rows_per_group


if __name__ == "__main__":
    settings = json.loads(sys.argv[2])
    print(json.dumps({"rows": generate(Path(sys.argv[1]), settings["bytes"], settings["row_group_bytes"])}))
