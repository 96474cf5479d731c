"""LightGBM as a library that may be missing, and how its models are read."""

from __future__ import annotations

from typing import Any

from powertrain.frameworks.boosting.library import BoostingLibrary


class LightGBMLibrary(BoostingLibrary):
    """Models of LightGBM: reading them, and counting their rounds."""

    def read_booster(self, path: str) -> Any:
        """Return the booster of a file."""
        from lightgbm import Booster

        return Booster(model_file=path)

    def count_rounds(self, booster: Any) -> int:
        """Return how many rounds a booster was trained for."""
        return int(booster.current_iteration())


LIGHTGBM = LightGBMLibrary("lightgbm", "lightgbm", title="LightGBM", filename="model.txt")
