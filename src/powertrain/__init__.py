"""Powertrain: train PyTorch models on every process, GPU and node you have.

Everything a training script needs is here; each name is loaded when it is first used, so that importing the
package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from powertrain.version import __version__

if TYPE_CHECKING:
    from powertrain import backend as backend
    from powertrain import collective as collective
    from powertrain import data as data
    from powertrain import huggingface as huggingface
    from powertrain import torch as torch
    from powertrain import trace as trace
    from powertrain import tune as tune
    from powertrain.backend import BackendConfig
    from powertrain.checkpoint.checkpoint import Checkpoint, ReportedCheckpoint, ReportedCheckpointStatus
    from powertrain.config.checkpoint import (
        CheckpointConfig,
        CheckpointConsistencyMode,
        CheckpointUploadMode,
        SyncConfig,
    )
    from powertrain.config.data import TRAIN_DATASET_KEY, DataConfig
    from powertrain.config.failure import FailureConfig
    from powertrain.config.run import LoggingConfig, RunConfig
    from powertrain.config.scaling import ScalingConfig
    from powertrain.config.trace import ProfileConfig, TraceConfig
    from powertrain.config.validation import ValidationConfig, ValidationFn, ValidationTaskConfig
    from powertrain.errors import (
        ControllerError,
        NCCLHangError,
        PowertrainError,
        PreemptedError,
        PreemptionError,
        TrainingFailedError,
        WorkerFailedError,
        WorkerGroupError,
    )
    from powertrain.result.result import Result
    from powertrain.run.callbacks import RunContext, UserCallback
    from powertrain.tasks import get as get
    from powertrain.tasks import init as init
    from powertrain.tasks import is_initialized as is_initialized
    from powertrain.tasks import kill as kill
    from powertrain.tasks import put as put
    from powertrain.tasks import remote as remote
    from powertrain.tasks import shutdown as shutdown
    from powertrain.tasks import wait as wait
    from powertrain.torch.config import TorchConfig
    from powertrain.trainer import DataParallelTrainer
    from powertrain.worker.checkpoints.state import load_state, register_state, save_state
    from powertrain.worker.context import (
        PreemptionInfo,
        checkpoint_dir,
        get_all_reported_checkpoints,
        get_checkpoint,
        get_context,
        get_dataset_shard,
        get_preemption_info,
        report,
        should_checkpoint,
    )
    from powertrain.worker.data.batch_plan import BatchPlan
    from powertrain.worker.train_context import TrainContext

#: Where each public name lives.
_HOMES = {
    "powertrain.backend": ("BackendConfig",),
    "powertrain.checkpoint.checkpoint": ("Checkpoint", "ReportedCheckpoint", "ReportedCheckpointStatus"),
    "powertrain.config.checkpoint": (
        "CheckpointConfig",
        "CheckpointConsistencyMode",
        "CheckpointUploadMode",
        "SyncConfig",
    ),
    "powertrain.config.data": ("DataConfig", "TRAIN_DATASET_KEY"),
    "powertrain.config.failure": ("FailureConfig",),
    "powertrain.config.run": ("LoggingConfig", "RunConfig"),
    "powertrain.config.scaling": ("ScalingConfig",),
    "powertrain.config.trace": ("ProfileConfig", "TraceConfig"),
    "powertrain.config.validation": ("ValidationConfig", "ValidationFn", "ValidationTaskConfig"),
    "powertrain.errors": (
        "ControllerError",
        "NCCLHangError",
        "PowertrainError",
        "PreemptedError",
        "PreemptionError",
        "TrainingFailedError",
        "WorkerFailedError",
        "WorkerGroupError",
    ),
    "powertrain.result.result": ("Result",),
    "powertrain.run.callbacks": ("RunContext", "UserCallback"),
    "powertrain.tasks": ("get", "init", "is_initialized", "kill", "put", "remote", "shutdown", "wait"),
    "powertrain.torch.config": ("TorchConfig",),
    "powertrain.trainer": ("DataParallelTrainer",),
    "powertrain.worker.checkpoints.state": ("load_state", "register_state", "save_state"),
    "powertrain.worker.context": (
        "PreemptionInfo",
        "checkpoint_dir",
        "get_all_reported_checkpoints",
        "get_checkpoint",
        "get_context",
        "get_dataset_shard",
        "get_preemption_info",
        "report",
        "should_checkpoint",
    ),
    "powertrain.worker.data.batch_plan": ("BatchPlan",),
    "powertrain.worker.train_context": ("TrainContext",),
}
_NAMES = {name: module for module, names in _HOMES.items() for name in names}
#: Not in ``__all__``, nor are the names of ``powertrain.tasks``, which are those of ``ray`` and not of ``ray.train``:
#: ``from powertrain import *`` must not replace the ``torch`` of a script, or its own ``get`` or ``wait``.
_SUBMODULES = ("backend", "collective", "data", "huggingface", "torch", "trace", "tune")

__all__ = [
    "BackendConfig",
    "BatchPlan",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointConsistencyMode",
    "CheckpointUploadMode",
    "ControllerError",
    "DataConfig",
    "DataParallelTrainer",
    "FailureConfig",
    "LoggingConfig",
    "NCCLHangError",
    "PowertrainError",
    "PreemptedError",
    "PreemptionError",
    "PreemptionInfo",
    "ProfileConfig",
    "ReportedCheckpoint",
    "ReportedCheckpointStatus",
    "Result",
    "RunConfig",
    "RunContext",
    "ScalingConfig",
    "SyncConfig",
    "TRAIN_DATASET_KEY",
    "TorchConfig",
    "TraceConfig",
    "TrainContext",
    "TrainingFailedError",
    "UserCallback",
    "ValidationConfig",
    "ValidationFn",
    "ValidationTaskConfig",
    "WorkerFailedError",
    "WorkerGroupError",
    "checkpoint_dir",
    "get_all_reported_checkpoints",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "get_preemption_info",
    "load_state",
    "register_state",
    "report",
    "save_state",
    "should_checkpoint",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"powertrain.{name}")
    if name not in _NAMES:
        raise AttributeError(f"module 'powertrain' has no attribute {name!r}")
    value = getattr(import_module(_NAMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_NAMES, *_SUBMODULES})
