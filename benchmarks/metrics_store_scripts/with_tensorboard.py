"""TensorBoard's event files, written by tensorboardX: see points.py for how it is run.

One file a rank, one event a metric of a report, flushed at the end. tensorboardX brings no reader, so events are
parsed here with its own message classes: a record is a length, its checksum, an event, its checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import points
from points import POINTS, VIEWS, timed
from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event

_HEAD = struct.Struct("<Q")


def write() -> None:
    """Write as its documentation shows: one ``add_scalar`` per metric."""
    writers = [SummaryWriter(str(points.PLACE / f"rank-{rank}")) for rank in range(points.RANKS)]
    for sent in points.sent():
        writer = writers[sent.rank]
        for row, at, *values in zip(sent.rows, sent.at, sent.loss, sent.accuracy, sent.lr, strict=True):
            for name, value in zip(points.METRICS, values, strict=True):
                writer.add_scalar(name, value, row, at)
    for writer in writers:
        writer.close()


def events(rank: int) -> Iterator[Any]:
    (path,) = Path(points.PLACE, f"rank-{rank}").iterdir()
    data, offset = path.read_bytes(), 0
    while offset < len(data):
        (length,) = _HEAD.unpack_from(data, offset)
        yield Event.FromString(data[offset + 12 : offset + 12 + length])
        offset += length + 16


def lines(rank: int, names: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    """Return rows and values of some metrics, in one pass through the rank's file."""
    found: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in names}
    for event in events(rank):
        for value in event.summary.value:
            if value.tag in found:
                rows, values = found[value.tag]
                rows.append(event.step)
                values.append(value.simple_value)
    return {name: (np.array(rows), np.array(values)) for name, (rows, values) in found.items()}


def frame_of_all() -> pd.DataFrame:
    frames = []
    for rank in range(points.RANKS):
        columns = {
            name: pd.Series(values, rows) for name, (rows, values) in lines(rank, points.METRICS).items()
        }
        frames.append(pd.DataFrame(columns).rename_axis("row").reset_index().assign(rank=rank))
    return pd.concat(frames, ignore_index=True)


write_seconds, _ = timed(write)
peak = points.peak_mb()
views = [timed(lambda: points.view(*lines(0, ("loss",))["loss"]))[0] for _ in range(VIEWS)]
frame_seconds, frame = timed(frame_of_all)
points.write_down(
    write_seconds=write_seconds,
    bytes_a_point=points.stored_bytes() / POINTS,
    frame_seconds=frame_seconds,
    view_seconds=views,
    peak_mb=peak,
    wrong=points.check(frame["row"], frame["rank"]),
)
