"""Resources of ranks over time, in pixels. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def resources(samples: Mapping[int, Mapping[int, NDArray[np.void]]], window: Window) -> dict[str, Any]:
    """Return a chart for each resource that was used.

    Up to :data:`~powertrain.views.metrics.MOST_LINES` ranks have a line each. Of more, charts have the lowest, the
    median and the highest value of all ranks, and the line of the rank with the highest mean.
    """
    ranks = sorted({rank for of_attempt in samples.values() for rank in of_attempt})
    parts = {rank: _of_rank(samples, rank) for rank in ranks}
    charts = []
    for field, (title, unit, limit) in CHARTS.items():
        table = (
            np.stack([_means(parts[rank], field, window) for rank in ranks]) if ranks else np.zeros((0, 0))
        )
        if not np.any(table > 0):
            continue
        table = table * 100.0 if field in _SHARES else table
        most = max((float(np.nanmax(parts[rank][limit])) for rank in ranks), default=0.0) if limit else 0.0
        charts.append({"field": field, "title": title, "unit": unit, "limit": most, **_lines(table, ranks)})
    return {"begin": window.begin, "end": window.end, "columns": window.columns, "charts": charts}


def _of_rank(samples: Mapping[int, Mapping[int, NDArray[np.void]]], rank: int) -> NDArray[np.void]:
    found: NDArray[np.void] = np.concatenate(
        [samples[attempt][rank] for attempt in sorted(samples) if rank in samples[attempt]]
    )
    return found


def _means(part: NDArray[np.void], field: str, window: Window) -> Floats:
    """Return the mean of a field in each pixel; NaN in pixels without a sample."""
    values = np.asarray(part[field], np.float64)
    width = (window.end - window.begin) / window.columns
    known = np.isfinite(values) & (part["time"] >= window.begin) & (part["time"] <= window.end)
    column = np.minimum(((part["time"][known] - window.begin) / width).astype(int), window.columns - 1)
    count = np.bincount(column, minlength=window.columns)
    total = np.bincount(column, values[known], window.columns)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), np.nan), np.float64)


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
