"""XGBoost: ``xgboost.train(..., callbacks=[TuneReportCheckpointCallback()])`` in a training function."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.tune.integration.reporting import BoosterReporting, Postprocessing

try:
    from xgboost.callback import TrainingCallback
except ImportError as error:
    raise ImportError(
        f"xgboost cannot be imported ({error}), and there is nothing else that these callbacks could be given to. "
        "Install it: pip install xgboost."
    ) from error

if TYPE_CHECKING:
    from xgboost import Booster

    from powertrain.checkpoint.checkpoint import Checkpoint

__all__ = ["TuneReportCallback", "TuneReportCheckpointCallback"]


class TuneReportCheckpointCallback(BoosterReporting, TrainingCallback):
    """Reports the evaluations of each iteration as "dataset-metric", and checkpoints of the model.

    Args:
        metrics: Metrics to report: a name, a list of names, or a dict from the reported name to XGBoost's. By default
            all.
        filename: The name of the model's file in a checkpoint, whose ending decides its format.
        frequency: Every so many iterations a checkpoint is saved; 0 for never.
        checkpoint_at_end: Whether the last metrics are reported once more after the training, with a checkpoint, unless
            the last iteration had one.
        results_postprocessing_fn: Takes the metrics that would be reported and returns those that are. In
            ``xgboost.cv`` each value is a pair of mean and standard deviation.
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
        self._has_saved_last = self.is_due(epoch)
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
        """
        from xgboost import Booster

        with checkpoint.as_directory() as directory:
            booster = Booster()
            booster.load_model(os.path.join(directory, filename))
            return booster


class TuneReportCallback(TuneReportCheckpointCallback):
    """Reports the evaluations of each iteration, without checkpoints.

    Args:
        metrics: As for :class:`TuneReportCheckpointCallback`.
        results_postprocessing_fn: As for :class:`TuneReportCheckpointCallback`.
    """

    def __init__(
        self,
        metrics: str | list[str] | dict[str, str] | None = None,
        results_postprocessing_fn: Postprocessing | None = None,
    ) -> None:
        super().__init__(
            metrics, checkpoint_at_end=False, results_postprocessing_fn=results_postprocessing_fn
        )


def _by_name(evaluations: Mapping[str, Any]) -> dict[str, Any]:
    """The newest evaluations as "dataset-metric"."""
    return {
        f"{dataset}-{metric}": values[-1]
        for dataset, metrics in evaluations.items()
        for metric, values in metrics.items()
    }
