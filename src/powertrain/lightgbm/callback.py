"""Reports from ``lightgbm.train(..., callbacks=[ReportCallback()])``."""

from __future__ import annotations

from typing import Any

from powertrain.frameworks.boosting.callback import BoosterReporting
from powertrain.lightgbm.library import LIGHTGBM

__all__ = ["RayTrainReportCallback", "ReportCallback"]


class ReportCallback(BoosterReporting):
    """Report the evaluations of each iteration as "dataset-metric", and checkpoints of the model.

    Every rank reports what it has evaluated; rank 0 saves the model, which is the same on all of them. With early
    stopping the last iteration is not known before it is over, so ``checkpoint_at_end`` has no effect then: set
    ``frequency``, or call ``finish(booster)`` after the training.

    A checkpoint is also saved when the run asks for one, because it is about to end or to get another number of
    workers.

    Args:
        metrics: Metrics to report: a name, a list of names, or a dict from the reported name to LightGBM's. By default
            all.
        filename: The name of the model's file in a checkpoint; "model.txt" by default.
        frequency: Save a checkpoint after every so many iterations of the whole model; 0 for never.
        checkpoint_at_end: Save a checkpoint with the last iteration.
        results_postprocessing_fn: Takes the metrics that would be reported and returns those that are.

    Example:
        >>> lightgbm.train(params, train_set, valid_sets=[train_set], callbacks=[ReportCallback(frequency=10)])
    """

    library = LIGHTGBM
    CHECKPOINT_NAME = LIGHTGBM.filename

    def __call__(self, env: Any) -> None:
        """Report an iteration. Called by LightGBM."""
        if env.iteration == env.begin_iteration:
            self._begin()
        is_last = env.iteration == env.end_iteration - 1
        self._report(_by_name(env.evaluation_result_list or ()), env.model, env.iteration, is_last)


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
