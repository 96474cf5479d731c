"""The limit: all points lie in memory as one Arrow table, which is written and read in one go. See points.py.

Nothing survives a crash before the end, and nothing can be read before it. The disk's own limit is taken here too:
the same bytes, written and flushed.
"""

from __future__ import annotations

import numpy as np
import points
import pyarrow as pa
from points import POINTS, VIEWS, timed


def all_points() -> pa.Table:
    columns: dict[str, list[float]] = {name: [] for name in ("rank", "row", "at", *points.METRICS)}
    for sent in points.sent():
        columns["rank"] += [sent.rank] * len(sent.rows)
        for name, values in zip(("row", "at", *points.METRICS), sent[1:], strict=True):
            columns[name] += values
    return pa.table(columns)


def write(table: pa.Table) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    points.PLACE.mkdir()
    with (points.PLACE / "table.arrow").open("wb") as file:
        with pa.ipc.new_file(file, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=1 << 16)
        points.flush_to_disk(file)


def read(columns: list[str] | None = None) -> pa.Table:
    schema = table.schema
    indices = None if columns is None else sorted(schema.get_field_index(name) for name in columns)
    options = pa.ipc.IpcReadOptions(included_fields=indices)
    with pa.OSFile(str(points.PLACE / "table.arrow")) as file:
        return pa.ipc.open_file(file, options=options).read_all()


def view() -> None:
    columns = read(["rank", "row", "loss"])
    own = columns.column("rank").to_numpy() == 0
    points.view(columns.column("row").to_numpy()[own], columns.column("loss").to_numpy()[own])


def write_raw() -> None:
    with (points.DIRECTORY / "raw").open("wb") as file:
        file.write(raw)
        points.flush_to_disk(file)


table = all_points()
write_seconds, _ = timed(lambda: write(table))
peak = points.peak_mb()
views = [timed(view)[0] for _ in range(VIEWS)]
frame_seconds, frame = timed(lambda: read().to_pandas())
raw = np.random.default_rng(1).bytes(points.stored_bytes())
raw_seconds, _ = timed(write_raw)
points.write_down(
    write_seconds=write_seconds,
    bytes_a_point=points.stored_bytes() / POINTS,
    frame_seconds=frame_seconds,
    view_seconds=views,
    peak_mb=peak,
    wrong=points.check(frame["row"], frame["rank"]),
    raw_megabytes_a_second=len(raw) / raw_seconds / 1e6,
)
