"""LightGBM: ``lightgbm.train(..., callbacks=[TuneReportCheckpointCallback()])`` in a training function."""

from __future__ import annotations

from powertrain.frameworks.reporting import Postprocessing
from powertrain.lightgbm.callback import ReportCallback

__all__ = ["TuneReportCallback", "TuneReportCheckpointCallback"]


class TuneReportCheckpointCallback(ReportCallback):
    """Report the evaluations of each iteration, and checkpoints: :class:`powertrain.lightgbm.ReportCallback`."""


class TuneReportCallback(TuneReportCheckpointCallback):
    """Report the evaluations of each iteration, without checkpoints.

    Args:
        metrics: As for :class:`powertrain.lightgbm.ReportCallback`.
        results_postprocessing_fn: As for :class:`powertrain.lightgbm.ReportCallback`.
    """

    def __init__(
        self,
        metrics: str | list[str] | dict[str, str] | None = None,
        results_postprocessing_fn: Postprocessing | None = None,
    ) -> None:
        super().__init__(
            metrics, checkpoint_at_end=False, results_postprocessing_fn=results_postprocessing_fn
        )
