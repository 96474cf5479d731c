"""XGBoostConfig: how the workers of an XGBoostTrainer are connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from powertrain.backend import BackendConfig
from powertrain.config.checks import Config, one_of, option


@dataclass(frozen=True, repr=False)
class XGBoostConfig(Config, BackendConfig):
    """Connection of XGBoost's workers.

    Example:
        >>> XGBoostTrainer(train, xgboost_config=XGBoostConfig(xgboost_communicator="rabit"))
    """

    uses_torch: ClassVar[bool] = False
    preload: ClassVar[Sequence[str] | None] = (
        "xgboost",
        "powertrain.xgboost.backend",
        "powertrain.xgboost.callback",
    )

    xgboost_communicator: Literal["rabit"] = option("rabit", one_of("rabit"))
    """XGBoost's collective library. ``"rabit"`` is the only one."""

    @property
    def backend_cls(self) -> type[Any]:
        """The backend that connects the workers."""
        from powertrain.xgboost.backend import XGBoostBackend

        return XGBoostBackend
