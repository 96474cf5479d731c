"""``TuneConfig``: the search of a sweep; ``ResumeConfig``: the trials that a restored sweep runs again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

from powertrain.config.checks import Config, Refusal, flag, ignored, option, optional, positive, whole
from powertrain.tune.schedulers.base import TrialScheduler, find_other_signature
from powertrain.tune.search.base import Searcher
from powertrain.values.arguments import shorten

_SCHEDULERS_HINT = "Give an object such as tune.schedulers.ASHAScheduler(max_t=100), or its name 'asha'."


def _one_or_several(value: Any, check: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)) and value:
        return [check(item) for item in value]
    return check(value)


def _metric(value: Any) -> Any:
    def check(item: Any) -> str:
        if not isinstance(item, str) or not item:
            raise Refusal(
                "it does not name a metric", "Give the name of a metric that is reported, such as 'loss'."
            )
        return item

    return _one_or_several(value, check)


def _mode(value: Any) -> Any:
    def check(item: Any) -> str:
        if item not in ("min", "max"):
            raise Refusal("it is neither 'min' nor 'max'", "Use 'min' for a loss and 'max' for an accuracy.")
        return str(item)

    return _one_or_several(value, check)


def _search_alg(value: Any) -> Any:
    if isinstance(value, (str, Searcher)):
        return value
    if isinstance(value, type) and issubclass(value, Searcher):
        raise Refusal(f"{value.__name__} is a class", f"Write {value.__name__}(...).")
    raise Refusal(
        f"{shorten(value)} is not a search algorithm of powertrain.tune",
        "Use tune.search.optuna.OptunaSearch(), or 'auto'.",
    )


def _scheduler(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, TrialScheduler):
        if shown := find_other_signature(value):
            raise Refusal(
                f"{shown} is written for Ray Tune",
                "Here a scheduler gets the id of a trial and its report, and returns a list of Decision: see "
                "powertrain.tune.schedulers.TrialScheduler.",
            )
        return value
    if isinstance(value, type) and issubclass(value, TrialScheduler):
        raise Refusal(f"{value.__name__} is a class", f"Write {value.__name__}(...).")
    raise Refusal(f"{shorten(value)} is not a scheduler of powertrain.tune", _SCHEDULERS_HINT)


def _num_samples(value: Any) -> int:
    number = whole(at_least=-1)(value)
    if number == 0:
        raise Refusal("no trial would run", "Use at least 1, or -1 for as many as the time budget allows.")
    return int(number)


def _budget(value: Any) -> float:
    return positive(value.total_seconds() if isinstance(value, timedelta) else value)


def _function(value: Any) -> Any:
    if not callable(value):
        raise Refusal(
            f"{shorten(value)} is not a function", "Give a function of the trial that returns a name."
        )
    return value


@dataclass(frozen=True, repr=False)
class TuneConfig(Config):
    """Search of a sweep: metric, searcher, scheduler and number of trials.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value.

    Example::

        tune.Tuner(train, tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=16))
    """

    mode: str | list[str] | None = option(None, optional(_mode))
    """Whether the metric is to be small ("min") or large ("max"); a list for several objectives."""

    metric: str | list[str] | None = option(None, optional(_metric))
    """The reported metric by which trials are compared; a list for several objectives."""

    search_alg: Searcher | str | None = option(None, optional(_search_alg))
    """Which configurations are tried: None for random draws and grids, "auto" for Optuna where it is installed, or a
    searcher such as ``tune.search.optuna.OptunaSearch()``."""

    scheduler: TrialScheduler | str | None = option(None, optional(_scheduler))
    """Which trials continue: None for all to their end, or a scheduler such as
    ``tune.schedulers.ASHAScheduler(max_t=100)``."""

    num_samples: int = option(1, _num_samples)
    """How many configurations are drawn; with grids, how many times the whole grid. -1: until the time budget ends."""

    max_concurrent_trials: int | None = option(None, optional(whole(at_least=0)))
    """How many trials run at a time, at most. None or 0: as many as the machine or cluster has room for."""

    time_budget_s: float | timedelta | None = option(None, optional(_budget))
    """Seconds after which the sweep ends, with the trials that run then."""

    reuse_actors: bool = ignored(
        False, flag, "each trial has processes of its own, which are forked in milliseconds"
    )
    """Ray Tune's. Without effect: each trial has processes of its own, which are forked in milliseconds."""

    trial_name_creator: Callable[[Any], str] | None = option(None, optional(_function))
    """A function of the trial that returns the name of its run."""

    trial_dirname_creator: Callable[[Any], str] | None = option(None, optional(_function))
    """A function of the trial that returns the name of its directory; it goes before ``trial_name_creator``."""

    chdir_to_trial_dir: bool | None = ignored(
        None, optional(flag), "ranks work in the directory of the script"
    )
    """Ray Tune's. Without effect: ranks work in the directory of the script (see ``RunConfig(working_dir=...)``)."""

    def _contradictions(self) -> None:
        several = [isinstance(value, list) for value in (self.metric, self.mode)]
        if any(several) and not (all(several) and len(self.metric or ()) == len(self.mode or ())):
            raise self._contradiction(
                ("metric", "mode"),
                "several objectives need a mode for each metric",
                "Give two lists of the same length, such as metric=['loss', 'size'], mode=['min', 'min'].",
            )
        if self.num_samples == -1 and self.time_budget_s is None and self.search_alg is None:
            raise self._contradiction(
                ("num_samples",), "the sweep would never end", "Set time_budget_s, or a number of samples."
            )


class ResumeType(Enum):
    """The action of a restored sweep for a trial: continue it, run it again from the beginning, or leave it."""

    RESUME = "resume"
    RESTART = "restart"
    SKIP = "skip"


@dataclass(frozen=True)
class ResumeConfig:
    """The trials that a restored sweep runs.

    Args:
        finished: Trials that succeeded.
        unfinished: Trials that were running or waiting.
        errored: Trials that failed.

    Example::

        tune.run(train, name="search", resume_config=tune.ResumeConfig(errored=tune.ResumeConfig.ResumeType.RESTART))
    """

    finished: ResumeType = ResumeType.SKIP
    unfinished: ResumeType = ResumeType.RESUME
    errored: ResumeType = ResumeType.SKIP

    ResumeType = ResumeType
