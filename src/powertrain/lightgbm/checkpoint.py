"""LightGBMCheckpoint: a checkpoint that holds one booster, as in Ray Train."""

from __future__ import annotations

from powertrain.frameworks.boosting.checkpoint import BoosterCheckpoint
from powertrain.lightgbm.library import LIGHTGBM


class LightGBMCheckpoint(BoosterCheckpoint):
    """A :class:`~powertrain.Checkpoint` with one booster in the file ``model.txt``.

    Example:
        >>> checkpoint = LightGBMCheckpoint.from_model(booster)
        >>> booster = checkpoint.get_model()
    """

    library = LIGHTGBM
    MODEL_FILENAME = LIGHTGBM.filename
