"""Pure: a result as a piece of HTML, for notebooks.

One element, with its styles in it: no script, no style sheet, nothing from elsewhere, so that it is shown the same by
every viewer, also an untrusting one. Colours are those of the page around it, or half transparent: it can be read
on light and on dark. Every word that comes from a run is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from powertrain.diagnosis.words import seconds as seconds_text

if TYPE_CHECKING:
    from powertrain.diagnosis.finding import Finding

#: The size of a small curve.
_WIDTH, _HEIGHT = 180, 40
#: Of more checkpoints than this the newest are shown, and the best.
_MOST_CHECKPOINTS = 8
_BLUE, _GREEN, _RED, _AMBER, _GREY = "#3d86d8", "#2a9d5c", "#d9483b", "#c98a12", "#8a8f98"
#: Colours of phases, in their order.
_PHASES = ("#3d86d8", "#7fb4ea", "#2a9d5c", "#8ccf9f", "#c98a12", "#e2bd6b", "#9467bd", "#d9483b", "#8a8f98")
_STATES = {"finished": _GREEN, "failed": _RED, "stopped": _AMBER, "preempted": _AMBER}
_SEVERITIES = {"critical": _RED, "warning": _AMBER}
_FAINT = "opacity:.65"
_MONO = "font-family:ui-monospace,Menlo,Consolas,monospace"
_RULE = "1px solid rgba(128,128,128,.3)"
_CELL = "padding:2px 14px 2px 0;text-align:left;vertical-align:top;background:transparent;border:0"


@dataclass(frozen=True)
class Unread:
    """The reason why a part could not be read."""

    words: str


@dataclass(frozen=True)
class Spark:
    """A metric of rank 0 as a small curve; the columns have one entry a pixel."""

    name: str
    newest: str
    rows: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    last: tuple[float, ...]


@dataclass(frozen=True)
class CheckpointCard:
    """A checkpoint."""

    name: str
    row: int
    size: str
    metrics: str
    is_best: bool = False
    is_newest: bool = False


@dataclass(frozen=True)
class TimeCard:
    """Where the time of a step goes, and how fast and how steadily the run trains."""

    #: Shares of a step by phase.
    phases: tuple[tuple[str, float], ...] = ()
    #: Mean seconds of a step; 0 if unknown.
    step_seconds: float = 0.0
    #: Lines of text; "" if unknown.
    speed: str = ""
    goodput: str = ""


@dataclass(frozen=True)
class ResultCard:
    """All that is shown of a result."""

    path: str
    state: str
    reason: str = ""
    name: str = ""
    #: Labels and values: ("workers", "2").
    about: tuple[tuple[str, str], ...] | Unread = ()
    #: The report of a failure; "" where there is none.
    error: str = ""
    #: The last metrics of rank 0 by name; None if it never reported.
    metrics: tuple[tuple[str, str], ...] | None = None
    #: The small curves, and how many there is no room for.
    sparks: tuple[tuple[Spark, ...], int] | Unread = ((), 0)
    #: The oldest first.
    checkpoints: tuple[CheckpointCard, ...] | Unread = ()
    findings: tuple[Finding, ...] | Unread = ()
    time: TimeCard | Unread = TimeCard()


def html(card: ResultCard) -> str:
    """The card as one element."""
    parts = [
        _heading(card),
        _about(card.about),
        _error(card.error),
        _metrics(card),
        _time(card.time),
        _checkpoints(card.checkpoints),
        _findings(card.findings),
    ]
    style = (
        f"border:{_RULE};border-radius:8px;padding:12px 16px;max-width:860px;font-size:13px;line-height:1.45;"
        "font-family:system-ui,-apple-system,'Segoe UI',sans-serif;color:inherit"
    )
    return f'<div style="{style}">{"".join(parts)}</div>'


def _heading(card: ResultCard) -> str:
    colour = _STATES.get(card.state, _BLUE)
    badge = _span(
        card.state,
        f"background:{colour};color:#fff;border-radius:10px;padding:1px 10px;font-size:12px;margin-left:10px",
    )
    name = _span(card.name or "a run", "font-weight:600;font-size:16px")
    reason = _span(card.reason, f"margin-left:10px;{_FAINT}") if card.reason else ""
    return f"<div>{name}{badge}{reason}</div>" + _div(
        card.path, f"{_MONO};font-size:12px;overflow-wrap:anywhere;{_FAINT}"
    )


def _about(about: tuple[tuple[str, str], ...] | Unread) -> str:
    if isinstance(about, Unread):
        return _unread(about)
    pairs = [
        f'<span style="margin-right:18px;white-space:nowrap">{_span(label, _FAINT)} {_span(value, "")}</span>'
        for label, value in about
        if label != "start-up"
    ]
    lines = [f'<div style="margin-top:6px">{"".join(pairs)}</div>'] if pairs else []
    for label, value in about:
        if label == "start-up":
            lines.append(f"<div>{_span(label, _FAINT)} {_span(value, '')}</div>")
    return "".join(lines)


def _error(text: str) -> str:
    if not text:
        return ""
    style = (
        f"border-left:3px solid {_RED};background:rgba(217,72,59,.08);margin:10px 0 0;padding:8px 12px;"
        f"white-space:pre-wrap;overflow-wrap:anywhere;{_MONO};font-size:12px;color:inherit"
    )
    return f'<pre style="{style}">{escape(text)}</pre>'


def _metrics(card: ResultCard) -> str:
    """Return curves, and the last metrics without a curve."""
    if isinstance(card.sparks, Unread):
        return _section("metrics", _pairs(card.metrics or ()) + _unread(card.sparks))
    sparks, hidden = card.sparks
    drawn = {spark.name for spark in sparks}
    others = [(name, value) for name, value in card.metrics or () if name not in drawn]
    curves = "".join(map(_curve, sparks))
    body = f'<div style="display:flex;flex-wrap:wrap;gap:10px 18px">{curves}</div>' if curves else ""
    body += _pairs(others)
    if hidden:
        body += _div(f"and {hidden} more curves: result.plot() draws them", _FAINT)
    if card.metrics is None and not body:
        body = _div("rank 0 never reported", _FAINT)
    return _section("metrics of rank 0", body) if body else ""


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    shown = [
        f'<span style="margin-right:18px">{_span(name, _FAINT)} {_span(value, _MONO)}</span>'
        for name, value in pairs
    ]
    return f'<div style="margin-top:6px">{"".join(shown)}</div>' if shown else ""


def _curve(spark: Spark) -> str:
    style = "overflow:hidden;text-overflow:ellipsis;white-space:nowrap;max-width:110px;" + _FAINT
    return (
        f'<div style="width:{_WIDTH}px"><div style="display:flex;justify-content:space-between">'
        f"{_span(spark.name, style, spark.name)}{_span(spark.newest, f'{_MONO};font-weight:600')}</div>"
        f"{sparkline(spark)}</div>"
    )


def sparkline(spark: Spark) -> str:
    """A curve as SVG: the band from the smallest to the largest value, the line in it, broken where there is no
    number. A point that stands alone is a dot."""
    finite = [value for edge in (spark.low, spark.high, spark.last) for value in edge if math.isfinite(value)]
    floor, top = (min(finite), max(finite)) if finite else (0.0, 0.0)

    def x(row: int) -> str:
        span = spark.rows[-1] - spark.rows[0]
        return f"{2 + (_WIDTH - 4) * (row - spark.rows[0]) / span if span else _WIDTH / 2:.1f}"

    def y(value: float) -> str:
        # Halves, because the difference of two large numbers may be no number any more.
        span = top / 2 - floor / 2
        part = (value / 2 - floor / 2) / span if span else 0.5
        return f"{_HEIGHT - 3 - (_HEIGHT - 6) * part:.1f}"

    shapes = []
    for stretch in _stretches(spark):
        rows = [x(spark.rows[i]) for i in stretch]
        line = [y(spark.last[i]) for i in stretch]
        if len(stretch) == 1:
            shapes.append(f'<circle cx="{rows[0]}" cy="{line[0]}" r="1.8" fill="{_BLUE}"/>')
            continue
        above = [f"{at},{y(spark.high[i])}" for at, i in zip(rows, stretch, strict=True)]
        below = [f"{at},{y(spark.low[i])}" for at, i in zip(rows, stretch, strict=True)]
        band = " ".join([*above, *reversed(below)])
        points = " ".join(f"{at},{height}" for at, height in zip(rows, line, strict=True))
        shapes.append(f'<polygon points="{band}" fill="{_BLUE}" fill-opacity=".22"/>')
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{_BLUE}" stroke-width="1.4"/>')
    shapes += [
        f'<line x1="{x(row)}" x2="{x(row)}" y1="{_HEIGHT - 5}" y2="{_HEIGHT}" stroke="{_RED}"/>'
        for row, value in zip(spark.rows, spark.last, strict=True)
        if not math.isfinite(value)
    ]
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{"".join(shapes)}</svg>'


def _stretches(spark: Spark) -> Iterable[list[int]]:
    """Pixels that follow each other and are numbers throughout."""
    stretch: list[int] = []
    for index, values in enumerate(zip(spark.low, spark.high, spark.last, strict=True)):
        if all(map(math.isfinite, values)):
            stretch.append(index)
        elif stretch:
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _checkpoints(kept: tuple[CheckpointCard, ...] | Unread) -> str:
    if isinstance(kept, Unread):
        return _section("checkpoints", _unread(kept))
    if not kept:
        return ""
    shown = [one for index, one in enumerate(kept) if one.is_best or index >= len(kept) - _MOST_CHECKPOINTS]
    rows = "".join(map(_checkpoint, shown))
    hidden = len(kept) - len(shown)
    older = _div(f"and {hidden} older", _FAINT) if hidden else ""
    return _section("checkpoints", f'<table style="border-collapse:collapse;margin:0">{rows}</table>{older}')


def _checkpoint(kept: CheckpointCard) -> str:
    star = f' <span style="color:{_AMBER}" title="the best score">&#9733; best</span>' if kept.is_best else ""
    newest = f' <span style="{_FAINT}">newest</span>' if kept.is_newest else ""
    cells = (
        f'<span style="{_MONO}">{escape(kept.name)}</span>{star}{newest}',
        f"row {kept.row}",
        escape(kept.size),
        f'<span style="{_MONO}">{escape(kept.metrics)}</span>',
    )
    inner = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells)
    return f'<tr style="background:transparent">{inner}</tr>'


def _findings(findings: tuple[Finding, ...] | Unread) -> str:
    if isinstance(findings, Unread):
        return _section("diagnosis", _unread(findings))
    lines = []
    for found in findings:
        colour = _GREEN if found.kind == "healthy" else _SEVERITIES.get(found.severity, _GREY)
        action = _div(f"do: {found.action}", f"margin-left:18px;{_FAINT}") if found.action else ""
        dot = f'<span style="color:{colour};margin-right:6px">&#9679;</span>'
        lines.append(
            f"<div>{dot}{_span(found.kind, 'font-weight:600')} {escape(found.summary)}{action}</div>"
        )
    return _section("diagnosis", "".join(lines)) if lines else ""


def _time(time: TimeCard | Unread) -> str:
    """Return the phases of a step as one bar, then speed and goodput. An unreadable diagnosis is reported below."""
    if isinstance(time, Unread):
        return ""
    bar, words = [], []
    for place, (phase, share) in enumerate(time.phases):
        colour, percent = _PHASES[place % len(_PHASES)], f"{share:.0%}"
        title = escape(f"{phase} {percent}")
        bar.append(f'<span style="background:{colour};width:{100 * share:.2f}%" title="{title}"></span>')
        dot = f'<span style="color:{colour};margin-right:4px">&#9632;</span>'
        words.append(f'<span style="margin-right:14px;white-space:nowrap">{dot}{title}</span>')
    body = ""
    if bar:
        style = "display:flex;height:10px;border-radius:3px;overflow:hidden;margin:2px 0 4px"
        body = f'<div style="{style}" role="img">{"".join(bar)}</div><div>{"".join(words)}</div>'
    body += _pairs([pair for pair in (("speed", time.speed), ("goodput", time.goodput)) if pair[1]])
    step = f" ({seconds_text(time.step_seconds)})" if time.step_seconds > 0 else ""
    return _section(f"time of a step{step}", body) if body else ""


def _section(title: str, body: str) -> str:
    style = f"margin:10px 0 4px;padding-top:8px;border-top:{_RULE};font-weight:600;font-size:12px;{_FAINT}"
    return _div(title, style) + body


def _unread(part: Unread) -> str:
    return _div(part.words, f"color:{_AMBER};overflow-wrap:anywhere")


def _span(text: str, style: str, title: str = "") -> str:
    about = f' title="{escape(title)}"' if title else ""
    return f'<span style="{style}"{about}>{escape(text)}</span>'


def _div(text: str, style: str) -> str:
    return f'<div style="{style}">{escape(text)}</div>'
