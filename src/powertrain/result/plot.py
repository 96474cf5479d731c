"""Curves of a run as a matplotlib figure.

matplotlib's objects only, never pyplot: no window is opened, no backend is chosen, and only the caller keeps the
figure. Curves are reduced to pixels, so a figure costs the same for a thousand points and for ten million.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from numpy.typing import NDArray

    from powertrain.run.record.milestones import Milestone

    Floats = NDArray[np.float64]

#: Points are marked one by one up to this many of them.
_MARKED = 50
#: Ranks that have a colour and a name of their own.
_NAMED_RANKS = 8
_COLOURS = {"failure": "tab:red", "restart": "tab:orange", "resize": "tab:purple"}
_DASHES = {"failure": "-", "restart": "--", "resize": ":"}
_GAP, _CHECKPOINT = "tab:red", "0.35"
#: matplotlib cannot scale an axis to numbers that are near the largest there are.
_LARGEST = 1e300
#: Seconds in a unit of the time axis, the largest first; it is used from twice its length on.
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))


@dataclass(frozen=True)
class MetricLine:
    """One metric of one rank, in pixels: where each begins (a row, or seconds), and its values."""

    rank: int
    at: Floats
    low: Floats
    high: Floats
    last: Floats


@dataclass(frozen=True)
class Panel:
    """One metric."""

    name: str
    lines: tuple[MetricLine, ...]


@dataclass(frozen=True)
class PlottedCheckpoint:
    """A checkpoint that was kept, where it lies on the axis, and whether its score is the best."""

    at: float
    is_best: bool = False


@dataclass(frozen=True)
class Picture:
    """All that a figure shows."""

    title: str
    panels: tuple[Panel, ...]
    #: True where the axis is seconds since the run began, False where it is rows.
    over_time: bool = False
    saved: tuple[PlottedCheckpoint, ...] = ()
    #: Events of the run, and their positions on the axis.
    happened: tuple[tuple[float, Milestone], ...] = ()
    #: Weight of previous values in the smoothed line; 0 for no smoothing.
    smooth: float = 0.0


class Plot(Figure):
    """A figure that notebooks show by themselves, although pyplot knows nothing of it."""

    def _repr_png_(self) -> bytes:
        return png(self)


def png(figure: Any) -> bytes:
    """A figure as a picture, within its own margins."""
    target = io.BytesIO()
    figure.savefig(target, format="png", dpi=110)
    return target.getvalue()


def draw(picture: Picture, ax: Axes | None = None) -> Any:
    """The figure; with ``ax`` the picture's only panel is drawn into that, and its figure is returned."""
    if ax is None:
        return _draw_all(picture)
    marks = _draw_panel(ax, picture, picture.panels[0])
    ax.set_xlabel(_scale(picture)[1])
    if marks:
        ax.legend(handles=marks, fontsize="small")
    return ax.figure.figure  # the whole one, where the axes are in a part of it


def _draw_all(picture: Picture) -> Plot:
    """Small multiples over one axis, and one legend for all."""
    count = len(picture.panels)
    columns = 1 if count <= 3 else 2 if count <= 8 else 3
    rows = -(-count // columns)
    size = ((8.0, 5.6, 4.6)[columns - 1] * columns, 2.1 * rows + 1.2)
    figure = Plot(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, squeeze=False)
    marks: dict[Any, Line2D] = {}
    for axes, panel in zip(grid.flat, picture.panels, strict=False):
        marks |= {mark.get_label(): mark for mark in _draw_panel(axes, picture, panel)}
    for index, axes in enumerate(grid.flat):
        if index >= count:
            axes.set_visible(False)
        elif index + columns >= count:  # nothing is drawn below it
            axes.xaxis.set_tick_params(labelbottom=True)
            axes.set_xlabel(_scale(picture)[1])
    figure.suptitle(picture.title, fontsize="medium")
    if marks:
        named = list(marks.values())
        figure.legend(handles=named, loc="outside lower center", ncols=4, fontsize="small", frameon=False)
    return figure


def smoothed(values: Floats, weight: float) -> Floats:
    """Return the bias-corrected exponential mean. Non-finite values are skipped, and stay."""
    smooth = values.copy()
    mean = share = 0.0
    for index in np.flatnonzero(np.isfinite(values)):
        mean = weight * mean + (1 - weight) * float(values[index])
        share = weight * share + (1 - weight)
        smooth[index] = mean / share
    return smooth


def _scale(picture: Picture) -> tuple[float, str]:
    """Return the divisor and the label of the axis."""
    if not picture.over_time:
        return 1.0, "row"
    longest = max(
        (float(line.at[-1]) for p in picture.panels for line in p.lines if len(line.at)), default=0.0
    )
    unit, name = next((u for u in _UNITS if longest >= 2 * u[0]), _UNITS[-1])
    return unit, f"{name} since the run began"


def _draw_panel(axes: Axes, picture: Picture, panel: Panel) -> list[Line2D]:
    """Draw one metric; returns the entries of its legend."""
    unit, _ = _scale(picture)
    axes.set_title(panel.name, loc="left", fontsize="medium")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.margins(x=0.02)
    if not picture.over_time:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    marks = [_draw_line(axes, line, unit, picture.smooth, len(panel.lines)) for line in panel.lines]
    marks = [mark for mark in marks if not str(mark.get_label()).startswith("_")]
    marks += _draw_gaps(axes, panel, unit)
    if panel.lines:
        marks += _draw_checkpoints(axes, picture, panel.lines[0], unit)
    return marks + _draw_milestones(axes, picture, unit)


def _draw_line(axes: Axes, line: MetricLine, unit: float, smooth: float, count: int) -> Line2D:
    at = line.at / unit
    last = np.where(np.isfinite(line.last), line.last, np.nan)
    marker = "." if len(at) <= _MARKED else ""
    label = f"rank {line.rank}" if 1 < count <= _NAMED_RANKS else "_"
    colour = None if count <= _NAMED_RANKS else "tab:blue"
    alpha = 1.0 if count <= _NAMED_RANKS else 0.35
    shown = smoothed(last, smooth) if smooth else last
    (drawn,) = axes.plot(at, shown, marker=marker, color=colour, alpha=alpha, linewidth=1.2, label=label)
    if count == 1:
        low, high = (np.where(np.isfinite(edge), edge, np.nan) for edge in (line.low, line.high))
        axes.fill_between(at, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)
        if smooth:
            axes.plot(at, last, color=drawn.get_color(), alpha=0.3, linewidth=0.8)
    return drawn


def _draw_gaps(axes: Axes, panel: Panel, unit: float) -> list[Line2D]:
    """Mark NaN and infinite values at the lower edge, where the line is broken."""
    wrong = [line.at[~np.isfinite(line.last)] for line in panel.lines]
    at = np.concatenate([*wrong, np.empty(0)]) / unit
    if not len(at):
        return []
    return axes.plot(
        at, np.full(len(at), 0.03), "x", color=_GAP, markersize=5, clip_on=False,
        transform=axes.get_xaxis_transform(), label="NaN or infinite",
    )  # fmt: skip


def _draw_checkpoints(axes: Axes, picture: Picture, line: MetricLine, unit: float) -> list[Line2D]:
    """On the line itself, at the height that it has there."""
    known = np.isfinite(line.last)
    if not picture.saved or not known.any():
        return []
    shown = smoothed(line.last, picture.smooth) if picture.smooth else line.last
    marks: list[Line2D] = []
    for is_best, marker, size, label in ((False, "o", 5, "checkpoint"), (True, "*", 12, "best checkpoint")):
        at = np.array([saved.at for saved in picture.saved if saved.is_best is is_best])
        if len(at):
            heights = np.interp(at, line.at[known], shown[known])
            face = "gold" if is_best else "white"
            marks += axes.plot(
                at / unit, heights, marker, markersize=size, markerfacecolor=face, zorder=4,
                markeredgecolor=_CHECKPOINT, markeredgewidth=0.8, label=label,
            )  # fmt: skip
    return marks


def _draw_milestones(axes: Axes, picture: Picture, unit: float) -> list[Line2D]:
    """Upright lines; one of each kind is named."""
    marks = []
    for kind, colour in _COLOURS.items():
        found = [(at, milestone) for at, milestone in picture.happened if milestone.kind == kind]
        words = found[0][1].words if len(found) == 1 else f"{len(found)} {kind}s"
        for index, (at, _) in enumerate(found):
            drawn = axes.axvline(
                at / unit, color=colour, linestyle=_DASHES[kind], linewidth=1.0, alpha=0.8,
                label=words if index == 0 else "_",
            )  # fmt: skip
            if index == 0:
                marks.append(drawn)
    return marks


def drawable(values: Floats) -> Floats:
    """The same, where no axis has room for a value an infinity."""
    return np.where(np.abs(values) > _LARGEST, np.copysign(np.inf, values), values)


def is_smooth(weight: Any) -> bool:
    """Return whether ``weight`` is a valid smoothing weight."""
    return isinstance(weight, (int, float)) and math.isfinite(weight) and 0 <= weight < 1


def ranks_drawn(world_size: int, most: int = 64) -> Sequence[int]:
    """Return all ranks, or as many as a plot can show, evenly chosen."""
    if world_size <= most:
        return range(world_size)
    return [round(index * (world_size - 1) / (most - 1)) for index in range(most)]
