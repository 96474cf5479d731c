"""Numbers, durations, metrics and lists of ranks as text. Pure."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from powertrain.run import lifecycle
from powertrain.run.health.hang_report import stretches
from powertrain.text.printable import escape_controls

_METRICS_SHOWN = 12

RANK_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
STATE_COLOURS = {
    lifecycle.TRAINING: "green",
    lifecycle.FINISHED: "green",
    lifecycle.FAILED: "red",
    lifecycle.RECOVERING: "yellow",
    lifecycle.STOPPING: "yellow",
    lifecycle.STOPPED: "yellow",
    lifecycle.PREEMPTED: "yellow",
}


def number(value: float) -> str:
    """Return at most four significant digits; whole numbers below 100,000 unchanged; 1.2 k, 3.4 M, 5.6 G above."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int) and abs(value) < 100_000:
        return str(value)
    if not math.isfinite(value):
        return str(float(value))
    size = abs(value)
    for limit, unit in ((9.9995e14, ""), (9.9995e11, "T"), (9.9995e8, "G"), (9.9995e5, "M"), (9999.5, "k")):
        if size >= limit:
            scale = {"": 1.0, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}[unit]
            return f"{value / scale:.4g} {unit}".rstrip()
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """3 ms, 0.45 s, 12.3 s, 3 min 05 s, 2 h 03 min, 3 d 4 h."""
    seconds = max(0.0, seconds)
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def clock(seconds: float) -> str:
    """A duration that is watched while it grows: in whole seconds, so that it does not flicker."""
    return f"{max(0, int(seconds))} s" if seconds < 60 else duration(int(seconds))


def data_size(count: int) -> str:
    """512 B, 1.2 kB, 3.4 MB, 5.6 GB."""
    for limit, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count} B"


def pace(rows_per_second: float) -> str:
    """A rate in rows a second, or the time one row takes where that is longer than ten seconds."""
    if rows_per_second <= 0:
        return ""
    if rows_per_second < 0.1:
        return f"{duration(1 / rows_per_second)} per row"
    if rows_per_second >= 1000:
        return f"{rows_per_second / 1000:.3g} k rows/s"
    return f"{rows_per_second:.3g} rows/s"


def rank_list(ranks: Iterable[int]) -> str:
    """Names ranks: "rank 1"; "ranks 0, 2, 3"; long stretches folded: "ranks 0-5, 9"."""
    parts: list[str] = []
    for stretch in stretches(ranks):
        parts += [f"{stretch[0]}-{stretch[-1]}"] if len(stretch) > 3 else [str(rank) for rank in stretch]
    if len(parts) == 1 and parts[0].isdigit():
        return f"rank {parts[0]}"
    shown, hidden = parts[:10], len(parts) - 10
    return "ranks " + ", ".join(shown) + (f" and {hidden} more" if hidden > 0 else "")


def counted(count: int, noun: str) -> str:
    """A number of things: "1 worker", "2 workers"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def one_line(text: str, limit: int) -> str:
    """Return ``text`` in one line without control characters, cut to ``limit`` characters."""
    flat = escape_controls(" ".join(text.split()))
    flat = flat if flat.isprintable() else "".join(c if c.isprintable() else "?" for c in flat)
    return flat if len(flat) <= limit else flat[: limit - 3] + "..."


def metric_value(value: Any) -> str:
    """A reported value in a few characters."""
    if isinstance(value, (bool, int, float)):
        return number(value)
    if isinstance(value, (list, tuple)):
        return f"[{counted(len(value), 'item')}]"
    return one_line(str(value), 40)


def metric_pairs(metrics: Mapping[str, Any], limit: int = _METRICS_SHOWN) -> list[tuple[str, str]]:
    """Names and values as shown; nested names joined by a slash; those beyond ``limit`` are counted."""
    flat = _flattened(metrics, "")
    pairs = [(one_line(name, 40), metric_value(value)) for name, value in itertools.islice(flat, limit)]
    hidden = sum(1 for _ in flat)
    return pairs + ([("", f"{hidden} more")] if hidden else [])


def _flattened(metrics: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def metrics_text(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}".strip() for name, value in metric_pairs(metrics))


def sentence(text: str) -> str:
    text = text.strip()
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?", ":")) else text + "."


def clipped(lines: list[str], limit: int) -> list[str]:
    hidden = len(lines) - limit
    return lines if hidden <= 0 else [*lines[:limit], f"    ... {counted(hidden, 'more line')}"]


def wrapped(lines: Sequence[str], width: int) -> Iterator[str]:
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        if len(line) <= width or len(indent) >= 4:
            yield line  # source lines and tracebacks stay as they are
        else:
            more = indent + "  "
            yield from textwrap.wrap(
                line, max(20, width), subsequent_indent=more, break_long_words=False, break_on_hyphens=False
            )
