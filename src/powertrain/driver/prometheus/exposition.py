"""Figures as text for Prometheus (format 0.0.4) and OpenMetrics (1.0). Pure.

Both are written by hand: they are lines of a name, labels and a number, and every value from a run is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(frozen=True)
class FigureSample:
    """One number with its labels."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class FigureFamily:
    """Numbers of one name. The name of a counter ends with ``_total``."""

    name: str
    help: str
    kind: Literal["gauge", "counter"]
    samples: Sequence[FigureSample]


def choose_format(accept: str) -> str:
    """Return the content type for a client that accepts these: OpenMetrics where it is named, else plain text."""
    return OPEN_METRICS if "application/openmetrics-text" in accept else TEXT


def render(families: Sequence[FigureFamily], content_type: str = TEXT) -> bytes:
    """Return the families as text; characters that cannot be encoded are replaced."""
    is_open = content_type == OPEN_METRICS
    lines = []
    for family in families:
        # OpenMetrics names the family of a counter without the ending of its samples.
        name = family.name.removesuffix("_total") if is_open and family.kind == "counter" else family.name
        lines.append(f"# HELP {name} {_escaped(family.help, quotes=is_open)}")
        lines.append(f"# TYPE {name} {family.kind}")
        for sample in family.samples:
            labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels.items())
            lines.append(f"{family.name}{{{labels}}} {format_number(sample.value)}")
    if is_open:
        lines.append("# EOF")
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def _escaped(text: str, *, quotes: bool = True) -> str:
    """Return text for a label or a help: a line feed in it would begin a new line. No other escapes are allowed."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def format_number(value: float) -> str:
    """Return a number as both formats have it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
