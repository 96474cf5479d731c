"""XGBoostCheckpoint: a checkpoint that holds one booster, as in Ray Train."""

from __future__ import annotations

from powertrain.frameworks.boosting.checkpoint import BoosterCheckpoint
from powertrain.xgboost.library import XGBOOST


class XGBoostCheckpoint(BoosterCheckpoint):
    """A :class:`~powertrain.Checkpoint` with one booster in the file ``model.ubj``.

    Example:
        >>> checkpoint = XGBoostCheckpoint.from_model(booster)
        >>> booster = checkpoint.get_model()
    """

    library = XGBOOST
    MODEL_FILENAME = XGBOOST.filename
