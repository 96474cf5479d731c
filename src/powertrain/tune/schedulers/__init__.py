"""Schedulers, which decide about the continuation of a sweep's trials."""

from __future__ import annotations

from typing import Any

from powertrain.config.checks import did_you_mean
from powertrain.errors import ConfigError
from powertrain.tune.schedulers.asha import ASHAScheduler, AsyncHyperBandScheduler
from powertrain.tune.schedulers.base import Action, Decision, FIFOScheduler, TrialScheduler
from powertrain.tune.schedulers.hyperband import HyperBandScheduler
from powertrain.tune.schedulers.median import MedianStoppingRule
from powertrain.tune.schedulers.pb2 import PB2
from powertrain.tune.schedulers.pbt import PopulationBasedTraining, PopulationBasedTrainingReplay

__all__ = [
    "ASHAScheduler",
    "Action",
    "AsyncHyperBandScheduler",
    "Decision",
    "FIFOScheduler",
    "HyperBandScheduler",
    "MedianStoppingRule",
    "PB2",
    "PopulationBasedTraining",
    "PopulationBasedTrainingReplay",
    "TrialScheduler",
    "create_scheduler",
]

_BY_NAME: dict[str, type[TrialScheduler]] = {
    "fifo": FIFOScheduler,
    "async_hyperband": AsyncHyperBandScheduler,
    "asynchyperband": AsyncHyperBandScheduler,
    "asha": ASHAScheduler,
    "hyperband": HyperBandScheduler,
    "median_stopping_rule": MedianStoppingRule,
    "medianstopping": MedianStoppingRule,
    "pb2": PB2,
    "pbt": PopulationBasedTraining,
    "pbt_replay": PopulationBasedTrainingReplay,
}
#: Unsupported schedulers of Ray Tune, and their replacements.
_MISSING = {
    "HyperBandForBOHB": "ASHAScheduler with search_alg=OptunaSearch()",
    "ResourceChangingScheduler": "ScalingConfig(num_workers=(least, most)), which lets each trial grow and shrink",
    "DistributeResources": "ScalingConfig(num_workers=(least, most)), which lets each trial grow and shrink",
}
_MISSING_NAMES = {
    "hb_bohb": "HyperBandForBOHB",
    "resource_changing": "ResourceChangingScheduler",
}


def create_scheduler(scheduler: str, **kwargs: Any) -> TrialScheduler:
    """Return a scheduler by its name.

    Args:
        scheduler: "fifo", "asha" or "async_hyperband", "hyperband", "median_stopping_rule", "pb2", "pbt" or
            "pbt_replay".
        **kwargs: Its arguments.

    Returns:
        The scheduler, for ``TuneConfig``.

    Raises:
        ConfigError: There is no scheduler of that name, or it does not take the arguments.

    Example::

        tune.create_scheduler("asha", max_t=100)
    """
    name = str(scheduler).lower()
    if name in _MISSING_NAMES:
        raise ConfigError(_describe_missing(_MISSING_NAMES[name]))
    if name not in _BY_NAME:
        raise ConfigError(
            f"There is no scheduler {scheduler!r}. {did_you_mean(name, _BY_NAME)}Known are {', '.join(_BY_NAME)}."
        )
    try:
        return _BY_NAME[name](**kwargs)
    except TypeError as error:
        raise ConfigError(f"{_BY_NAME[name].__name__} cannot be made: {error}.") from error


def _describe_missing(name: str) -> str:
    return f"The scheduler {name} of Ray Tune is not part of powertrain.tune. Use {_MISSING[name]}."


def __getattr__(name: str) -> Any:
    if name in _MISSING:
        raise ConfigError(_describe_missing(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
