"""LightGBMConfig: how the workers of a LightGBMTrainer are connected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from powertrain.config import BackendConfig, Config
from powertrain.frameworks.library import Library

LIGHTGBM = Library("lightgbm", "lightgbm")


@dataclass(frozen=True, repr=False)
class LightGBMConfig(Config, BackendConfig):
    """How LightGBM's workers are connected. There is nothing to choose.

    Example:
        >>> LightGBMTrainer(train, lightgbm_config=LightGBMConfig())
    """

    uses_torch: ClassVar[bool] = False

    @property
    def backend_cls(self) -> type[Any]:
        """The backend that connects the workers."""
        from powertrain.lightgbm.backend import LightGBMBackend

        return LightGBMBackend
