"""``tune.run``: a sweep in one call, for scripts written before there was a Tuner."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from powertrain.config.checkpoint import CheckpointConfig, SyncConfig
from powertrain.config.checks import as_config, replace
from powertrain.config.failure import FailureConfig
from powertrain.config.run import RunConfig
from powertrain.driver.checks import checkpoint_to_begin_from
from powertrain.errors import ConfigError, TuneError
from powertrain.text.loggers import module_logger
from powertrain.tune.config import ResumeConfig, ResumeType, TuneConfig
from powertrain.tune.registry import find_trainable
from powertrain.tune.trainable import with_resources
from powertrain.tune.trial import flat_values
from powertrain.tune.tuner import Tuner
from powertrain.values.arguments import shorten

if TYPE_CHECKING:
    import pandas as pd

    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.result.result import Result
    from powertrain.tune.result_grid import ResultGrid
    from powertrain.tune.trial import Trial

logger = module_logger(__name__)

#: What the parts of ``resume="AUTO+..."`` say of trials that failed, and of those that were under way.
_RESUME_PARTS = {
    "AUTO": ResumeConfig(),
    "ERRORED": ResumeConfig(errored=ResumeType.RESUME),
    "RESTART_ERRORED": ResumeConfig(errored=ResumeType.RESTART),
    "ERRORED_ONLY": ResumeConfig(unfinished=ResumeType.SKIP, errored=ResumeType.RESUME),
    "RESTART_ERRORED_ONLY": ResumeConfig(unfinished=ResumeType.SKIP, errored=ResumeType.RESTART),
}


def run(
    run_or_experiment: Any,
    *,
    name: str | None = None,
    metric: str | None = None,
    mode: str | None = None,
    stop: Any = None,
    time_budget_s: float | timedelta | None = None,
    config: Mapping[str, Any] | None = None,
    resources_per_trial: Any = None,
    num_samples: int = 1,
    storage_path: str | None = None,
    storage_filesystem: Any = None,
    search_alg: Any = None,
    scheduler: Any = None,
    checkpoint_config: CheckpointConfig | None = None,
    verbose: int | None = None,
    progress_reporter: Any = None,
    log_to_file: bool = False,
    trial_name_creator: Callable[[Any], str] | None = None,
    trial_dirname_creator: Callable[[Any], str] | None = None,
    sync_config: SyncConfig | None = None,
    export_formats: Sequence[str] | None = None,
    max_failures: int = 0,
    fail_fast: bool | str = False,
    restore: str | os.PathLike[str] | None = None,
    resume: bool | str | None = None,
    resume_config: ResumeConfig | None = None,
    reuse_actors: bool = False,
    raise_on_failed_trial: bool = True,
    callbacks: Sequence[Any] | None = None,
    max_concurrent_trials: int | None = None,
    keep_checkpoints_num: int | None = None,
    checkpoint_score_attr: str | None = None,
    checkpoint_freq: int = 0,
    checkpoint_at_end: bool = False,
    chdir_to_trial_dir: bool | None = None,
    local_dir: str | None = None,
) -> ExperimentAnalysis:
    """Run a sweep and return its analysis. :class:`~powertrain.tune.Tuner` does the same with configs.

    Args:
        run_or_experiment: A function of the configuration, a ``Trainable`` class, or a trainer.
        name: The name of the sweep.
        metric: The metric by which trials are compared.
        mode: "min" or "max".
        stop: When a trial ends: a dict of limits, a function or a ``Stopper``.
        time_budget_s: Seconds after which the sweep ends.
        config: The search space.
        resources_per_trial: Such as ``{"cpu": 2, "gpu": 1}``.
        num_samples: How many configurations are drawn.
        storage_path: The directory that the sweep's directory is made in.
        storage_filesystem: A pyarrow or fsspec file system that ``storage_path`` is a path of.
        search_alg: Which configurations are tried.
        scheduler: Which trials continue.
        checkpoint_config: Which checkpoints are kept.
        verbose: What the terminal shows.
        progress_reporter: Shows the trials in place of the table.
        log_to_file: Whether the output of trials goes to files only.
        trial_name_creator: Returns the name of a trial.
        trial_dirname_creator: Returns the name of a trial's directory.
        sync_config: How files reach a remote storage path.
        export_formats: No effect: call ``export_model`` in the trainable.
        max_failures: How often a trial is started again after a failure.
        fail_fast: Whether the first failed trial ends the sweep.
        restore: A checkpoint that trials begin from.
        resume: True or "AUTO" continues a sweep of the same name, which happens in any case. "AUTO+ERRORED" also
            continues its failed trials, "AUTO+RESTART_ERRORED" begins them anew; "AUTO+ERRORED_ONLY" and
            "AUTO+RESTART_ERRORED_ONLY" do so and leave those that were under way.
        resume_config: The same with a config.
        reuse_actors: No effect: each trial has processes of its own.
        raise_on_failed_trial: Whether failed trials raise :class:`TuneError` at the end.
        callbacks: Callbacks of the sweep.
        max_concurrent_trials: How many trials run at a time, at most.
        keep_checkpoints_num: ``CheckpointConfig(num_to_keep=...)``.
        checkpoint_score_attr: ``CheckpointConfig(checkpoint_score_attribute=...)``; with "min-" before it for small.
        checkpoint_freq: ``CheckpointConfig(checkpoint_frequency=...)``.
        checkpoint_at_end: ``CheckpointConfig(checkpoint_at_end=...)``.
        chdir_to_trial_dir: No effect: ranks work in the directory of the script.
        local_dir: ``storage_path``, as it was called once.

    Raises:
        ConfigError: An argument cannot be used.
        TuneError: A trial has failed, and ``raise_on_failed_trial`` is True.

    Example::

        analysis = tune.run(train, config={"lr": tune.loguniform(1e-4, 1e-1)}, num_samples=16, metric="loss",
        mode="min")
        print(analysis.best_config)
    """
    trainable = run_or_experiment
    if resources_per_trial is not None:
        trainable = find_trainable(trainable) if isinstance(trainable, str) else trainable
        trainable = with_resources(trainable, resources_per_trial)
    resume_config = resume_config or _as_resume_config(resume)
    checkpoints = _with_older_arguments(
        checkpoint_config, keep_checkpoints_num, checkpoint_score_attr, checkpoint_freq, checkpoint_at_end
    )
    _tell_without_effect(export_formats, resume_config)
    tuner = Tuner(
        trainable,
        param_space=config,
        tune_config=TuneConfig(
            metric=metric,
            mode=mode,
            search_alg=search_alg,
            scheduler=scheduler,
            num_samples=num_samples,
            max_concurrent_trials=max_concurrent_trials,
            time_budget_s=time_budget_s,
            reuse_actors=reuse_actors,
            trial_name_creator=trial_name_creator,
            trial_dirname_creator=trial_dirname_creator,
            chdir_to_trial_dir=chdir_to_trial_dir,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=storage_path if storage_path is not None else local_dir,
            storage_filesystem=storage_filesystem,
            stop=stop,
            checkpoint_config=checkpoints,
            failure_config=FailureConfig(max_failures=max_failures, fail_fast=fail_fast),
            sync_config=sync_config or SyncConfig(),
            verbose=verbose,
            progress_reporter=progress_reporter,
            log_to_file=log_to_file,
            callbacks=callbacks or (),
        ),
    )
    tuner._resume = resume_config
    if restore is not None:
        from powertrain.checkpoint.checkpoint import Checkpoint

        tuner._base._request.begin_from = checkpoint_to_begin_from(Checkpoint(restore))
    grid = tuner.fit()
    if raise_on_failed_trial and grid.num_errors:
        raise TuneError(
            f"{grid.num_errors} of {len(grid)} trials have failed, the first with: {grid.errors[0]}. Their runs are in "
            f"{grid.experiment_path}. raise_on_failed_trial=False returns the others."
        )
    return ExperimentAnalysis(grid, metric, mode)


def _as_resume_config(resume: bool | str | None) -> ResumeConfig | None:
    """Which trials run again; None for the usual."""
    if resume is None or isinstance(resume, bool):
        return None
    first, *others = resume.split("+") if isinstance(resume, str) else [""]
    known = first == "AUTO" or (first in _RESUME_PARTS and not others)
    if not known or any(part not in _RESUME_PARTS for part in others):
        forms = ", ".join(repr(f"AUTO+{part}") for part in _RESUME_PARTS if part != "AUTO")
        raise ConfigError(f"tune.run(resume={shorten(resume)}) is none of True, False, 'AUTO', {forms}.")
    return _RESUME_PARTS[others[-1] if others else first]


def _with_older_arguments(
    given: CheckpointConfig | None, most: int | None, score: str | None, frequency: int, at_end: bool
) -> CheckpointConfig:
    config: CheckpointConfig = as_config(given, CheckpointConfig, "tune.run(checkpoint_config=...)")
    changes: dict[str, Any] = {}
    if most is not None:
        changes["num_to_keep"] = most
    if score is not None:
        is_small = score.startswith("min-")
        changes["checkpoint_score_attribute"] = score.removeprefix("min-")
        changes["checkpoint_score_order"] = "min" if is_small else "max"
    if frequency:
        changes["checkpoint_frequency"] = frequency
    if at_end:
        changes["checkpoint_at_end"] = True
    return replace(config, **changes) if changes else config


def _tell_without_effect(export_formats: Sequence[str] | None, resume: ResumeConfig | None) -> None:
    ineffective = []
    if export_formats:
        ineffective.append(
            f"tune.run(export_formats={shorten(export_formats)}) (call export_model() in the trainable)"
        )
    if resume is not None and resume.finished is not ResumeType.SKIP:
        ineffective.append("ResumeConfig(finished=...) (trials that ended well stay as they are)")
    if ineffective:
        logger.warning("Accepted as in Ray, but without effect here: %s.", "; ".join(ineffective))


class ExperimentAnalysis:
    """The results of :func:`run`, with the names that scripts for it use.

    Args:
        grid: The results.
        default_metric: The metric to compare.
        default_mode: "min" or "max".
    """

    def __init__(
        self, grid: ResultGrid, default_metric: str | None = None, default_mode: str | None = None
    ) -> None:
        self.result_grid = grid
        self.default_metric, self.default_mode = default_metric, default_mode

    @property
    def trials(self) -> list[Trial]:
        """All trials."""
        return self.result_grid.trials

    @property
    def experiment_path(self) -> str:
        """The directory of the sweep."""
        return self.result_grid.experiment_path

    @property
    def best_trial(self) -> Trial:
        """The best trial."""
        return self._need(self.get_best_trial())

    @property
    def best_config(self) -> dict[str, Any]:
        """The configuration of the best trial."""
        return self.best_trial.config

    @property
    def best_result(self) -> dict[str, Any]:
        """The last report of the best trial."""
        return self.best_trial.last_result

    @property
    def best_logdir(self) -> str:
        """The directory of the best trial."""
        return self._result(self.best_trial).path

    @property
    def best_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of the best trial."""
        return self._result(self.best_trial).checkpoint

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """By trial id its last report."""
        return {trial.trial_id: trial.last_result for trial in self.trials}

    @property
    def results_df(self) -> pd.DataFrame:
        """One row for each trial, by trial id."""
        return self.dataframe().set_index("trial_id")

    @property
    def trial_dataframes(self) -> dict[str, pd.DataFrame]:
        """By trial id all of its reports."""
        return {trial.trial_id: self._result(trial).metrics_dataframe for trial in self.trials}

    @property
    def best_dataframe(self) -> pd.DataFrame:
        """All reports of the best trial."""
        return self._result(self.best_trial).metrics_dataframe

    @property
    def best_result_df(self) -> pd.DataFrame:
        """The last report of the best trial, as the row of that trial."""
        return self.results_df.loc[[self.best_trial.trial_id]]

    def get_all_configs(self, prefix: bool = False) -> dict[str, dict[str, Any]]:
        """Return the configurations by trial id.

        Args:
            prefix: Whether they are flat, with names such as "config/a/b".
        """
        return {
            trial.trial_id: flat_values(trial.config, "config/") if prefix else trial.config
            for trial in self.trials
        }

    def dataframe(self, metric: str | None = None, mode: str | None = None) -> pd.DataFrame:
        """Return one row for each trial: its last report, or that in which the metric was best.

        Args:
            metric: Take the report of each trial in which this metric was best; None for the last report.
            mode: "max" or "min".
        """
        return self.result_grid.get_dataframe(metric, (mode or self.default_mode) if metric else None)

    def get_best_trial(
        self,
        metric: str | None = None,
        mode: str | None = None,
        scope: str = "last",
        filter_nan_and_inf: bool = True,
    ) -> Trial | None:
        """Return the best trial; None where none has reported the metric.

        Args:
            metric: The metric to compare; by default that of the sweep.
            mode: "max" or "min"; by default that of the sweep.
            scope: The reports of each trial that are compared, as for ``ResultGrid.get_best_result``.
            filter_nan_and_inf: Whether trials whose value is not finite are passed over.

        Raises:
            ConfigError: There is no metric or mode.
        """
        try:
            return self.result_grid._best_trial(
                metric or self.default_metric, mode or self.default_mode, scope, filter_nan_and_inf
            )
        except ConfigError:
            if not (metric or self.default_metric) or not (mode or self.default_mode):
                raise
            return None

    def get_best_config(
        self, metric: str | None = None, mode: str | None = None, scope: str = "last"
    ) -> dict[str, Any] | None:
        """Return the configuration of the best trial; None where none has reported the metric.

        Args:
            metric: The metric to compare; by default that of the sweep.
            mode: "max" or "min"; by default that of the sweep.
            scope: As for :meth:`get_best_trial`.
        """
        best = self.get_best_trial(metric, mode, scope)
        return best.config if best is not None else None

    def get_best_checkpoint(
        self, trial: Trial, metric: str | None = None, mode: str | None = None
    ) -> Checkpoint | None:
        """Return the best checkpoint of a trial; without a metric the newest.

        Args:
            trial: The trial.
            metric: The metric to compare; by default that of the sweep.
            mode: "max" or "min"; by default that of the sweep.
        """
        result = self._result(trial)
        metric, mode = metric or self.default_metric, mode or self.default_mode
        if not metric or not mode:
            return result.checkpoint
        return result.get_best_checkpoint(metric, mode)

    def get_last_checkpoint(self, trial: Trial | None = None) -> Checkpoint | None:
        """Return the newest checkpoint of a trial.

        Args:
            trial: The trial; by default the best.
        """
        return self._result(trial or self.best_trial).checkpoint

    def _result(self, trial: Trial) -> Result:
        return self.result_grid[trial.number]

    def _need(self, trial: Trial | None) -> Trial:
        if trial is None:
            raise ConfigError(
                f"No trial has reported {self.default_metric!r}. Use get_best_trial(metric=..., mode=...)."
            )
        return trial
