"""Reports from ``xgboost.train(..., callbacks=[ReportCallback()])``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.frameworks.reporting import BoosterReporting, Postprocessing
from powertrain.xgboost.config import XGBOOST

XGBOOST.load("ReportCallback")
from xgboost.callback import TrainingCallback  # noqa: E402 (its absence is said in one sentence above)

if TYPE_CHECKING:
    from xgboost import Booster

    from powertrain.checkpoint.checkpoint import Checkpoint

__all__ = ["RayTrainReportCallback", "ReportCallback"]


class ReportCallback(BoosterReporting, TrainingCallback):
    """Report the evaluations of each iteration as "dataset-metric", and checkpoints of the model.

    Every rank reports; rank 0 saves the model, which is the same on all of them.

    Args:
        metrics: Metrics to report: a name, a list of names, or a dict from the reported name to XGBoost's. By default
            all.
        filename: The name of the model's file in a checkpoint, whose ending decides its format.
        frequency: Save a checkpoint after every so many iterations of the whole model; 0 for never.
        checkpoint_at_end: Report the last metrics once more after the training, with a checkpoint, unless the last
            iteration had one.
        results_postprocessing_fn: Takes the metrics that would be reported and returns those that are. In
            ``xgboost.cv`` each value is a pair of mean and standard deviation.

    Example:
        >>> xgboost.train(params, dtrain, evals=[(dtrain, "train")], callbacks=[ReportCallback(frequency=10)])
    """

    CHECKPOINT_NAME = "model.ubj"
    library = "XGBoost"

    def __init__(
        self,
        metrics: str | list[str] | dict[str, str] | None = None,
        filename: str = CHECKPOINT_NAME,
        frequency: int = 0,
        checkpoint_at_end: bool = True,
        results_postprocessing_fn: Postprocessing | None = None,
    ) -> None:
        super().__init__(metrics, filename, frequency, checkpoint_at_end, results_postprocessing_fn)
        self._last_metrics: dict[str, Any] = {}
        self._has_saved_last = False

    def before_training(self, model: Any) -> Any:
        """Begin anew: a callback may be used for several trainings. Called by XGBoost."""
        self._last_metrics, self._has_saved_last = {}, False
        return model

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Any]) -> bool:
        """Report an iteration; returns that the training continues. Called by XGBoost."""
        self._last_metrics = self.choose(_by_name(evals_log))
        self._has_saved_last = self.is_due(_iteration(model, epoch))
        self.send(self._last_metrics, model, self._has_saved_last)
        return False

    def after_training(self, model: Any) -> Any:
        """Report the last checkpoint. Called by XGBoost."""
        # The models of a cross-validation are not saved, so there is nothing to add to the last report.
        if self._saves_at_end and not self._has_saved_last and hasattr(model, "save_model"):
            self.send(self._last_metrics, model, True)
        return model

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> Booster:
        """Return the model of a checkpoint.

        Args:
            checkpoint: A checkpoint that this callback has reported.
            filename: The name of the file, as it was given to the callback.

        Returns:
            The model.

        Example:
            >>> booster = ReportCallback.get_model(result.checkpoint)
        """
        from xgboost import Booster

        with checkpoint.as_directory() as directory:
            booster = Booster()
            booster.load_model(os.path.join(directory, filename))
            return booster


#: Ray Train's name.
RayTrainReportCallback = ReportCallback


def _iteration(model: Any, epoch: int) -> int:
    """The iteration of the whole model. XGBoost counts from 0 again where training continues from a model."""
    count = getattr(model, "num_boosted_rounds", None)
    return count() - 1 if count is not None else epoch


def _by_name(evaluations: Mapping[str, Any]) -> dict[str, Any]:
    """The newest evaluations as "dataset-metric"."""
    return {
        f"{dataset}-{metric}": values[-1]
        for dataset, metrics in evaluations.items()
        for metric, values in metrics.items()
    }
