"""LightGBMConfig: how the workers of a LightGBMTrainer are connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from powertrain.backend import BackendConfig
from powertrain.config.checks import Config


@dataclass(frozen=True, repr=False)
class LightGBMConfig(Config, BackendConfig):
    """Connection of LightGBM's workers. There is nothing to choose.

    Example:
        >>> LightGBMTrainer(train, lightgbm_config=LightGBMConfig())
    """

    uses_torch: ClassVar[bool] = False
    preload: ClassVar[Sequence[str] | None] = (
        "lightgbm",
        "powertrain.lightgbm.backend",
        "powertrain.lightgbm.callback",
    )

    @property
    def backend_cls(self) -> type[Any]:
        """The backend that connects the workers."""
        from powertrain.lightgbm.backend import LightGBMBackend

        return LightGBMBackend
