"""Amounts as text for findings and reports."""

from __future__ import annotations

import math
from collections.abc import Iterable


def seconds(amount: float) -> str:
    """A duration of a part of a step: "0.42 ms", "31.0 ms", "1.20 s", "75 s"."""
    if not math.isfinite(amount):
        return "an unknown time"
    if amount < 0.9995:
        milliseconds = amount * 1000
        return f"{milliseconds:.2f} ms" if milliseconds < 9.995 else f"{milliseconds:.1f} ms"
    return f"{amount:.2f} s" if amount < 9.995 else f"{amount:,.0f} s"


def mebibytes(amount: float) -> str:
    """Memory given in MiB: "0.25 MiB", "512 MiB", "3.4 GiB", "1.2 TiB"."""
    if abs(amount) >= 1024**2 - 0.5:
        return f"{amount / 1024**2:.1f} TiB"
    if abs(amount) >= 1023.5:
        return f"{amount / 1024:.1f} GiB"
    return f"{amount:.0f} MiB" if abs(amount) >= 9.95 else f"{amount:.3g} MiB"


def share(part: float) -> str:
    """A part of a whole: "7 %", "0.4 %"."""
    percent = part * 100
    return f"{percent:.0f} %" if abs(percent) >= 0.95 or percent == 0 else f"{percent:.1g} %"


def rate(amount: float) -> str:
    """A number per second: "0.125", "31.4", "12,800"."""
    return f"{amount:,.0f}" if amount >= 99.5 else f"{amount:.3g}"


def flops(rate: float) -> str:
    """Floating-point operations per second: "870 GFLOP/s", "1.2 PFLOP/s"."""
    units = ["", "k", "M", "G", "T", "P", "E"]
    scaled = rate
    while scaled >= 999.5 and len(units) > 1:
        scaled /= 1000
        del units[0]
    return f"{scaled:.0f} {units[0]}FLOP/s" if scaled >= 99.5 else f"{scaled:.3g} {units[0]}FLOP/s"


def long_time(amount: float) -> str:
    """A time to come, in seconds, roughly: "40 s", "12 minutes", "3.5 hours", "9 days"."""
    for limit, unit, name in ((86400 * 2, 86400, "days"), (3600 * 2, 3600, "hours"), (120, 60, "minutes")):
        if amount >= limit:
            number = amount / unit
            return f"{number:.1f} {name}" if number < 10 and unit > 60 else f"{number:,.0f} {name}"
    return f"{amount:.0f} s"


def hosts(names: Iterable[str]) -> str:
    """Return hosts for the middle of a sentence: "", " on node-a", " on a and b"; at most four names."""
    known = sorted({name for name in names if name})
    if not known:
        return ""
    if len(known) > 4:
        known = [*known[:3], f"{len(known) - 3} more"]
    return " on " + (f"{', '.join(known[:-1])} and {known[-1]}" if len(known) > 1 else known[0])
