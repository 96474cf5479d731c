"""XGBoost: the trainer, its config, and the callback that reports metrics and checkpoints.

Importing this package does not import xgboost: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.xgboost.callback import RayTrainReportCallback, ReportCallback
    from powertrain.xgboost.checkpoint import XGBoostCheckpoint
    from powertrain.xgboost.config import XGBoostConfig
    from powertrain.xgboost.trainer import XGBoostTrainer

__all__ = ["RayTrainReportCallback", "ReportCallback", "XGBoostCheckpoint", "XGBoostConfig", "XGBoostTrainer"]

_HOMES = {
    "RayTrainReportCallback": "powertrain.xgboost.callback",
    "ReportCallback": "powertrain.xgboost.callback",
    "XGBoostCheckpoint": "powertrain.xgboost.checkpoint",
    "XGBoostConfig": "powertrain.xgboost.config",
    "XGBoostTrainer": "powertrain.xgboost.trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
