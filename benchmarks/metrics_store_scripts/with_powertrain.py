"""Powertrain's store of metrics: see points.py for how it is run."""

from __future__ import annotations

import numpy as np
import points
import pyarrow  # noqa: F401 - here, and not when the first points are written
from points import POINTS, VIEWS, timed

from powertrain.run.lifecycle import RunState
from powertrain.run.metrics.curves import Curve, curve
from powertrain.run.metrics.points import PointRecord
from powertrain.run.metrics.reading import dataframe
from powertrain.run.metrics.store import MetricsStore
from powertrain.storage import open_storage

COMMIT_EVERY = 131_072
storage = open_storage(points.PLACE)


def write() -> None:
    """Write as the controller does: points that a rank has sent are added in one call, and a checkpoint (here at a
    fixed interval) waits until those before it survive the process. ``close`` makes all of them durable, in columns."""
    store = MetricsStore(storage, 1)
    for number, sent in enumerate(points.sent(), 1):
        columns = zip(sent.rows, sent.at, sent.loss, sent.accuracy, sent.lr, strict=True)
        store.add(
            [
                PointRecord(sent.rank, 0, row, at, False, {"loss": loss, "accuracy": accuracy, "lr": lr})
                for row, at, loss, accuracy, lr in columns
            ]
        )
        if number % (COMMIT_EVERY // points.TOGETHER) == 0:
            store.wait_spooled()
    store.close()


write_seconds, _ = timed(write)
peak = points.peak_mb()
views = [timed(lambda: curve(storage, RunState(), "loss", pixels=points.PIXELS)) for _ in range(VIEWS)]
frame_seconds, frame = timed(lambda: dataframe(storage, RunState()))
line = frame[frame["rank"] == 0]


def wrong_pixels(found: Curve) -> int:
    """Return the number of wrong pixels of rank 0's loss, and of the points they omit."""
    rows, losses = line["training_iteration"].to_numpy(), line["loss"].to_numpy()
    starts = np.searchsorted(rows, found.rows)
    low, high = np.minimum.reduceat(losses, starts), np.maximum.reduceat(losses, starts)
    wrong = int(((found.low != low) | (found.high != high)).sum())
    return wrong + abs(found.points - len(losses)) + max(0, len(found.rows) - points.PIXELS)


points.write_down(
    write_seconds=write_seconds,
    bytes_a_point=points.stored_bytes() / POINTS,
    frame_seconds=frame_seconds,
    view_seconds=[seconds for seconds, _ in views],
    peak_mb=peak,
    wrong=points.check(frame["training_iteration"], frame["rank"])
    + points.check_values(frame)
    + sum(wrong_pixels(found) for _, found in views),
)
