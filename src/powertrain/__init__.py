"""Powertrain: train PyTorch models on every process, GPU and node you have.

Everything a training script needs is here; each name is loaded when it is first used, so that importing the
package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from powertrain.version import __version__

if TYPE_CHECKING:
    from powertrain import backend, collective, torch
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.config import (
        BackendConfig,
        CheckpointConfig,
        DataConfig,
        FailureConfig,
        LoggingConfig,
        RunConfig,
        ScalingConfig,
        SyncConfig,
        TorchConfig,
        ValidationConfig,
    )
    from powertrain.errors import PowertrainError, TrainingFailedError, WorkerFailedError
    from powertrain.result import Result
    from powertrain.run.callbacks import RunContext, UserCallback
    from powertrain.tasks import get, init, is_initialized, remote, shutdown
    from powertrain.trainer import DataParallelTrainer
    from powertrain.worker.context import (
        TrainContext,
        get_checkpoint,
        get_context,
        report,
        should_checkpoint,
    )

#: Where each public name lives.
_HOMES = {
    "powertrain.checkpoint.checkpoint": ("Checkpoint",),
    "powertrain.config": (
        "BackendConfig",
        "CheckpointConfig",
        "DataConfig",
        "FailureConfig",
        "LoggingConfig",
        "RunConfig",
        "ScalingConfig",
        "SyncConfig",
        "TorchConfig",
        "ValidationConfig",
    ),
    "powertrain.errors": ("PowertrainError", "TrainingFailedError", "WorkerFailedError"),
    "powertrain.result": ("Result",),
    "powertrain.run.callbacks": ("RunContext", "UserCallback"),
    "powertrain.tasks": ("get", "init", "is_initialized", "remote", "shutdown"),
    "powertrain.trainer": ("DataParallelTrainer",),
    "powertrain.worker.context": (
        "TrainContext",
        "get_checkpoint",
        "get_context",
        "report",
        "should_checkpoint",
    ),
}
_NAMES = {name: module for module, names in _HOMES.items() for name in names}
#: Other spellings, for people who come from Ray Train.
_ALIASES = {"WorkerGroupError": "TrainingFailedError", "ControllerError": "TrainingFailedError"}
_SUBMODULES = ("backend", "collective", "torch")

__all__ = [
    "BackendConfig",
    "Checkpoint",
    "CheckpointConfig",
    "DataConfig",
    "DataParallelTrainer",
    "FailureConfig",
    "LoggingConfig",
    "PowertrainError",
    "Result",
    "RunConfig",
    "RunContext",
    "ScalingConfig",
    "SyncConfig",
    "TorchConfig",
    "TrainContext",
    "TrainingFailedError",
    "UserCallback",
    "ValidationConfig",
    "WorkerFailedError",
    "get",
    "get_checkpoint",
    "get_context",
    "init",
    "is_initialized",
    "remote",
    "report",
    "should_checkpoint",
    "shutdown",
    "backend",
    "collective",
    "torch",
    "__version__",
]


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name in _SUBMODULES:
        return import_module(f"powertrain.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'powertrain' has no attribute {name!r}")
    value = getattr(import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
