"""Matplotlib figures of a sweep: learning curves, parallel coordinates, and parameter importance.

As for the curves of a run, pyplot is never used: no window is opened, and only the caller keeps the figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from powertrain.errors import ConfigError
from powertrain.values.arguments import shorten

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from powertrain.tune.trial import Trial

    Floats = NDArray[np.float64]

#: Minimum number of ended trials for the importance of a parameter.
LEAST_TRIALS = 5
#: Maximum number of learning curves with their own colour and label.
_NAMED_TRIALS = 8
#: Maximum number of parameters shown; of more, the most important ones.
_MOST_PARAMETERS = 12
#: Maximum number of labels at a categorical axis, and characters of each.
_MOST_TICKS, _LONGEST = 8, 14
#: Maximum number of bins of a numeric parameter, and minimum number of trials in each.
_MOST_BINS, _TRIALS_PER_BIN = 5, 5
#: matplotlib cannot scale an axis to numbers near the largest float.
_LARGEST = 1e300
_BEST, _PLAIN, _FADED = "tab:red", "tab:blue", "0.6"
#: Keeps lines from covering the labels of an axis.
_BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5}

#: Placeholder for a parameter that a trial does not have.
MISSING: Any = object()


class SweepResults(Protocol):
    """The parts of a sweep that are drawn: :class:`powertrain.tune.ResultGrid`."""

    @property
    def trials(self) -> list[Trial]:
        """The trials, with their configurations and the history of their metrics."""

    @property
    def experiment_path(self) -> str:
        """The directory of the sweep."""

    def curves(self, metric: str) -> dict[str, list[tuple[int, float]]]:
        """Return the reports of a metric by trial, as (iteration, value) pairs."""


def draw_sweep(grid: SweepResults, metric: str, mode: str) -> Figure:
    """Return a figure of a sweep with three panels.

    - The reports of each trial. The best trial is highlighted; those that were stopped before they had come as far as
      the longest are faded.
    - Parallel coordinates: a line for each trial through the values that were drawn for it, coloured by its last
      report. Trials without one are grey.
    - The importance of each parameter: the share of the variance of the metric's ranks that the parameter explains
      (see :func:`explain_ranks`).

    Args:
        grid: The results of the sweep.
        metric: The metric to show.
        mode: "max" or "min".

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from powertrain.result.plot import Plot
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise ConfigError(
            "ResultGrid.plot() draws with matplotlib, which is not installed. Install it with: pip install "
            "'powertrain[plot]'."
        ) from None
    trials = grid.trials
    paths = list(dict.fromkeys(path for trial in trials for path in trial.evaluated_params))
    shares = {path: _explain(trials, path, metric) for path in paths}
    shown = sorted(paths, key=lambda path: -(shares[path] or 0.0))[:_MOST_PARAMETERS]
    axes_of = [path for path in paths if path in shown]
    figure = Plot(figsize=(max(11.0, 1.1 * len(axes_of)), 8.0), layout="constrained")
    panels = figure.add_gridspec(2, 2, width_ratios=(3, 2))
    best = find_best_trial(trials, metric, mode)
    _draw_curves(figure.add_subplot(panels[0, 0]), grid, metric, best)
    _draw_importance(figure.add_subplot(panels[0, 1]), trials, metric, {path: shares[path] for path in shown})
    _draw_coordinates(figure.add_subplot(panels[1, :]), trials, axes_of, metric, mode, len(paths))
    name = grid.experiment_path.rstrip("/").rpartition("/")[2]
    count = f"{len(trials)} trial{'' if len(trials) == 1 else 's'}"
    figure.suptitle(f"{name}: {count}", fontsize="medium")
    return figure


def find_best_trial(trials: Sequence[Trial], metric: str, mode: str) -> Trial | None:
    """Return the trial with the best finite last report; None if there is none."""
    known = [trial for trial in trials if math.isfinite(_last(trial, metric))]
    choose = max if mode == "max" else min
    return choose(known, key=lambda trial: _last(trial, metric), default=None)


def _last(trial: Trial, metric: str) -> float:
    history = trial.metrics.get(metric)
    value = history.last if history is not None else math.nan
    return math.copysign(math.inf, value) if abs(value) > _LARGEST else value


# --------------------------------------------------------------------------- learning curves


def _draw_curves(axes: Axes, grid: SweepResults, metric: str, best: Trial | None) -> None:
    import numpy as np

    curves = {trial: _as_arrays(points) for trial, points in grid.curves(metric).items() if points}
    trials = [trial for trial in grid.trials if trial.trial_id in curves]
    axes.set_xlabel("training_iteration")
    axes.set_ylabel(metric)
    if not any(np.isfinite(heights).any() for _, heights in curves.values()):
        _write_message(axes, f"no trial has reported a finite {metric!r}")
        return
    if has_log_scale(np.concatenate([heights for _, heights in curves.values()])):
        axes.set_yscale("log")
    # A scheduler also stops trials that have reached their end, which is not a verdict on them.
    longest = max(trial.iteration for trial in trials)
    faded = {t.trial_id for t in trials if t.was_stopped_early and t.iteration < longest}
    if len(trials) <= _NAMED_TRIALS:
        for trial in trials:
            is_faded = trial.trial_id in faded and trial is not best
            label = f"{_tail(str(trial))}{' (best)' if trial is best else ''}"
            axes.plot(
                *curves[trial.trial_id], marker=".", label=label, linewidth=2.4 if trial is best else 1.2,
                alpha=0.4 if is_faded else 1.0, zorder=3 if trial is best else 2,
            )  # fmt: skip
        axes.legend(fontsize="x-small")
    else:
        plain = [trial.trial_id for trial in trials if trial.trial_id not in faded]
        for chosen, colour, alpha in ((sorted(faded), _FADED, 0.35), (plain, _PLAIN, 0.5)):
            at, heights = _joined([curves[trial] for trial in chosen])
            axes.plot(at, heights, color=colour, alpha=alpha, linewidth=0.9, marker=".", markersize=2)
        if best is not None and best.trial_id in curves:
            axes.plot(*curves[best.trial_id], color=_BEST, linewidth=2.2, marker=".", zorder=3)
    axes.set_title(f"best: {_tail(str(best), 50)}" if best is not None else "", fontsize="small", loc="left")


def _as_arrays(points: Sequence[tuple[int, float]]) -> tuple[Floats, Floats]:
    """Return a curve with NaN for values that no axis can show."""
    import numpy as np

    at, heights = np.array(points, dtype=np.float64).T
    return at, np.where(np.abs(heights) <= _LARGEST, heights, np.nan)


def _joined(curves: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Return several curves as one, with gaps between them."""
    import numpy as np

    gap = np.array([np.nan])
    at = [part for x, _ in curves for part in (x, gap)]
    heights = [part for _, y in curves for part in (y, gap)]
    return np.concatenate([gap, *at]), np.concatenate([gap, *heights])


def has_log_scale(values: Any) -> bool:
    """Return whether numbers are spread more evenly over a logarithmic axis than over a linear one.

    They are all positive, span at least a factor of ten, and their median lies nearer to the middle of the
    logarithmic axis.
    """
    import numpy as np

    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    if not len(found) or found.min() <= 0 or found.max() < 10 * found.min():
        return False
    linear, logarithmic = (_off_centre(scaled) for scaled in (found, np.log(found)))
    return bool(logarithmic < linear)


def _off_centre(values: Floats) -> float:
    import numpy as np

    low, high = values.min(), values.max()
    return abs(float((np.median(values) - low) / (high - low)) - 0.5)


# --------------------------------------------------------------------------- parallel coordinates


@dataclass(frozen=True)
class ParameterAxis:
    """One parameter as an axis.

    Attributes:
        places: The position of each trial on the axis, from 0 to 1; NaN for no value.
        ticks: Places that are labelled, with their labels.
        is_log: Whether the axis is logarithmic.
    """

    places: Floats
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False


def scale_values(values: Sequence[Any]) -> ParameterAxis:
    """Return the axis of a parameter: numbers by their size, anything else as categories in order of appearance.

    Args:
        values: The value of each trial; :data:`MISSING` for one that has none.
    """
    import numpy as np

    there = [value for value in values if value is not MISSING]
    if there and all(map(_is_number, there)):
        numbers = np.array([math.nan if value is MISSING else float(value) for value in values])
        is_log = has_log_scale(numbers)
        scaled = np.log10(numbers) if is_log else numbers
        low, high = float(np.nanmin(scaled)), float(np.nanmax(scaled))
        if low == high:
            return ParameterAxis(np.where(np.isnan(scaled), np.nan, 0.5), ((0.5, _short(there[0])),))
        marks = [low, low / 2 + high / 2, high]
        labels = [f"{10**mark if is_log else mark:.3g}" for mark in marks]
        places = np.clip((scaled - low) / (high - low), 0.0, 1.0)
        return ParameterAxis(places, tuple(zip((0.0, 0.5, 1.0), labels, strict=True)), is_log)
    names = list(dict.fromkeys(_short(value) for value in there))
    at = {name: place / (len(names) - 1) if len(names) > 1 else 0.5 for place, name in enumerate(names)}
    places = np.array([math.nan if value is MISSING else at[_short(value)] for value in values])
    step = -(-len(names) // _MOST_TICKS)
    return ParameterAxis(places, tuple((at[name], _tail(name, _LONGEST)) for name in names[:: step or 1]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _short(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.3g}" if isinstance(value, float) else shorten(value)


def _tail(text: str, longest: int = 30) -> str:
    """Return the end of a text, which distinguishes the trials of one sweep."""
    text = text.replace("$", r"\$")  # no mathematics
    return text if len(text) <= longest else f"…{text[1 - longest :]}"


def _draw_coordinates(
    axes: Axes, trials: Sequence[Trial], paths: Sequence[str], metric: str, mode: str, count: int
) -> None:
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import LineCollection

    axes.set_title("drawn values", fontsize="small", loc="left")
    if not paths:
        _write_message(axes, "no values were drawn")
        return
    parameters = [
        scale_values([trial.evaluated_params.get(path, MISSING) for trial in trials]) for path in paths
    ]
    points = np.array([parameter.places for parameter in parameters]).T
    scores = np.array([_last(trial, metric) for trial in trials])
    is_known = np.isfinite(scores)
    norm = _colours(scores[is_known], mode)
    grey = [piece for row in points[~is_known] for piece in _pieces(row)]
    axes.add_collection(LineCollection(grey, colors="0.75", linewidths=0.7, linestyles="dashed"))
    # The best trials are drawn last, on top.
    order = sorted(np.flatnonzero(is_known), key=lambda at: scores[at], reverse=mode == "min")
    pieces = [(piece, scores[at]) for at in order for piece in _pieces(points[at])]
    lines = LineCollection(
        [piece for piece, _ in pieces], cmap=_colour_map(mode), norm=norm, linewidths=1.1, alpha=0.8
    )
    lines.set_array(np.array([score for _, score in pieces]))
    axes.add_collection(lines)
    if len(order):
        for piece in _pieces(points[order[-1]]):
            axes.plot(*zip(*piece, strict=True), color=_BEST, linewidth=2.2, zorder=3)
        colours = ScalarMappable(norm, _colour_map(mode))
        bar = axes.figure.colorbar(colours, ax=axes, pad=0.01)
        bar.set_label(f"last {metric}")
    _draw_axes(axes, paths, parameters)
    if count > len(paths):
        axes.set_title(
            f"drawn values: {len(paths)} of {count} parameters, those that matter most", fontsize="small"
        )


def _draw_axes(axes: Axes, paths: Sequence[str], parameters: Sequence[ParameterAxis]) -> None:
    """Draw the upright axes with their labels."""
    for place, parameter in enumerate(parameters):
        axes.axvline(place, color="0.4", linewidth=0.8, zorder=1)
        for at, label in parameter.ticks:
            axes.text(place + 0.02, at, label, fontsize="x-small", va="center", zorder=4, bbox=_BEHIND)
    axes.set_xlim(-0.05, max(1.0, len(paths) - 1) + 0.25)
    axes.set_ylim(-0.06, 1.06)
    titles = [
        f"{_tail(path)}{' (log)' if p.is_log else ''}" for path, p in zip(paths, parameters, strict=True)
    ]
    axes.set_xticks(range(len(paths)), titles, fontsize="small")
    axes.set_yticks([])
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _colour_map(mode: str) -> str:
    """Return the colour map, in which good trials are dark."""
    return "viridis" if mode == "min" else "viridis_r"


def _colours(scores: Floats, mode: str) -> Any:
    """Return the range of the colours. The worst tenth share one colour, so that a few bad trials hide no others."""
    import numpy as np
    from matplotlib.colors import Normalize

    if not len(scores):
        return Normalize(0.0, 1.0)
    low, high = (
        (np.min(scores), np.quantile(scores, 0.9))
        if mode == "min"
        else (np.quantile(scores, 0.1), np.max(scores))
    )
    return Normalize(float(low), float(high))


def _pieces(row: Floats) -> list[list[tuple[float, float]]]:
    """Return the segments of a trial's line, which has gaps for missing values."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for place, height in enumerate(row):
        if math.isnan(height):
            pieces.append([])
        else:
            pieces[-1].append((place, float(height)))
    # A single value is drawn as a short stroke.
    return [
        piece if len(piece) > 1 else [piece[0], (piece[0][0] + 0.04, piece[0][1])]
        for piece in pieces
        if piece
    ]


# --------------------------------------------------------------------------- importance


def _explain(trials: Sequence[Trial], path: str, metric: str) -> float | None:
    ended = [trial for trial in trials if trial.is_ended and path in trial.evaluated_params]
    return explain_ranks([trial.evaluated_params[path] for trial in ended], [_last(t, metric) for t in ended])


def explain_ranks(values: Sequence[Any], scores: Sequence[float]) -> float | None:
    """Return the share of the variance of the scores' ranks that a parameter explains, from 0 to 1.

    The method is the adjusted correlation ratio of ranks (epsilon squared, as after a Kruskal-Wallis test): trials are
    grouped by the value of the parameter, numbers into at most five bins with about as many trials each. The share is
    the variance between the groups, less the part expected by chance. It considers one parameter at a time: it does not
    detect interactions, and a parameter that was only drawn together with good values of others gets their credit.
    Ranks are used because a few diverging trials would otherwise dominate; an infinite score is the worst or best rank,
    and NaN is left out.

    Args:
        values: The parameter's value in each trial.
        scores: The metric of each trial.

    Returns:
        The share; None if fewer than :data:`LEAST_TRIALS` have a score, or each value occurs only once.
    """
    import numpy as np

    known = [(value, score) for value, score in zip(values, scores, strict=True) if not math.isnan(score)]
    if len(known) < LEAST_TRIALS:
        return None
    group = _groups([value for value, _ in known])
    ranks = _mean_ranks(np.array([score for _, score in known]))
    count, groups = len(known), int(group.max()) + 1
    total = float(((ranks - ranks.mean()) ** 2).sum())
    if groups == 1 or total == 0.0:
        return 0.0
    if groups == count:
        return None
    sizes = np.bincount(group)
    means = np.bincount(group, weights=ranks) / sizes
    between = float((sizes * (means - ranks.mean()) ** 2).sum())
    adjusted = 1.0 - (1.0 - between / total) * (count - 1) / (count - groups)
    return min(1.0, max(0.0, adjusted))


def _groups(values: Sequence[Any]) -> NDArray[np.int64]:
    """Return the group index of each trial, from 0."""
    import numpy as np

    bins = max(2, min(_MOST_BINS, len(values) // _TRIALS_PER_BIN))
    if all(map(_is_number, values)) and len(set(map(float, values))) > bins:
        ranks = _mean_ranks(np.array([float(value) for value in values]))
        found = np.minimum((ranks * bins / len(values)).astype(np.int64), bins - 1)
        return np.unique(found, return_inverse=True)[1]
    names = {name: place for place, name in enumerate(dict.fromkeys(map(_key, values)))}
    return np.array([names[_key(value)] for value in values], dtype=np.int64)


def _key(value: Any) -> str:
    return f"{float(value)}" if _is_number(value) else repr(value)


def _mean_ranks(values: Floats) -> Floats:
    """Return the rank of each value, from 0.5; equal values share their mean rank."""
    import numpy as np

    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    middle: Floats = (ends - counts / 2.0)[inverse]
    return middle


def _draw_importance(
    axes: Axes, trials: Sequence[Trial], metric: str, shares: dict[str, float | None]
) -> None:
    axes.set_title("importance of each parameter", fontsize="small", loc="left")
    known = sum(trial.is_ended and not math.isnan(_last(trial, metric)) for trial in trials)
    if known < LEAST_TRIALS:
        _write_message(
            axes, f"too few trials: {known} ended with a value of {metric!r}, and {LEAST_TRIALS} are needed"
        )
        return
    if not shares:
        _write_message(axes, "no values were drawn")
        return
    ordered = sorted(shares.items(), key=lambda item: item[1] if item[1] is not None else -1.0)
    places = range(len(ordered))
    axes.barh(places, [share or 0.0 for _, share in ordered], color=_PLAIN, height=0.6)
    axes.set_yticks(places, [_tail(path) for path, _ in ordered], fontsize="small")
    for place, (_, share) in zip(places, ordered, strict=True):
        text = f"{share:.2f}" if share is not None else "not known: too few trials have equal values"
        axes.text((share or 0.0) + 0.02, place, text, va="center", fontsize="x-small")
    axes.set_xlim(0.0, 1.15)
    axes.set_xlabel(
        "explained share of rank variance\n(adjusted correlation ratio, one parameter at a time)",
        fontsize="small",
    )


def _write_message(axes: Axes, text: str) -> None:
    """Draw a sentence in place of a panel."""
    from textwrap import fill

    axes.text(
        0.5, 0.5, fill(text.replace("$", r"\$"), 40), ha="center", va="center", transform=axes.transAxes
    )
    axes.set_xticks([])
    axes.set_yticks([])
