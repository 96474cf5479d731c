"""Sweeps: run a trainer or a function with many configurations, and find the best. The names are those of Ray Tune."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from powertrain.tune.ray_paths import register_ray_paths
from powertrain.tune.space import (
    choice,
    grid_search,
    lograndint,
    loguniform,
    qlograndint,
    qloguniform,
    qrandint,
    qrandn,
    quniform,
    randint,
    randn,
    sample_from,
    uniform,
)

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.config.checkpoint import CheckpointConfig, SyncConfig
    from powertrain.config.failure import FailureConfig
    from powertrain.config.run import RunConfig
    from powertrain.errors import TuneError
    from powertrain.result.result import Result
    from powertrain.tune.callback import Callback
    from powertrain.tune.config import ResumeConfig, TuneConfig
    from powertrain.tune.registry import register_trainable
    from powertrain.tune.reporter import CLIReporter, JupyterNotebookReporter, ProgressReporter
    from powertrain.tune.result_grid import ResultGrid
    from powertrain.tune.running import ExperimentAnalysis, run
    from powertrain.tune.schedulers import create_scheduler
    from powertrain.tune.search import create_searcher
    from powertrain.tune.stopper import Stopper
    from powertrain.tune.trainable import PlacementGroupFactory, Trainable, with_parameters, with_resources
    from powertrain.tune.tuner import Tuner
    from powertrain.worker.context import get_checkpoint, get_context, report
    from powertrain.worker.train_context import TrainContext as TuneContext

#: Public names by module: importing this package loads none of the modules.
_LATER = {
    "Callback": "powertrain.tune.callback",
    "CLIReporter": "powertrain.tune.reporter",
    "Checkpoint": "powertrain.checkpoint.checkpoint",
    "CheckpointConfig": "powertrain.config.checkpoint",
    "ExperimentAnalysis": "powertrain.tune.running",
    "FailureConfig": "powertrain.config.failure",
    "JupyterNotebookReporter": "powertrain.tune.reporter",
    "PlacementGroupFactory": "powertrain.tune.trainable",
    "ProgressReporter": "powertrain.tune.reporter",
    "Result": "powertrain.result.result",
    "ResultGrid": "powertrain.tune.result_grid",
    "ResumeConfig": "powertrain.tune.config",
    "RunConfig": "powertrain.config.run",
    "Stopper": "powertrain.tune.stopper",
    "SyncConfig": "powertrain.config.checkpoint",
    "Trainable": "powertrain.tune.trainable",
    "TuneConfig": "powertrain.tune.config",
    "TuneContext": "powertrain.worker.train_context:TrainContext",
    "TuneError": "powertrain.errors",
    "Tuner": "powertrain.tune.tuner",
    "create_scheduler": "powertrain.tune.schedulers",
    "create_searcher": "powertrain.tune.search",
    "get_checkpoint": "powertrain.worker.context",
    "get_context": "powertrain.worker.context",
    "register_trainable": "powertrain.tune.registry",
    "report": "powertrain.worker.context",
    "run": "powertrain.tune.running",
    "with_parameters": "powertrain.tune.trainable",
    "with_resources": "powertrain.tune.trainable",
}
#: Unsupported names of Ray Tune, and their replacements.
_NOT_HERE = {
    "Experiment": "tune.Tuner, whose arguments say the same",
    "register_env": "an environment that the training function makes: there is no reinforcement learning here",
    "run_experiments": "one tune.Tuner for each experiment",
}
_MODULES = ("schedulers", "search", "stopper", "logger", "integration", "callback")

__all__ = [
    "CLIReporter",
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "ExperimentAnalysis",
    "FailureConfig",
    "JupyterNotebookReporter",
    "PlacementGroupFactory",
    "ProgressReporter",
    "Result",
    "ResultGrid",
    "ResumeConfig",
    "RunConfig",
    "Stopper",
    "SyncConfig",
    "Trainable",
    "TuneConfig",
    "TuneContext",
    "TuneError",
    "Tuner",
    "choice",
    "create_scheduler",
    "create_searcher",
    "get_checkpoint",
    "get_context",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "register_trainable",
    "report",
    "run",
    "sample_from",
    "uniform",
    "with_parameters",
    "with_resources",
]


register_ray_paths(__name__)


def __getattr__(name: str) -> Any:
    if name in _LATER:
        module, _, own = _LATER[name].partition(":")
        return getattr(importlib.import_module(module), own or name)
    if name in _MODULES:
        return importlib.import_module(f"powertrain.tune.{name}")
    if name in _NOT_HERE:
        raise AttributeError(f"powertrain.tune has no {name}. Use {_NOT_HERE[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
