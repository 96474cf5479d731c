"""Trainables by name: ``tune.register_trainable("name", train)`` and then ``Tuner("name")``."""

from __future__ import annotations

from typing import Any

from powertrain.config.checks import did_you_mean
from powertrain.errors import ConfigError
from powertrain.values.arguments import shorten

_trainables: dict[str, Any] = {}


def register_trainable(name: str, trainable: Any, warn: bool = True) -> None:
    """Register a trainable under a name that ``Tuner`` and ``tune.run`` accept in its place, in this process.

    Args:
        name: The name. Registering it again replaces the trainable.
        trainable: A trainer, a function of the configuration or a ``Trainable`` class.
        warn: Accepted for compatibility; no effect.

    Raises:
        ConfigError: The name is no text, or the trainable can never be run.

    Example::

        tune.register_trainable("digits", train)
        tune.Tuner("digits", param_space={"lr": tune.loguniform(1e-4, 1e-1)})
    """
    from powertrain.trainer import DataParallelTrainer

    if not isinstance(name, str) or not name:
        raise ConfigError(f"register_trainable(name={shorten(name)}) takes a text such as 'resnet'.")
    if not callable(trainable) and not isinstance(trainable, DataParallelTrainer):
        raise ConfigError(
            f"register_trainable({name!r}, {shorten(trainable)}) takes a trainer, a function of the configuration or a "
            "Trainable class."
        )
    _trainables[name] = trainable


def find_trainable(name: str) -> Any:
    """Return the trainable that was registered under a name.

    Raises:
        ConfigError: The name is not registered.
    """
    if name in _trainables:
        return _trainables[name]
    known = f" Registered are {', '.join(map(repr, sorted(_trainables)))}." if _trainables else ""
    raise ConfigError(
        f"No trainable is registered as {name!r}. {did_you_mean(name, _trainables)}"
        f"Call tune.register_trainable({name!r}, ...) first, or give the function itself.{known}"
    )
