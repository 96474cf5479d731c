"""Pure: the results of a sweep as a piece of HTML, for notebooks.

It is made as the card of a run is: no script, no style sheet, and every word that comes from a trial is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from powertrain.result.html import _CELL, _FAINT, _GREEN, _MONO, _RED, _RULE, _div, _span
from powertrain.tune.reporter.table import find_best, status_of, summary_line

if TYPE_CHECKING:
    from powertrain.tune.trial import Trial

#: Maximum number of trials and drawn values shown.
_MOST_TRIALS, _MOST_PARAMETERS = 10, 6
_COLOURS = {"failed": _RED, "finished": _GREEN}
_HEAD = f"{_CELL};font-weight:600;{_FAINT}"


def render_grid(trials: Sequence[Trial], path: str, metric: str, mode: str) -> str:
    """Return the results of a sweep as one element: a summary and a short table, the best trial first.

    Args:
        trials: The trials.
        path: The directory of the sweep.
        metric: The metric to compare; "" if not known.
        mode: "max" or "min"; "" if not known.
    """
    name = path.rstrip("/").rpartition("/")[2]
    best = find_best(trials, metric or None, mode or None)
    style = (
        f"border:{_RULE};border-radius:8px;padding:12px 16px;max-width:860px;font-size:13px;line-height:1.45;"
        "font-family:system-ui,-apple-system,'Segoe UI',sans-serif;color:inherit;overflow-x:auto"
    )
    summary = summary_line(trials, total=None, metric=metric or None, mode=mode or None)
    parts = [
        f"<div>{_span(name, 'font-weight:600;font-size:16px')}</div>",
        _div(path, f"{_MONO};font-size:12px;overflow-wrap:anywhere;{_FAINT}"),
        _div(summary, "margin:6px 0"),
        _table(_chosen(trials, best), metric, best),
    ]
    if len(trials) > _MOST_TRIALS:
        parts.append(_div(f"and {len(trials) - _MOST_TRIALS} more: get_dataframe() has them", _FAINT))
    return f'<div style="{style}">{"".join(parts)}</div>'


def _chosen(trials: Sequence[Trial], best: Trial | None) -> list[Trial]:
    """Return the best trial, then the others in order of creation."""
    others = [trial for trial in trials if trial is not best]
    return [*([best] if best is not None else []), *others][:_MOST_TRIALS]


def _table(trials: Sequence[Trial], metric: str, best: Trial | None) -> str:
    if not trials:
        return ""
    paths = list(dict.fromkeys(path for trial in trials for path in trial.evaluated_params))[
        :_MOST_PARAMETERS
    ]
    titles = ["trial", "status", *paths, "iterations", *([metric] if metric else [])]
    head = "".join(f'<th style="{_HEAD}">{escape(title)}</th>' for title in titles)
    rows = "".join(_row(trial, paths, metric, trial is best) for trial in trials)
    body = f'<tr style="background:transparent">{head}</tr>{rows}'
    return f'<table style="border-collapse:collapse;margin:0">{body}</table>'


def _row(trial: Trial, paths: Sequence[str], metric: str, is_best: bool) -> str:
    status = status_of(trial)
    star = " &#9733; best" if is_best else ""
    cells = [
        f"{_span(str(trial), _MONO)}{star}",
        _span(status, f"color:{_COLOURS.get(status, 'inherit')}"),
        *(_span(_shown(trial.evaluated_params.get(path, "")), _MONO) for path in paths),
        str(trial.iteration),
    ]
    if metric:
        history = trial.metrics.get(metric)
        cells.append(_span(_shown(history.last) if history is not None else "", _MONO))
    inner = "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells)
    return f'<tr style="background:transparent">{inner}</tr>'


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:40]
