"""Reports from ``xgboost.train(..., callbacks=[ReportCallback()])``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from powertrain.frameworks.boosting.callback import BoosterReporting
from powertrain.xgboost.library import XGBOOST

XGBOOST.load("ReportCallback")
from xgboost.callback import TrainingCallback  # noqa: E402 (its absence is said in one sentence above)

__all__ = ["RayTrainReportCallback", "ReportCallback"]


class ReportCallback(BoosterReporting, TrainingCallback):
    """Report the evaluations of each iteration as "dataset-metric", and checkpoints of the model.

    Every rank reports; rank 0 saves the model, which is the same on all of them.

    A checkpoint is also saved when the run asks for one, because it is about to end or to get another number of
    workers.

    Args:
        metrics: Metrics to report: a name, a list of names, or a dict from the reported name to XGBoost's. By default
            all.
        filename: The name of the model's file in a checkpoint, whose ending decides its format; "model.ubj" by default.
        frequency: Save a checkpoint after every so many iterations of the whole model; 0 for never.
        checkpoint_at_end: Report the last metrics once more after the training, with a checkpoint, unless the last
            iteration had one.
        results_postprocessing_fn: Takes the metrics that would be reported and returns those that are. In
            ``xgboost.cv`` each value is a pair of mean and standard deviation.

    Example:
        >>> xgboost.train(params, dtrain, evals=[(dtrain, "train")], callbacks=[ReportCallback(frequency=10)])
    """

    library = XGBOOST
    CHECKPOINT_NAME = XGBOOST.filename

    def before_training(self, model: Any) -> Any:
        """Begin anew: a callback may be used for several trainings. Called by XGBoost."""
        self._begin()
        return model

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Any]) -> bool:
        """Report an iteration; returns that the training continues. Called by XGBoost."""
        # The last iteration is not known before the training is over.
        self._report(_by_name(evals_log), model, _iteration(model, epoch), is_last=False)
        return False

    def after_training(self, model: Any) -> Any:
        """Report the last checkpoint. Called by XGBoost."""
        self.finish(model)
        return model


#: Ray Train's name.
RayTrainReportCallback = ReportCallback


def _iteration(model: Any, epoch: int) -> int:
    """The iteration of the whole model. XGBoost counts from 0 again where training continues from a model."""
    return XGBOOST.count_rounds(model) - 1 if hasattr(model, "num_boosted_rounds") else epoch


def _by_name(evaluations: Mapping[str, Any]) -> dict[str, Any]:
    """The newest evaluations as "dataset-metric"."""
    return {
        f"{dataset}-{metric}": values[-1]
        for dataset, metrics in evaluations.items()
        for metric, values in metrics.items()
    }
