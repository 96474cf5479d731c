"""PyTorch training: the trainer, and the functions that make a training function distributed.

Importing this package does not import torch: each name is loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.torch.checkpoint import TorchCheckpoint
    from powertrain.torch.config import TorchConfig
    from powertrain.torch.data_loader.prepare import prepare_data_loader
    from powertrain.torch.device import get_device, get_devices
    from powertrain.torch.older_api import accelerate, backward, prepare_optimizer
    from powertrain.torch.prepare import enable_reproducibility, prepare_model
    from powertrain.torch.trainer import TorchTrainer

__all__ = [
    "TorchCheckpoint",
    "TorchConfig",
    "TorchTrainer",
    "accelerate",
    "backward",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
]

_HOMES = {
    "TorchCheckpoint": "powertrain.torch.checkpoint",
    "TorchConfig": "powertrain.torch.config",
    "TorchTrainer": "powertrain.torch.trainer",
    "accelerate": "powertrain.torch.older_api",
    "backward": "powertrain.torch.older_api",
    "enable_reproducibility": "powertrain.torch.prepare",
    "get_device": "powertrain.torch.device",
    "get_devices": "powertrain.torch.device",
    "prepare_data_loader": "powertrain.torch.data_loader.prepare",
    "prepare_model": "powertrain.torch.prepare",
    "prepare_optimizer": "powertrain.torch.older_api",
}
#: Names of Ray Train that are refused, each with the alternative.
_REFUSED = {
    "TorchftConfig": (
        "torchft is not supported: a failed rank ends the attempt, and the run goes on from its newest checkpoint. Use "
        "TorchConfig with RunConfig(failure_config=FailureConfig(max_failures=...)), and "
        "ScalingConfig(num_workers=(min, max)) to go on with fewer workers."
    ),
    "TorchXLAConfig": "TPUs are not supported. Use TorchConfig with GPUs or CPUs.",
}


def __getattr__(name: str) -> Any:
    if name in _REFUSED:
        raise ImportError(f"powertrain.torch.{name}: {_REFUSED[name]}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
