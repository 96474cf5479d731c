"""``ResultGrid``: the results of a sweep."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.config.checks import did_you_mean
from powertrain.errors import ConfigError
from powertrain.storage.addresses import without_secrets
from powertrain.tune import trial as tr
from powertrain.tune.sweep.journal import record as sweep_record
from powertrain.tune.sweep.journal.state import SweepState, replay
from powertrain.values.arguments import as_path

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from powertrain.result.result import Result
    from powertrain.storage import Storage
    from powertrain.tune.trial import Trial

_SCOPES = ("last", "all", "avg", "last-5-avg", "last-10-avg")


class ResultGrid:
    """The results of a sweep, one for each trial in order of creation.

    ``grid[0]``, ``len(grid)`` and iteration give :class:`~powertrain.Result` objects, which read their run's directory
    when they are asked for something large.

    Example::

        for result in tuner.fit():
            print(result.metrics, result.error)
    """

    def __init__(
        self,
        storage: Storage,
        state: SweepState,
        errors: Mapping[str, BaseException] | None = None,
        filesystem: Any = None,
    ) -> None:
        self._storage, self._state, self._errors = storage, state, dict(errors or {})
        self._given_filesystem = filesystem
        for trial in state.trials.values():
            if not trial.path and filesystem is None:  # it has not been started in this process
                trial.path = storage.child(trial.name).uri

    @classmethod
    def from_path(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> ResultGrid:
        """Return the results of the sweep in this directory, also of one that still runs or was interrupted.

        Configuration values that JSON cannot represent are loaded if this user wrote them on this machine; otherwise
        their text is returned.

        Args:
            path: The directory of the sweep.
            storage_filesystem: A pyarrow or fsspec file system that ``path`` is a path of.

        Returns:
            The results of all trials so far.

        Raises:
            ConfigError: There is no sweep.

        Example::

            grid = ResultGrid.from_path("~/powertrain_runs/search")
        """
        from powertrain.storage import open_storage

        storage = open_storage(
            as_path(path, "ResultGrid.from_path(path=...)"), filesystem=storage_filesystem, timeout=30.0
        )
        sweep_record.read(storage)
        state = replay(sweep_record.read_journal(storage), sweep_record.ConfigReader(storage))
        return cls(storage, state, filesystem=storage_filesystem)

    @property
    def experiment_path(self) -> str:
        """The directory of the sweep."""
        return without_secrets(self._storage.uri)

    @property
    def filesystem(self) -> Any:
        """The file system of the sweep; None if its path names it."""
        return self._given_filesystem

    @property
    def trials(self) -> list[Trial]:
        """The trials, with their configurations and the history of their metrics."""
        return list(self._state.trials.values())

    def __len__(self) -> int:
        return len(self._state.trials)

    def __getitem__(self, index: int) -> Result:
        return self._result(self.trials[index])

    def __iter__(self) -> Iterator[Result]:
        return (self._result(trial) for trial in self.trials)

    @property
    def errors(self) -> list[BaseException]:
        """The exceptions of the failed trials."""
        return [self._error(trial) for trial in self.trials if trial.status == tr.ERROR]

    @property
    def num_errors(self) -> int:
        """The number of failed trials."""
        return sum(trial.status == tr.ERROR for trial in self.trials)

    @property
    def num_terminated(self) -> int:
        """The number of trials that have ended well, or were stopped early."""
        return sum(trial.status == tr.TERMINATED for trial in self.trials)

    def get_best_result(
        self,
        metric: str | None = None,
        mode: str | None = None,
        scope: str = "last",
        filter_nan_and_inf: bool = True,
    ) -> Result:
        """Return the result of the best trial.

        Args:
            metric: The metric to compare; by default that of ``TuneConfig``.
            mode: "max" or "min"; by default that of ``TuneConfig``.
            scope: The value of each trial to compare: its "last" report, the best of "all", their average ("avg"), or
                the average of the last reports ("last-5-avg", "last-10-avg").
            filter_nan_and_inf: Whether trials with a non-finite value are skipped.

        Returns:
            The result. That of a single trial needs neither metric nor mode.

        Raises:
            ConfigError: There is no metric or mode, or no trial has reported the metric.

        Example::

            best = grid.get_best_result(metric="loss", mode="min")
        """
        if len(self) == 1 and not (metric or self._state.metric):
            return self[0]
        return self._result(self._best_trial(metric, mode, scope, filter_nan_and_inf))

    def _best_trial(
        self, metric: str | None, mode: str | None, scope: str, filter_nan_and_inf: bool
    ) -> Trial:
        metric, mode = self._metric(metric), self._mode(mode)
        if scope not in _SCOPES:
            raise ConfigError(f"scope={scope!r} is not one of {', '.join(map(repr, _SCOPES))}.")
        values = {
            trial.trial_id: trial.metrics[metric].value(scope, mode)
            for trial in self.trials
            if metric in trial.metrics
        }
        if filter_nan_and_inf:
            values = {trial: value for trial, value in values.items() if math.isfinite(value)}
        else:
            values = {trial: value for trial, value in values.items() if not math.isnan(value)}
        if not values:
            raise ConfigError(self._no_value(metric))
        best = (max if mode == "max" else min)(values, key=lambda trial: values[trial])
        return self._state.trials[best]

    def get_dataframe(self, filter_metric: str | None = None, filter_mode: str | None = None) -> pd.DataFrame:
        """Return one row for each trial: its last report, or the one in which a metric was best.

        Args:
            filter_metric: Take the report of each trial in which this metric was best.
            filter_mode: "max" or "min".

        Returns:
            A DataFrame with a column for each metric, and "config/..." for each value of the configuration.

        Raises:
            ConfigError: Only one of the two is given.

        Example::

            grid.get_dataframe("loss", "min").sort_values("loss")
        """
        import pandas as pd

        if (filter_metric is None) != (filter_mode is None):
            raise ConfigError("get_dataframe needs both filter_metric and filter_mode, or neither.")
        rows = []
        for trial in self.trials:
            report = trial.last_result
            if filter_metric is not None:
                report = self._best_report(trial, filter_metric, str(filter_mode)) or report
            shown = {key: value for key, value in report.items() if key != "config"}
            rows.append(
                {
                    **tr.flat_values(shown),
                    "trial_id": trial.trial_id,
                    "logdir": trial.name,
                    **tr.flat_values(trial.config, "config/"),
                }
            )
        return pd.DataFrame(rows)

    def plot(self, metric: str | None = None, mode: str | None = None) -> Figure:
        """Return a figure: learning curves, parallel coordinates, and how much each parameter matters.

        Args:
            metric: The metric to show; by default that of ``TuneConfig``.
            mode: "max" or "min".

        Returns:
            A matplotlib figure.

        Raises:
            ConfigError: There is no metric or mode.

        Example::

            grid.plot("loss", "min").savefig("sweep.png")
        """
        from powertrain.tune.plots import draw_sweep

        return draw_sweep(self, self._metric(metric), self._mode(mode))

    def curves(self, metric: str) -> dict[str, list[tuple[int, float]]]:
        """Return by trial its reports of a metric, as (iteration, value) pairs.

        Args:
            metric: The name of the metric.
        """
        from powertrain.checkpoint.manifest import from_json_value
        from powertrain.tune.sweep.journal.events import TrialReported

        found: dict[str, dict[int, float]] = {trial.trial_id: {} for trial in self.trials}
        for event in sweep_record.read_journal(self._storage):
            if isinstance(event, TrialReported) and event.trial in found:
                numbers = dict(tr.flat_numbers(from_json_value(event.metrics)))
                if metric in numbers:
                    found[event.trial].setdefault(event.iteration, numbers[metric])
        return {trial: sorted(points.items()) for trial, points in found.items()}

    def __repr__(self) -> str:
        return (
            f"ResultGrid({len(self)} trials, {self.num_terminated} terminated, {self.num_errors} failed, "
            f"path={self.experiment_path!r})"
        )

    def _repr_html_(self) -> str:
        from powertrain.tune.grid_view import render_grid

        return render_grid(self.trials, self.experiment_path, self._state.metric, self._state.mode)

    # ------------------------------------------------------------------ helpers

    def _best_report(self, trial: Trial, metric: str, mode: str) -> dict[str, Any] | None:
        from powertrain.checkpoint.manifest import from_json_value
        from powertrain.tune.sweep.journal.events import TrialReported
        from powertrain.tune.sweep.journal.state import result_of

        best: tuple[float, TrialReported, float] | None = None
        sign, before = (1.0 if mode == "max" else -1.0), 0.0
        for event in self._reports().get(trial.trial_id, ()):
            value = dict(tr.flat_numbers(from_json_value(event.metrics))).get(metric, math.nan)
            if not math.isnan(value) and (best is None or sign * value > best[0]):
                best = (sign * value, event, max(0.0, event.seconds - before))
            before = event.seconds
        if best is None:
            return None
        return {**result_of(trial, best[1]), "time_this_iter_s": best[2]}

    def _reports(self) -> dict[str, list[Any]]:
        from powertrain.tune.sweep.journal.events import TrialReported

        if not hasattr(self, "_by_trial"):
            self._by_trial: dict[str, list[Any]] = {}
            for event in sweep_record.read_journal(self._storage):
                if isinstance(event, TrialReported):
                    self._by_trial.setdefault(event.trial, []).append(event)
        return self._by_trial

    def _result(self, trial: Trial) -> Result:
        from powertrain.result.result import Result

        error = self._error(trial) if trial.status == tr.ERROR else None
        result = Result(
            path=self._storage.child(trial.name).uri,
            state={tr.ERROR: "failed", tr.TERMINATED: "finished"}.get(trial.status, "running"),
            reason=trial.reason,
            metrics=dict(trial.last_result) if trial.last_result else None,
            config=trial.config,
            storage_filesystem=self._given_filesystem,
        )
        result.error = error
        return result

    def _error(self, trial: Trial) -> BaseException:
        from powertrain.errors import TrialFailedError

        found = self._errors.get(trial.trial_id)
        return found if found is not None else TrialFailedError(trial.reason or f"{trial} has failed")

    def _metric(self, given: str | None) -> str:
        metric = given or self._state.metric
        if not metric:
            raise ConfigError(
                "Which metric is compared is not known. Give metric=..., or set TuneConfig(metric=...)."
            )
        return metric

    def _mode(self, given: str | None) -> str:
        mode = given or self._state.mode
        if not mode:
            raise ConfigError(
                "Whether the metric is to be small or large is not known. Give mode='min' or 'max', or set "
                "TuneConfig(mode=...)."
            )
        if mode not in ("min", "max"):
            raise ConfigError(
                f"mode={mode!r} is neither 'min' nor 'max'. Give mode=..., or set TuneConfig(mode=...)."
            )
        return mode

    def _no_value(self, metric: str) -> str:
        known = sorted({name for trial in self.trials for name in trial.metrics})
        if not known:
            reasons = [trial.reason for trial in self.trials if trial.reason]
            why = (
                f" The first of {self.num_errors} failed: {reasons[0]}" if self.num_errors and reasons else ""
            )
            return f"No trial has reported anything.{why}"
        if metric in known:
            return f"No trial has a finite {metric!r}: what they reported is NaN or infinite."
        hint = did_you_mean(metric, known)
        return f"No trial has a finite {metric!r}. {hint}Reported were {', '.join(map(repr, known))}."
