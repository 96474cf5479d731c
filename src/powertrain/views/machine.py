"""Speed and resources of ranks over time, in pixels. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from powertrain.views.compact import compact
from powertrain.views.metrics import MOST_LINES
from powertrain.views.timeline import LONGEST_S, Window, middle_of

Floats = NDArray[np.float64]
#: Fields of samples: the title and the unit of their chart, and the field with their maximum.
CHARTS = {
    "gpu_busy": ("GPU busy", "%", ""),
    "gpu_memory": ("GPU memory", "MiB", "gpu_memory_total"),
    "gpu_power": ("GPU power", "W", ""),
    "cpu": ("CPU of the rank", "cores", ""),
    "host_cpu": ("CPU of the host", "cores", "host_cores"),
    "rss": ("Memory of the rank", "MiB", ""),
    "ram_used": ("Memory of the host", "MiB", "ram_total"),
    "disk_read": ("Disk read", "MiB/s", ""),
    "disk_write": ("Disk write", "MiB/s", ""),
    "net_in": ("Network in", "MiB/s", ""),
    "net_out": ("Network out", "MiB/s", ""),
}
#: Rates of the steps: the title and the unit of their chart.
RATES = {"steps": ("Steps", "steps/s"), "samples": ("Data", "samples/s"), "tokens": ("Tokens", "tokens/s")}
#: Shares, which are shown as per cent.
_SHARES = ("gpu_busy",)


def sample_window(samples: Mapping[int, Mapping[int, NDArray[np.void]]], columns: int) -> Window | None:
    """Return the window with all samples; None without any."""
    times = [part["time"] for ranks in samples.values() for part in ranks.values() if len(part)]
    known = [part[np.isfinite(part)] for part in times]
    known = [part for part in known if len(part)]
    if not known:
        return None
    every = np.concatenate(known)
    near = every[np.abs(every - middle_of(every)) < LONGEST_S]  # a clock may have been set
    begin, end = float(near.min()), float(near.max())
    return Window(begin, max(end, begin + 1e-3), columns)


def resources(
    samples: Mapping[int, Mapping[int, NDArray[np.void]]],
    window: Window,
    steps: Mapping[int, Mapping[int, NDArray[np.void]]] | None = None,
) -> dict[str, Any]:
    """Return a chart for each rate of the steps that is known, and for each resource that was used.

    Up to :data:`~powertrain.views.metrics.MOST_LINES` ranks have a line each. Of more, charts have the lowest, the
    median and the highest value of all ranks, and the line of the rank with the highest mean.
    """
    charts = []
    ranks, every, owner = _joined(steps or {})
    if ranks:
        pixels = _Pixels.of(every["start"], owner, len(ranks), window)
        seconds = np.maximum(np.nan_to_num(every["phases"].astype(np.float64), posinf=0.0), 0.0).sum(axis=1)
        for field, (title, unit) in RATES.items():
            counts = np.ones(len(every)) if field == "steps" else np.asarray(every[field], np.float64)
            charts += _chart(
                pixels.ratios(counts, seconds), ranks, field=field, title=title, unit=unit, limit=0.0
            )
    ranks, every, owner = _joined(samples)
    if ranks:
        pixels = _Pixels.of(every["time"], owner, len(ranks), window)
        for field, (title, unit, limit) in CHARTS.items():
            values = np.asarray(every[field], np.float64) * (100.0 if field in _SHARES else 1.0)
            means = pixels.ratios(values, np.ones(len(values)))
            most = float(np.nanmax(every[limit])) if limit else 0.0
            charts += _chart(means, ranks, field=field, title=title, unit=unit, limit=most)
    return {"begin": window.begin, "end": window.end, "columns": window.columns, "charts": charts}


def _chart(table: Floats, ranks: Sequence[int], **words: Any) -> list[dict[str, Any]]:
    """Return the chart of these pixels, a row for each rank; none where all are zero or unknown."""
    return [{**words, **_lines(table, ranks)}] if np.any(table > 0) else []


def _joined(
    tables: Mapping[int, Mapping[int, NDArray[np.void]]],
) -> tuple[list[int], NDArray[np.void], NDArray[np.int64]]:
    """Return the ranks, the records of all of them over all attempts, and the place of each record's rank."""
    ranks = sorted({rank for of_attempt in tables.values() for rank in of_attempt})
    place = {rank: number for number, rank in enumerate(ranks)}
    parts = [(place[rank], part) for of_attempt in tables.values() for rank, part in of_attempt.items()]
    if not parts:
        return [], np.zeros(0, np.void), np.zeros(0, np.int64)
    owner = np.repeat([number for number, _ in parts], [len(part) for _, part in parts])
    every = np.empty(len(owner), parts[0][1].dtype)
    start = 0
    for _, part in parts:  # not numpy's concatenate, which compares the fields of each
        every[start : start + len(part)] = part
        start += len(part)
    return ranks, every, owner


@dataclass(frozen=True)
class _Pixels:
    """The pixel of each record in a table with a row for each rank."""

    cells: NDArray[np.int64]
    #: Whether a record is within the window.
    is_inside: NDArray[np.bool_]
    shape: tuple[int, int]

    @classmethod
    def of(cls, times: NDArray[Any], owner: NDArray[np.int64], rows: int, window: Window) -> _Pixels:
        inside = (times >= window.begin) & (times <= window.end)
        width = (window.end - window.begin) / window.columns
        columns = ((np.where(inside, times, window.begin) - window.begin) / width).astype(np.int64)
        cells = owner * window.columns + np.minimum(columns, window.columns - 1)
        return cls(cells, inside, (rows, window.columns))

    def ratios(self, values: Floats, weights: Floats) -> Floats:
        """Return the sum of values by the sum of weights in each pixel; NaN where there are none."""
        known = self.is_inside & np.isfinite(values)
        cells, size = self.cells[known], self.shape[0] * self.shape[1]
        weight = np.bincount(cells, weights[known], size)
        total = np.bincount(cells, values[known], size)
        found = np.where(weight > 0, total / np.where(weight > 0, weight, 1.0), np.nan)
        return np.asarray(found.reshape(self.shape), np.float64)


def _lines(table: Floats, ranks: Sequence[int]) -> dict[str, Any]:
    if len(ranks) <= MOST_LINES:
        return {"lines": [{"rank": r, "values": compact(row)} for r, row in zip(ranks, table, strict=True)]}
    is_known = np.isfinite(table).any(axis=0)
    columns = table[:, is_known]
    band = np.full((3, table.shape[1]), np.nan)
    band[:, is_known] = [np.nanmin(columns, 0), np.nanmedian(columns, 0), np.nanmax(columns, 0)]
    top = int((np.nansum(table, axis=1) / np.maximum(np.isfinite(table).sum(axis=1), 1)).argmax())
    return {
        "lines": [{"rank": ranks[top], "values": compact(table[top])}],
        "band": {"low": compact(band[0]), "middle": compact(band[1]), "high": compact(band[2])},
    }
