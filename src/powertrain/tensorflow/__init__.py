"""TensorFlow: the trainer, its config, and what a training function calls.

Importing this package does not import tensorflow: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.tensorflow.checkpoint import TensorflowCheckpoint
    from powertrain.tensorflow.config import TensorflowConfig
    from powertrain.tensorflow.keras import ReportCheckpointCallback
    from powertrain.tensorflow.shards import prepare_dataset_shard
    from powertrain.tensorflow.trainer import TensorflowTrainer

__all__ = [
    "ReportCheckpointCallback",
    "TensorflowCheckpoint",
    "TensorflowConfig",
    "TensorflowTrainer",
    "prepare_dataset_shard",
]

_HOMES = {
    "ReportCheckpointCallback": "powertrain.tensorflow.keras",
    "TensorflowCheckpoint": "powertrain.tensorflow.checkpoint",
    "TensorflowConfig": "powertrain.tensorflow.config",
    "TensorflowTrainer": "powertrain.tensorflow.trainer",
    "prepare_dataset_shard": "powertrain.tensorflow.shards",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
