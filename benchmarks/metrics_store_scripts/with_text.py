"""Lines of text and pandas, as Ray keeps a trial's results: see points.py for how it is run.

SETTINGS has "format" too: "json" (as result.json) or "csv" (as progress.csv). One line a report, flushed with every
call as Ray does, durable at the end.
"""

from __future__ import annotations

import csv
import json
import sys
from typing import Any

import pandas as pd
import points
from points import POINTS, VIEWS, timed

FORMAT = json.loads(sys.argv[2])["format"]
COLUMNS = ["rank", "training_iteration", "timestamp", *points.METRICS]
PATH = points.PLACE / f"result.{FORMAT}"


def write() -> None:
    points.PLACE.mkdir()
    with PATH.open("w", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS)
        if FORMAT == "csv":
            rows.writeheader()
        for sent in points.sent():
            for values in zip(sent.rows, sent.at, sent.loss, sent.accuracy, sent.lr, strict=True):
                report = dict(zip(COLUMNS, (sent.rank, *values), strict=True))
                if FORMAT == "csv":
                    rows.writerow(report)
                else:
                    file.write(json.dumps(report) + "\n")
            file.flush()
        points.flush_to_disk(file)


def frame_of(columns: list[str]) -> pd.DataFrame:
    if FORMAT == "csv":
        return pd.read_csv(PATH, usecols=columns)
    return pd.read_json(PATH, lines=True)[columns]


def view() -> Any:
    frame = frame_of(["rank", "training_iteration", "loss"])
    frame = frame[frame["rank"] == 0]
    return points.view(frame["training_iteration"].to_numpy(), frame["loss"].to_numpy())


write_seconds, _ = timed(write)
peak = points.peak_mb()
views = [timed(view)[0] for _ in range(VIEWS)]
frame_seconds, frame = timed(lambda: frame_of(COLUMNS))
points.write_down(
    write_seconds=write_seconds,
    bytes_a_point=points.stored_bytes() / POINTS,
    frame_seconds=frame_seconds,
    view_seconds=views,
    peak_mb=peak,
    wrong=points.check(frame["training_iteration"], frame["rank"]),
)
