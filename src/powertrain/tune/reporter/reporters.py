"""Progress of a sweep for a terminal or a notebook: ``RunConfig(progress_reporter=...)``.

Reporters determine when and where :func:`~powertrain.tune.reporter.table.summary_line` and
:func:`~powertrain.tune.reporter.table.trial_table` are shown.
"""

from __future__ import annotations

import io
import math
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.text.printable import escape_controls
from powertrain.tune.reporter.table import error_table, summary_line, trial_table
from powertrain.tune.trial import Trial
from powertrain.values.arguments import shorten

if TYPE_CHECKING:
    from rich.console import RenderableType


class ProgressReporter:
    """Base class of reporters.

    The sweep calls :meth:`setup` once, then :meth:`should_report` after each event, and :meth:`report` where that is
    True.
    """

    def setup(
        self,
        start_time: float | None = None,
        total_samples: int | None = None,
        metric: str | None = None,
        mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Prepare for a sweep.

        Args:
            start_time: Start time (``time.time()``).
            total_samples: Total number of trials, if known.
            metric: The metric of ``TuneConfig``.
            mode: The mode of ``TuneConfig``.
            **kwargs: Reserved for later versions.
        """

    def should_report(self, trials: list[Trial], done: bool = False) -> bool:
        """Return whether :meth:`report` is to be called now.

        Args:
            trials: The trials so far.
            done: Whether the sweep has ended.
        """
        raise NotImplementedError

    def report(self, trials: list[Trial], done: bool, *sys_info: str) -> None:
        """Show the progress.

        Args:
            trials: The trials so far.
            done: Whether the sweep has ended.
            *sys_info: Lines about the machine to show with it.
        """
        raise NotImplementedError


class TuneReporterBase(ProgressReporter):
    """Common base of the reporters for terminals and notebooks.

    Args:
        metric_columns: Metrics to show, or a dict of their titles. By default ``metric`` and the first others.
        parameter_columns: Parameters to show, or a dict of their titles. By default those that were drawn.
        total_samples: Total number of trials, if known.
        max_progress_rows: Trials in the table; the last table has all.
        max_error_rows: Trials in the table of failures; the last table has all.
        max_column_length: Characters after which values and titles are shortened.
        max_report_frequency: Minimum seconds between two reports.
        infer_limit: Number of metrics to show if ``metric_columns`` is not given.
        print_intermediate_tables: False shows the tables at the end only, and the summary line before.
        metric: The metric to compare; by default that of ``TuneConfig``.
        mode: "max" or "min".
        sort_by_metric: Whether trials of the same state are ordered by the metric.
    """

    def __init__(
        self,
        *,
        metric_columns: list[str] | dict[str, str] | None = None,
        parameter_columns: list[str] | dict[str, str] | None = None,
        total_samples: int | None = None,
        max_progress_rows: int = 20,
        max_error_rows: int = 20,
        max_column_length: int = 20,
        max_report_frequency: float = 5,
        infer_limit: int = 3,
        print_intermediate_tables: bool | None = None,
        metric: str | None = None,
        mode: str | None = None,
        sort_by_metric: bool = False,
    ) -> None:
        for name, columns in (("metric_columns", metric_columns), ("parameter_columns", parameter_columns)):
            if columns is not None and not isinstance(columns, (list, tuple, Mapping)):
                raise ConfigError(f"{type(self).__name__}({name}={shorten(columns)}) takes a list or a dict.")
        if mode not in (None, "min", "max"):
            raise ConfigError(f"{type(self).__name__}(mode={shorten(mode)}) is neither 'min' nor 'max'.")
        # Copies: columns may be added.
        self._metric_columns = _copied(metric_columns)
        self._parameter_columns = _copied(parameter_columns)
        self._total_samples = total_samples
        self._max_progress_rows, self._max_error_rows = max_progress_rows, max_error_rows
        self._max_column_length, self._infer_limit = max_column_length, infer_limit
        self._seconds_between = max_report_frequency
        self._has_intermediate_tables = print_intermediate_tables is not False
        self._metric, self._mode, self._sort_by_metric = metric, mode, sort_by_metric
        self._start_time = time.time()
        self._last_report = -math.inf

    def setup(
        self,
        start_time: float | None = None,
        total_samples: int | None = None,
        metric: str | None = None,
        mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        """See :meth:`ProgressReporter.setup`."""
        self.set_start_time(start_time)
        self.set_total_samples(total_samples if total_samples is not None else self._total_samples)
        self.set_search_properties(metric, mode)

    def set_search_properties(self, metric: str | None, mode: str | None) -> bool:
        """Set metric and mode from ``TuneConfig``.

        Raises:
            ConfigError: The reporter was created with others.
        """
        for name, own, given in (("metric", self._metric, metric), ("mode", self._mode, mode)):
            if own is not None and given is not None and own != given:
                raise ConfigError(
                    f"TuneConfig({name}={given!r}) and {type(self).__name__}({name}={own!r}) differ. Give it once."
                )
        self._metric, self._mode = self._metric or metric, self._mode or mode
        return True

    def set_total_samples(self, total_samples: int | None) -> None:
        """Set the total number of trials."""
        self._total_samples = total_samples

    def set_start_time(self, timestamp: float | None = None) -> None:
        """Set the start time of the sweep (``time.time()``); None for now."""
        self._start_time = time.time() if timestamp is None else timestamp

    def should_report(self, trials: list[Trial], done: bool = False) -> bool:
        """Return True at the end, and before it as often as ``max_report_frequency`` allows."""
        now = time.monotonic()
        if now - self._last_report > self._seconds_between:
            self._last_report = now
            return True
        return done

    def add_metric_column(self, metric: str, representation: str | None = None) -> None:
        """Show one more metric.

        Args:
            metric: Its name.
            representation: Its title; only if the columns were given as a dict, or not at all.

        Raises:
            ConfigError: It is shown already, or cannot be shown under another name.
        """
        shown = self._metric_columns
        if shown is None:
            shown = {"training_iteration": "iter", "time_total_s": "time"}
            shown |= {self._metric: self._metric} if self._metric else {}
        self._metric_columns = _with_column(shown, metric, representation, "metric")

    def add_parameter_column(self, parameter: str, representation: str | None = None) -> None:
        """Show one more parameter. Arguments and errors as for :meth:`add_metric_column`."""
        shown = {} if self._parameter_columns is None else self._parameter_columns
        self._parameter_columns = _with_column(shown, parameter, representation, "parameter")

    def renderables(
        self, trials: list[Trial], done: bool, *sys_info: str, width: int | None = None
    ) -> list[RenderableType]:
        """Return the parts of a report: the summary line, the lines about the machine, and the tables.

        Args:
            trials: The trials so far.
            done: Whether the sweep has ended.
            *sys_info: Lines about the machine.
            width: Columns of the terminal; None for as many as are needed.
        """
        from rich.text import Text

        line = summary_line(
            trials,
            total=self._total_samples,
            metric=self._metric,
            mode=self._mode,
            elapsed=time.time() - self._start_time,
        )
        shown: list[RenderableType] = [
            Text(line),
            *(Text(escape_controls(text)) for text in sys_info if text),
        ]
        if trials and (done or self._has_intermediate_tables):
            shown.append(
                trial_table(
                    trials,
                    metric=self._metric,
                    mode=self._mode,
                    metric_columns=self._metric_columns,
                    parameter_columns=self._parameter_columns,
                    max_progress_rows=None if done else self._max_progress_rows,
                    max_column_length=self._max_column_length,
                    infer_limit=self._infer_limit,
                    sort_by_metric=self._sort_by_metric,
                    width=width,
                )
            )
            errors = error_table(trials, None if done else self._max_error_rows)
            shown += [errors] if errors is not None else []
        return shown


class CLIReporter(TuneReporterBase):
    """Prints the progress of a sweep to standard output. Arguments as for :class:`TuneReporterBase`.

    Example::

        RunConfig(progress_reporter=CLIReporter(metric_columns=["loss", "accuracy"]))
    """

    def report(self, trials: list[Trial], done: bool, *sys_info: str) -> None:
        """Print the progress."""
        from rich.console import Console

        # Created each time: standard output may have been replaced, and the terminal resized.
        console = Console(file=sys.stdout)
        for shown in self.renderables(trials, done, *sys_info, width=console.width):
            console.print(shown)


class JupyterNotebookReporter(TuneReporterBase):
    """Show the progress of a sweep below a notebook's cell, each report replacing the previous one.

    Args:
        overwrite: Whether earlier output of the cell is removed first.
        **kwargs: As for :class:`TuneReporterBase`.

    Example::

        RunConfig(progress_reporter=JupyterNotebookReporter(max_progress_rows=10))
    """

    def __init__(self, *, overwrite: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._overwrite = overwrite
        self._handle: Any = None

    def report(self, trials: list[Trial], done: bool, *sys_info: str) -> None:
        """Show the progress."""
        self.display(self._as_html(self.renderables(trials, done, *sys_info)))

    def display(self, string: str) -> None:
        """Show HTML in place of the previous report.

        Raises:
            ConfigError: IPython is not installed.
        """
        try:
            ipython = import_module("IPython.display")
        except ImportError as error:
            raise ConfigError(
                "JupyterNotebookReporter shows its progress in a notebook, and IPython is not installed. Use "
                "CLIReporter in a terminal, or install it: pip install ipython."
            ) from error
        if self._handle is not None:
            self._handle.update(ipython.HTML(string))
            return
        if self._overwrite:
            ipython.clear_output(wait=True)
        self._handle = ipython.display(ipython.HTML(string), display_id=True)

    @staticmethod
    def _as_html(shown: Sequence[RenderableType]) -> str:
        from rich.console import Console

        # Wide, because a notebook scrolls; without output, because only the recording is used.
        console = Console(record=True, file=io.StringIO(), width=240, force_jupyter=False)
        for one in shown:
            console.print(one)
        styled = console.export_html(inline_styles=True, code_format="{code}")
        return f'<pre style="line-height: normal; white-space: pre">{styled}</pre>'


def _copied(columns: Any) -> list[str] | dict[str, str] | None:
    if columns is None:
        return None
    return dict(columns) if isinstance(columns, Mapping) else list(columns)


def _with_column(
    columns: list[str] | dict[str, str], name: str, representation: str | None, kind: str
) -> list[str] | dict[str, str]:
    if name in columns:
        raise ConfigError(f"The column {name!r} is shown already. Leave out add_{kind}_column({name!r}).")
    if isinstance(columns, dict):
        return {**columns, name: representation or name}
    if representation not in (None, name):
        raise ConfigError(
            f"add_{kind}_column({name!r}, {representation!r}): the columns were given as a list, which has no other "
            f"names. Give {kind}_columns as a dict."
        )
    return [*columns, name]
