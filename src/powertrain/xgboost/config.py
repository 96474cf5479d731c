"""XGBoostConfig: how the workers of an XGBoostTrainer are connected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from powertrain.backend import BackendConfig
from powertrain.config.checks import Config, one_of, option
from powertrain.frameworks.boosting.library import BoostingLibrary


class XGBoostLibrary(BoostingLibrary):
    """How models of XGBoost are read and counted."""

    def read_booster(self, path: str) -> Any:
        """Return the booster of a file."""
        from xgboost import Booster

        return Booster(model_file=path)

    def count_rounds(self, booster: Any) -> int:
        """Return how many rounds a booster was trained for."""
        return int(booster.num_boosted_rounds())


XGBOOST = XGBoostLibrary("xgboost", "xgboost", title="XGBoost", filename="model.ubj")


@dataclass(frozen=True, repr=False)
class XGBoostConfig(Config, BackendConfig):
    """How XGBoost's workers are connected.

    Example:
        >>> XGBoostTrainer(train, xgboost_config=XGBoostConfig(xgboost_communicator="rabit"))
    """

    uses_torch: ClassVar[bool] = False

    xgboost_communicator: Literal["rabit"] = option("rabit", one_of("rabit"))
    """XGBoost's collective library. ``"rabit"`` is the only one."""

    @property
    def backend_cls(self) -> type[Any]:
        """The backend that connects the workers."""
        from powertrain.xgboost.backend import XGBoostBackend

        return XGBoostBackend
