"""Upper limits for loaders on this machine: python limits.py REQUEST

Floats and tokens: their bytes copied once, by one thread, from memory to memory. Images: Pillow on two threads. Text:
one str made of each row's bytes.
"""

from __future__ import annotations

import io
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measuring import Loading, Request
from PIL import Image
from schemas import IMAGES, TEXT

THREADS = 2
BEYOND_CACHES = 256 * 2**20


def copying(table: pa.Table) -> Callable[[], None]:
    """Copy as many bytes as the table has, each time others: a copy of what caches hold would be no limit."""
    times = -(-BEYOND_CACHES // table.nbytes)
    source = np.ones((times, table.nbytes), np.uint8)
    target = np.zeros_like(source)
    turns = itertools.cycle(range(times))

    def copy() -> None:
        turn = next(turns)
        np.copyto(target[turn], source[turn])

    return copy


def decoding(table: pa.Table) -> Callable[[], None]:
    """Decode all images."""
    encoded = table["image"].to_pylist()
    pool = ThreadPoolExecutor(THREADS)

    def decode(image: bytes) -> None:
        np.asarray(Image.open(io.BytesIO(image)))

    def decode_all() -> None:
        for _ in pool.map(decode, encoded, chunksize=16):
            pass

    return decode_all


def making_text(table: pa.Table) -> Callable[[], None]:
    """Make a str of each row."""
    column: Any = table["text"].combine_chunks()
    _, positions, letters = column.buffers()
    offsets = np.frombuffer(positions, np.int32)[: len(column) + 1].tolist()
    data = memoryview(letters)

    def make_all() -> None:
        for start, end in itertools.pairwise(offsets):
            str(data[start:end], "utf-8")

    return make_all


def main() -> None:
    request = Request.from_command_line()
    table = pq.read_table(request.directory)
    work = {IMAGES: decoding, TEXT: making_text}.get(request.schema, copying)(table)
    seconds = []
    for _ in range(request.epochs):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    loading = Loading(request.rows, 0.0, tuple(seconds), lost=0, twice=0)
    Path(request.output).write_text(json.dumps(asdict(loading)))


if __name__ == "__main__":
    main()
