"""Makes the module paths of Ray Tune work below ``powertrain.tune``, so that only the first part of them is renamed.

A path of theirs that has another name here stands for the module that has its names. That module is imported when a
name is taken from it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

#: By path below ``ray.tune`` the module that has its public names.
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
    """A module of Ray Tune's whose names are in another module here.

    Args:
        name: Its path.
        target: The path of the module that has its names.
    """

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, f"The names of this path are in {target}.")
        self.target = target
        self.__path__: list[str] = []  # a package: there are paths below some of these

    def __reduce__(self) -> tuple[Any, ...]:
        # cloudpickle sends the modules below a package along with a function that uses the package.
        return importlib.import_module, (self.__name__,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(
            "__"
        ):  # tools look for such names in all modules there are, and should import nothing
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(self.target), name)


def register_ray_paths(package: str) -> None:
    """Make the paths importable below ``package``."""
    for path, target in _PATHS.items():
        name = f"{package}.{path}"
        sys.modules.setdefault(name, OtherPath(name, target))
