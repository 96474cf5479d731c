"""The facts of a trainable that a sweep needs: its name, its resources, and the form in which it is kept."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from powertrain.config.scaling import ScalingConfig
from powertrain.driver.spec import lasting_arguments
from powertrain.errors import ConfigError
from powertrain.trainer import DataParallelTrainer
from powertrain.tune.trainable.wrappers import request_of, resources_of


def name_of(trainable: Any) -> str:
    """Return the name of a trainable, from which trial names are derived."""
    owner = getattr(trainable, "func", trainable)
    return str(getattr(owner, "__name__", type(owner).__name__))


def check_takes_config(trainable: Any) -> None:
    """Raise :class:`ConfigError` for a function that cannot be called with a configuration."""
    try:
        signature = inspect.signature(trainable)
    except (TypeError, ValueError):
        return  # some builtins have no signature; the call itself will fail
    try:
        signature.bind({})
    except TypeError as error:
        raise ConfigError(
            f"Tuner(trainable={name_of(trainable)}): a trial calls it with its configuration alone, and it takes "
            f"{signature} ({error}). Define it as a function of the configuration; tune.with_parameters gives it more."
        ) from error


def scaling_of(trainable: Any, config: Mapping[str, Any] | None = None) -> ScalingConfig:
    """Return the scaling of a function's trials: one worker, unless ``with_resources`` sets another.

    On one machine, a worker without a request holds no resources that another sweep, or a nested one, could wait for.
    On a cluster it has one CPU.

    Args:
        trainable: The function.
        config: The configuration of a trial. Without it, a request that depends on it counts as none: the engine, which
            knows the free resources, schedules such trials.
    """
    request = request_of(trainable)
    if isinstance(request, ScalingConfig):
        return request
    amounts = resources_of(trainable)
    if callable(amounts):
        amounts = amounts(dict(config)) if config is not None else None
    if not amounts:
        return ScalingConfig(num_workers=1)
    amounts = dict(amounts)
    return ScalingConfig(num_workers=1, use_gpu=amounts.get("GPU", 0) > 0, resources_per_worker=amounts)


class KeptTrainable:
    """The stored form of a trainable: a trainer is stored as its class and arguments."""

    def __init__(self, trainable: Any) -> None:
        self.trainable = trainable

    def __reduce__(self) -> Any:
        if isinstance(self.trainable, DataParallelTrainer):
            return _make_again, (type(self.trainable), lasting_arguments(self.trainable._request))
        return _given_back, (self.trainable,)


def _make_again(cls: type[DataParallelTrainer], arguments: dict[str, Any]) -> DataParallelTrainer:
    arguments.pop("needs_env", None)
    return cls(**arguments)


def _given_back(trainable: Any) -> Any:
    return trainable
