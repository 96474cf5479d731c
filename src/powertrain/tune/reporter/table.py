"""Text view of a sweep: a summary line, and a table of its trials. Pure functions of the list of trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powertrain.text.printable import escape_controls
from powertrain.tune import trial as states
from powertrain.tune.trial import Trial
from powertrain.values.arguments import shorten

if TYPE_CHECKING:
    from rich.table import Table

#: Names of metrics or parameters, or a dict of their titles.
Columns = Sequence[str] | Mapping[str, str]

_WORDS = {
    states.PENDING: "pending",
    states.RUNNING: "running",
    states.PAUSED: "paused",
    states.TERMINATED: "finished",
    states.ERROR: "failed",
}
_STOPPED_EARLY = "stopped early"
_STYLES = {"running": "cyan", "failed": "red", _STOPPED_EARLY: "dim", "finished": "green"}
#: The display order of states, after the best trial.
_ORDER = ("running", "failed", "paused", "finished", _STOPPED_EARLY, "pending")
#: Report entries that the sweep adds, and those shown in the columns for iterations and time.
_NOT_INFERRED = frozenset(
    {
        "training_iteration",
        "time_total_s",
        "time_this_iter_s",
        "iterations_since_restore",
        "time_since_restore",
    }
)
_ELLIPSIS = "…"
_MARK = "* "


def status_of(trial: Trial) -> str:
    """Return the state of a trial in words."""
    if trial.status == states.TERMINATED and trial.was_stopped_early:
        return _STOPPED_EARLY
    return _WORDS.get(trial.status, trial.status.lower())


def find_best(trials: Sequence[Trial], metric: str | None, mode: str | None) -> Trial | None:
    """Return the trial with the best last report; None if no trial has reported the metric.

    Args:
        trials: The trials.
        metric: The metric to compare.
        mode: "max" or "min".
    """
    best, best_score = None, -math.inf
    for trial in trials if metric and mode else ():
        value = _last(trial, metric or "")
        score = value if mode == "max" else -value
        if not math.isnan(score) and (best is None or score > best_score):
            best, best_score = trial, score
    return best


def estimate_seconds_left(trials: Sequence[Trial], total: int | None) -> float | None:
    """Return the estimated remaining seconds of the sweep; None if unknown.

    Unfinished trials are assumed to take the mean time of the finished ones, at the current concurrency.

    Args:
        trials: The trials so far.
        total: Total number of trials.
    """
    ended = [_seconds(trial) for trial in trials if trial.status == states.TERMINATED and trial.starts]
    running = [_seconds(trial) for trial in trials if trial.status == states.RUNNING]
    if not ended or total is None:
        return None
    mean = sum(ended) / len(ended)
    waiting = sum(not trial.is_ended and trial.status != states.RUNNING for trial in trials)
    waiting += max(0, total - len(trials))
    work = mean * waiting + sum(max(0.0, mean - seconds) for seconds in running)
    return work / max(1, len(running))


def summary_line(
    trials: Sequence[Trial],
    *,
    total: int | None = None,
    metric: str | None = None,
    mode: str | None = None,
    elapsed: float | None = None,
) -> str:
    """Return a sweep in one line: the number of trials by state, the best trial, and the remaining time.

    Args:
        trials: The trials so far.
        total: Total number of trials.
        metric: The metric to compare.
        mode: "max" or "min".
        elapsed: Seconds since the sweep began.
    """
    done = sum(trial.is_ended for trial in trials)
    parts = [f"{done}/{total} trials done" if total is not None else f"{done} of {len(trials)} trials done"]
    parts += [f"{count} {word}" for word, count in _counts(trials).items() if word != "finished"]
    best = find_best(trials, metric, mode)
    if best is not None and metric is not None:
        parts.append(f"best {metric}={_shown(_last(best, metric), 20)} ({best})")
    if elapsed is not None:
        parts.append(f"{format_seconds(elapsed)} so far")
    left = estimate_seconds_left(trials, total)
    if left is not None and done < (total or 0):
        parts.append(f"about {format_seconds(left)} left")
    return escape_controls(", ".join(parts))


def format_seconds(seconds: float) -> str:
    """Return a duration in its two largest units, such as "1h 05m"."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d {hours % 24:02d}h"
    if hours:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{minutes}m {whole % 60:02d}s" if minutes else f"{whole}s"


# --------------------------------------------------------------------------- the table


@dataclass
class _Column:
    """One column as text. Columns with a greater rank are omitted first if there is no room."""

    title: str
    cells: list[str]
    rank: int
    is_number: bool = False

    @property
    def width(self) -> int:
        from rich.cells import cell_len

        return max(map(cell_len, (self.title, *self.cells)), default=0)


@dataclass
class _View:
    """The columns of a table, and the maximum length of their values."""

    metric: str | None = None
    mode: str | None = None
    metric_columns: Columns | None = None
    parameter_columns: Columns | None = None
    max_column_length: int = 20
    infer_limit: int = 3
    best: Trial | None = None

    def columns(self, rows: Sequence[Trial], trials: Sequence[Trial]) -> list[_Column]:
        """Return the columns of these rows, in display order."""
        names = [(_MARK if trial is self.best else "") + _tail(str(trial), self._longest) for trial in rows]
        found = [_Column("trial", names, 0), _Column("status", [status_of(trial) for trial in rows], 1)]
        for path, title in self._parameters(trials).items():
            found.append(self._column(title, [_parameter(trial, path) for trial in rows], 5))
        if self.metric_columns is None or "training_iteration" in self.metric_columns:
            title = _as_titles(self.metric_columns or ()).get("training_iteration", "iter")
            found.append(self._column(title, [trial.iteration or None for trial in rows], 3))
        if self.metric_columns is None or "time_total_s" in self.metric_columns:
            title = _as_titles(self.metric_columns or ()).get("time_total_s", "time")
            times = [format_seconds(_seconds(trial)) if trial.starts else "" for trial in rows]
            found.append(_Column(title, times, 6, is_number=True))
        for path, title in self._metrics(trials).items():
            rank = 2 if path == self.metric else 4
            found.append(self._column(title, [_metric(trial, path) for trial in rows], rank))
        return found

    @property
    def _longest(self) -> int:
        return max(1, self.max_column_length)

    def _column(self, title: str, values: list[Any], rank: int) -> _Column:
        cells = [_shown(value, self._longest) for value in values]
        is_number = all(isinstance(value, (int, float, type(None))) for value in values)
        return _Column(_tail(title, self._longest), cells, rank, is_number)

    def _parameters(self, trials: Sequence[Trial]) -> dict[str, str]:
        if self.parameter_columns:
            return _as_titles(self.parameter_columns)
        drawn = dict.fromkeys(path for trial in trials for path in trial.evaluated_params)
        last = [path.rpartition("/")[2] for path in drawn]
        return {path: name if last.count(name) == 1 else path for path, name in zip(drawn, last, strict=True)}

    def _metrics(self, trials: Sequence[Trial]) -> dict[str, str]:
        if self.metric_columns is not None:
            return {
                path: title
                for path, title in _as_titles(self.metric_columns).items()
                if path not in ("training_iteration", "time_total_s")
            }
        found = {self.metric: self.metric} if self.metric else {}
        reported = dict.fromkeys(path for trial in trials for path in trial.metrics)
        others = [path for path in reported if path not in _NOT_INFERRED and path != self.metric]
        return {**found, **{path: path for path in others[: max(0, self.infer_limit - len(found))]}}


def trial_table(
    trials: Sequence[Trial],
    *,
    metric: str | None = None,
    mode: str | None = None,
    metric_columns: Columns | None = None,
    parameter_columns: Columns | None = None,
    max_progress_rows: int | None = 20,
    max_column_length: int = 20,
    infer_limit: int = 3,
    sort_by_metric: bool = False,
    width: int | None = None,
) -> Table:
    """Return the table of the trials: the best first and marked, then those that run, then the others.

    Args:
        trials: The trials so far.
        metric: The metric to compare.
        mode: "max" or "min".
        metric_columns: Metrics to show, or a dict of their titles. By default ``metric`` and the first others.
        parameter_columns: Parameters to show, or a dict of their titles. By default those that were drawn.
        max_progress_rows: Maximum number of rows, besides a line with the number of omitted ones; None for all.
        max_column_length: Characters after which values and titles are shortened.
        infer_limit: Number of metrics to show if ``metric_columns`` is not given.
        sort_by_metric: Whether trials of the same state are ordered by the metric.
        width: Width of the terminal; table columns that do not fit are omitted, and counted below it.
    """
    from rich.table import Table
    from rich.text import Text

    best = find_best(trials, metric, mode)
    ordered = _in_order(trials, best, metric if sort_by_metric else None, mode)
    rows = ordered if max_progress_rows is None else ordered[: max(0, max_progress_rows)]
    view = _View(metric, mode, metric_columns, parameter_columns, max_column_length, infer_limit, best)
    columns = view.columns(rows, trials)
    fitting = _fit(columns, width)
    notes = [_count_others(ordered[len(rows) :])] if len(rows) < len(ordered) else []
    if hidden := len(columns) - len(fitting):
        notes.append(f"{hidden} column{'s' if hidden > 1 else ''} left out for lack of room")
    caption = Text("; ".join(notes), style="dim") if notes else None
    table = Table(caption=caption, caption_justify="left", width=None, pad_edge=False, show_edge=False)
    for column in fitting:
        # ``Text`` objects, because a string would be parsed as markup.
        justify: Any = "right" if column.is_number else "left"
        table.add_column(Text(column.title), justify=justify, no_wrap=True, overflow="ellipsis")
    for place, trial in enumerate(rows):
        style = "bold green" if trial is best else _STYLES.get(status_of(trial), "")
        table.add_row(*(Text(column.cells[place]) for column in fitting), style=style)
    return table


def error_table(trials: Sequence[Trial], max_error_rows: int | None = 20) -> Table | None:
    """Return the table of failed trials, newest first; None if there are none.

    Args:
        trials: The trials so far.
        max_error_rows: Maximum number of rows; None for all.
    """
    from rich.table import Table
    from rich.text import Text

    failed = [trial for trial in reversed(trials) if trial.status == states.ERROR]
    if not failed:
        return None
    rows = failed if max_error_rows is None else failed[: max(0, max_error_rows)]
    more = len(failed) - len(rows)
    table = Table(
        caption=f"{more} more failed" if more else None,
        caption_justify="left",
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("failed trial", no_wrap=True, overflow="ellipsis")
    table.add_column("starts", justify="right", no_wrap=True)
    table.add_column("error", overflow="fold", min_width=20)
    for trial in rows:
        reason = _head(trial.reason.strip().partition("\n")[0] or "unknown", 200)
        table.add_row(Text(_tail(str(trial), 30)), str(trial.starts), Text(escape_controls(reason)))
    return table


def _in_order(
    trials: Sequence[Trial], best: Trial | None, metric: str | None, mode: str | None
) -> list[Trial]:
    def key(trial: Trial) -> tuple[Any, ...]:
        word = status_of(trial)
        value = _last(trial, metric) if metric else math.nan
        score = math.inf if math.isnan(value) else -value if mode == "max" else value
        # Ended trials are listed newest first, the others oldest first.
        place = -trial.number if trial.is_ended else trial.number
        return trial is not best, _ORDER.index(word) if word in _ORDER else len(_ORDER), score, place

    return sorted(trials, key=key)


def _fit(columns: list[_Column], width: int | None) -> list[_Column]:
    """Return the columns that fit, in the same order. The first is always kept."""
    fitting = list(columns)
    # Three characters stand between two columns.
    while width is not None and len(fitting) > 1 and sum(c.width + 3 for c in fitting) - 3 > width:
        greatest = max(column.rank for column in fitting)
        fitting.remove([column for column in fitting if column.rank == greatest][-1])
    return fitting


def _counts(trials: Sequence[Trial]) -> dict[str, int]:
    words = [status_of(trial) for trial in trials]
    return {word: words.count(word) for word in (*_ORDER, *dict.fromkeys(words)) if word in words}


def _count_others(trials: Sequence[Trial]) -> str:
    counts = ", ".join(f"{count} {word}" for word, count in _counts(trials).items())
    return f"{len(trials)} more trial{'s' if len(trials) > 1 else ''} ({counts})"


def _as_titles(columns: Columns) -> dict[str, str]:
    return dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}


def _last(trial: Trial, metric: str) -> float:
    history = trial.metrics.get(metric)
    return history.last if history is not None else math.nan


def _metric(trial: Trial, path: str) -> Any:
    history = trial.metrics.get(path)
    return history.last if history is not None else _nested(trial.last_result, path)


def _parameter(trial: Trial, path: str) -> Any:
    return trial.evaluated_params[path] if path in trial.evaluated_params else _nested(trial.config, path)


def _nested(value: Any, path: str) -> Any:
    if isinstance(value, Mapping) and path in value:
        return value[path]
    for part in path.split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _seconds(trial: Trial) -> float:
    """Return the runtime of a trial; its last report may exceed the sum of its earlier starts."""
    reported = trial.last_result.get("time_total_s")
    is_number = isinstance(reported, (int, float)) and math.isfinite(reported)
    return max(trial.seconds, float(reported or 0) if is_number else 0.0)


def _shown(value: Any, longest: int) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        text = f"{value:.6g}"
    elif isinstance(value, (str, int)):
        text = str(value)
    else:
        text = shorten(value)
    return _head(escape_controls(text), longest)


def _head(text: str, longest: int) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= longest:
        return text
    return set_cell_size(text, max(0, longest - 1)).rstrip() + _ELLIPSIS


def _tail(text: str, longest: int) -> str:
    """Return the end of a name, which distinguishes the trials of one sweep."""
    from rich.cells import cell_len

    text = escape_controls(text)
    if cell_len(text) <= longest:
        return text
    while text and cell_len(text) > longest - 1:
        text = text[1:]
    return _ELLIPSIS + text
