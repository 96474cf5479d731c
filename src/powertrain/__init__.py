"""Powertrain: train PyTorch models on every process, GPU and node you have.

Everything a training script needs is here; each name is loaded when it is first used, so that importing the
package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from powertrain.version import __version__

if TYPE_CHECKING:
    from powertrain import backend, collective, data, torch, trace
    from powertrain.checkpoint.checkpoint import Checkpoint, ReportedCheckpoint, ReportedCheckpointStatus
    from powertrain.config import (
        BackendConfig,
        CheckpointConfig,
        CheckpointConsistencyMode,
        CheckpointUploadMode,
        DataConfig,
        FailureConfig,
        LoggingConfig,
        RunConfig,
        ScalingConfig,
        SyncConfig,
        TorchConfig,
        TraceConfig,
        ValidationConfig,
        ValidationTaskConfig,
    )
    from powertrain.errors import (
        PowertrainError,
        PreemptedError,
        TrainingFailedError,
        WorkerFailedError,
    )
    from powertrain.result import Result
    from powertrain.run.callbacks import RunContext, UserCallback
    from powertrain.tasks import get, init, is_initialized, remote, shutdown
    from powertrain.trainer import DataParallelTrainer
    from powertrain.worker.batch_plan import BatchPlan
    from powertrain.worker.context import (
        PreemptionInfo,
        TrainContext,
        checkpoint_dir,
        get_all_reported_checkpoints,
        get_checkpoint,
        get_context,
        get_dataset_shard,
        get_preemption_info,
        report,
        should_checkpoint,
    )
    from powertrain.worker.state import load_state, register_state, save_state

#: Where each public name lives.
_HOMES = {
    "powertrain.checkpoint.checkpoint": ("Checkpoint", "ReportedCheckpoint", "ReportedCheckpointStatus"),
    "powertrain.config": (
        "BackendConfig",
        "CheckpointConfig",
        "CheckpointConsistencyMode",
        "CheckpointUploadMode",
        "DataConfig",
        "FailureConfig",
        "LoggingConfig",
        "RunConfig",
        "ScalingConfig",
        "SyncConfig",
        "TorchConfig",
        "TraceConfig",
        "ValidationConfig",
        "ValidationTaskConfig",
    ),
    "powertrain.errors": ("PowertrainError", "PreemptedError", "TrainingFailedError", "WorkerFailedError"),
    "powertrain.result": ("Result",),
    "powertrain.run.callbacks": ("RunContext", "UserCallback"),
    "powertrain.tasks": ("get", "init", "is_initialized", "remote", "shutdown"),
    "powertrain.trainer": ("DataParallelTrainer",),
    "powertrain.worker.batch_plan": ("BatchPlan",),
    "powertrain.worker.context": (
        "PreemptionInfo",
        "TrainContext",
        "checkpoint_dir",
        "get_all_reported_checkpoints",
        "get_checkpoint",
        "get_context",
        "get_dataset_shard",
        "get_preemption_info",
        "report",
        "should_checkpoint",
    ),
    "powertrain.worker.state": ("load_state", "register_state", "save_state"),
}
_NAMES = {name: module for module, names in _HOMES.items() for name in names}
#: Other spellings, for people who come from Ray Train.
_ALIASES = {"WorkerGroupError": "TrainingFailedError", "ControllerError": "TrainingFailedError"}
_SUBMODULES = ("backend", "collective", "data", "torch", "trace")

__all__ = [
    "BackendConfig",
    "BatchPlan",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "DataConfig",
    "DataParallelTrainer",
    "FailureConfig",
    "LoggingConfig",
    "PowertrainError",
    "PreemptedError",
    "PreemptionInfo",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "RunConfig",
    "RunContext",
    "ScalingConfig",
    "SyncConfig",
    "TorchConfig",
    "TraceConfig",
    "TrainContext",
    "TrainingFailedError",
    "UserCallback",
    "ValidationConfig",
    "ValidationTaskConfig",
    "WorkerFailedError",
    "checkpoint_dir",
    "get",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "init",
    "is_initialized",
    "load_state",
    "register_state",
    "remote",
    "report",
    "save_state",
    "should_checkpoint",
    "shutdown",
    "backend",
    "collective",
    "data",
    "torch",
    "trace",
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
