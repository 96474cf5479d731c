"""Aliases for module paths of Ray Tune below ``powertrain.tune``, so that only the first part is renamed.

A Ray path with another name here is an alias of the module with its names, which is imported on first access.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

#: Modules of this package by path below ``ray.tune``.
_PATHS = {
    "analysis": "powertrain.tune.running",
    "analysis.experiment_analysis": "powertrain.tune.running",
    "context": "powertrain.tune",
    "error": "powertrain.errors",
    "execution": "powertrain.tune.trainable",
    "execution.placement_groups": "powertrain.tune.trainable",
    "experiment": "powertrain.tune.trial",
    "experiment.trial": "powertrain.tune.trial",
    "logger.csv": "powertrain.tune.logger",
    "logger.json": "powertrain.tune.logger",
    "logger.logger": "powertrain.tune.logger",
    "logger.tensorboardx": "powertrain.tune.logger",
    "progress_reporter": "powertrain.tune.reporter",
    "schedulers.async_hyperband": "powertrain.tune.schedulers",
    "schedulers.hb_bohb": "powertrain.tune.schedulers",
    "schedulers.median_stopping_rule": "powertrain.tune.schedulers",
    "schedulers.resource_changing_scheduler": "powertrain.tune.schedulers",
    "schedulers.trial_scheduler": "powertrain.tune.schedulers",
    "search.sample": "powertrain.tune.space",
    "stopper.experiment_plateau": "powertrain.tune.stopper",
    "stopper.function_stopper": "powertrain.tune.stopper",
    "stopper.maximum_iteration": "powertrain.tune.stopper",
    "stopper.noop": "powertrain.tune.stopper",
    "stopper.stopper": "powertrain.tune.stopper",
    "stopper.timeout": "powertrain.tune.stopper",
    "stopper.trial_plateau": "powertrain.tune.stopper",
    "trainable.trainable": "powertrain.tune.trainable",
    "tune": "powertrain.tune.running",
    "tune_config": "powertrain.tune.config",
}


class OtherPath(ModuleType):
    """Alias of a Ray Tune module whose names are in another module here.

    Args:
        name: Its path.
        target: The path of the module with its names.
    """

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, f"The names of this path are in {target}.")
        self.target = target
        self.__path__: list[str] = []  # a package: some of these have submodules

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle pickles the submodules of a package along with a function that uses the package.
        return importlib.import_module, (self.__name__,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(
            "__"
        ):  # tools look up such names in all loaded modules, which should import nothing
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(self.target), name)


def register_ray_paths(package: str) -> None:
    """Make the paths importable below ``package``."""
    for path, target in _PATHS.items():
        name = f"{package}.{path}"
        sys.modules.setdefault(name, OtherPath(name, target))
