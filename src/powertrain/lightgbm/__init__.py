"""LightGBM: the trainer, its config, and the callback that reports metrics and checkpoints.

Importing this package does not import lightgbm: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.lightgbm.backend import get_network_params
    from powertrain.lightgbm.callback import RayTrainReportCallback, ReportCallback
    from powertrain.lightgbm.checkpoint import LightGBMCheckpoint
    from powertrain.lightgbm.config import LightGBMConfig
    from powertrain.lightgbm.frames import normalize_pandas_for_lightgbm
    from powertrain.lightgbm.trainer import LightGBMTrainer

__all__ = [
    "LightGBMCheckpoint",
    "LightGBMConfig",
    "LightGBMTrainer",
    "RayTrainReportCallback",
    "ReportCallback",
    "get_network_params",
    "normalize_pandas_for_lightgbm",
]

_HOMES = {
    "LightGBMCheckpoint": "powertrain.lightgbm.checkpoint",
    "LightGBMConfig": "powertrain.lightgbm.config",
    "LightGBMTrainer": "powertrain.lightgbm.trainer",
    "RayTrainReportCallback": "powertrain.lightgbm.callback",
    "ReportCallback": "powertrain.lightgbm.callback",
    "get_network_params": "powertrain.lightgbm.backend",
    "normalize_pandas_for_lightgbm": "powertrain.lightgbm.frames",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
