"""Common parts of these scripts: the points, the check of the points read back, and the output.

A point is one report of one rank: its row, its time and three metrics. A script is run as
``python SCRIPT DIRECTORY SETTINGS``; SETTINGS is a JSON object with "points" and "ranks". It writes the points into
DIRECTORY/points, reads them back, and writes its measurements to DIRECTORY/measured.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

#: Points that one rank sends together.
TOGETHER = 64
METRICS = ("loss", "accuracy", "lr")
PIXELS, VIEWS = 1000, 5
DIRECTORY = Path(sys.argv[1])
PLACE = DIRECTORY / "points"
_settings = json.loads(sys.argv[2])
POINTS, RANKS = _settings["points"], _settings["ranks"]


class Sent(NamedTuple):
    """Points that one rank sends together, in columns of Python numbers."""

    rank: int
    rows: list[int]
    at: list[float]
    loss: list[float]
    accuracy: list[float]
    lr: list[float]


def sent() -> Iterator[Sent]:
    """Yield the points in order of arrival: noisy losses, as in training, so little can be compressed."""
    random = np.random.default_rng(1)
    rows_of_rank = POINTS // RANKS
    began = time.time()
    for start in range(0, rows_of_rank, TOGETHER):
        rows = np.arange(start + 1, min(start + TOGETHER, rows_of_rank) + 1)
        for rank in range(RANKS):
            at = began + rows * 0.01 + random.random(len(rows)) * 0.001
            loss = 4.0 / np.sqrt(rows) + 0.1 * random.standard_normal(len(rows))
            accuracy = np.clip(1.0 - loss / 4.0, 0.0, 1.0)
            lr = 0.1 * 0.999 ** (rows // 1000)
            yield Sent(rank, *(column.tolist() for column in (rows, at, loss, accuracy, lr)))


def check(rows: Any, ranks: Any) -> int:
    """Return the number of missing and surplus points."""
    keys = np.asarray(rows, np.int64) * RANKS + np.asarray(ranks, np.int64)
    return abs(len(keys) - POINTS) + len(keys) - len(np.unique(keys))


def check_values(frame: Any) -> int:
    """Return the number of metrics whose values differ from those sent, which are generated again."""
    sent_bits = dict.fromkeys(METRICS, 0)
    for some in sent():
        for name in METRICS:
            sent_bits[name] ^= _bits(getattr(some, name))
    return sum(sent_bits[name] != _bits(frame[name]) for name in METRICS)


def _bits(values: Any) -> int:
    """Return all values combined into one number, independent of their order."""
    return int(np.bitwise_xor.reduce(np.asarray(values, np.float64).view(np.int64)))


def view(rows: Any, values: Any) -> tuple[Any, Any]:
    """Return the smallest and largest value of each pixel, of a curve in memory."""
    pixel = (rows - rows[0]) * PIXELS // (rows[-1] - rows[0] + 1)
    starts = np.flatnonzero(np.diff(pixel, prepend=-1))
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds and the result of a call."""
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def flush_to_disk(file: Any) -> None:
    """Wait until the file is durable: Powertrain's is when ``close`` returns, and the others must be as well."""
    file.flush()
    os.fsync(file.fileno())


def peak_mb() -> float:
    """Return the peak memory of this process since its start."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def stored_bytes() -> int:
    return sum(path.stat().st_size for path in PLACE.rglob("*") if path.is_file())


def write_down(**measured: Any) -> None:
    (DIRECTORY / "measured.json").write_text(json.dumps(measured))
