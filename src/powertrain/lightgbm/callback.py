"""Reports from ``lightgbm.train(..., callbacks=[ReportCallback()])``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from powertrain.frameworks.reporting import BoosterReporting, Postprocessing
from powertrain.lightgbm.config import LIGHTGBM

if TYPE_CHECKING:
    from lightgbm import Booster

    from powertrain.checkpoint.checkpoint import Checkpoint

__all__ = ["RayTrainReportCallback", "ReportCallback"]


class ReportCallback(BoosterReporting):
    """Report the evaluations of each iteration as "dataset-metric", and checkpoints of the model.

    Every rank reports what it has evaluated; rank 0 saves the model, which is the same on all of them. With early
    stopping the last iteration is not known before it is over, so ``checkpoint_at_end`` has no effect then: set
    ``frequency``.

    Args:
        metrics: Metrics to report: a name, a list of names, or a dict from the reported name to LightGBM's. By default
            all.
        filename: The name of the model's file in a checkpoint.
        frequency: Save a checkpoint after every so many iterations; 0 for never.
        checkpoint_at_end: Save a checkpoint with the last iteration.
        results_postprocessing_fn: Takes the metrics that would be reported and returns those that are.

    Example:
        >>> lightgbm.train(params, train_set, valid_sets=[train_set], callbacks=[ReportCallback(frequency=10)])
    """

    CHECKPOINT_NAME = "model.txt"
    library = "LightGBM"

    def __init__(
        self,
        metrics: str | list[str] | dict[str, str] | None = None,
        filename: str = CHECKPOINT_NAME,
        frequency: int = 0,
        checkpoint_at_end: bool = True,
        results_postprocessing_fn: Postprocessing | None = None,
    ) -> None:
        super().__init__(metrics, filename, frequency, checkpoint_at_end, results_postprocessing_fn)

    def __call__(self, env: Any) -> None:
        """Report an iteration. Called by LightGBM."""
        is_last = env.iteration == env.end_iteration - 1
        should_save = self.is_due(env.iteration) or (is_last and self._saves_at_end)
        self.send(self.choose(_by_name(env.evaluation_result_list or ())), env.model, should_save)

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str = CHECKPOINT_NAME) -> Booster:
        """Return the model of a checkpoint.

        Args:
            checkpoint: A checkpoint that this callback has reported.
            filename: The name of the file, as it was given to the callback.

        Returns:
            The model.

        Raises:
            ImportError: lightgbm is not installed.

        Example:
            >>> booster = ReportCallback.get_model(result.checkpoint)
        """
        LIGHTGBM.load("ReportCallback.get_model")
        from lightgbm import Booster

        with checkpoint.as_directory() as directory:
            return Booster(model_file=os.path.join(directory, filename))


#: Ray Train's name.
RayTrainReportCallback = ReportCallback


def _by_name(evaluations: Any) -> dict[str, float]:
    """Evaluations as "dataset-metric"; of a cross-validation "-mean" and "-stdv" of each."""
    found = {}
    for entry in evaluations:
        name, value = f"{entry[0]}-{entry[1]}", entry[2]
        deviation = entry[4] if len(entry) > 4 else None
        found[name if deviation is None else f"{name}-mean"] = value
        if deviation is not None:
            found[f"{name}-stdv"] = deviation
    return found
