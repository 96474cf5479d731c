"""LightGBMConfig: how the workers of a LightGBMTrainer are connected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from powertrain.backend import BackendConfig
from powertrain.config.checks import Config
from powertrain.frameworks.boosting.library import BoostingLibrary


class LightGBMLibrary(BoostingLibrary):
    """How models of LightGBM are read and counted."""

    def read_booster(self, path: str) -> Any:
        """Return the booster of a file."""
        from lightgbm import Booster

        return Booster(model_file=path)

    def count_rounds(self, booster: Any) -> int:
        """Return how many rounds a booster was trained for."""
        return int(booster.current_iteration())


LIGHTGBM = LightGBMLibrary("lightgbm", "lightgbm", title="LightGBM", filename="model.txt")


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
