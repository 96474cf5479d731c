"""Forward the reports of a trainer that runs inside a trial's function to the sweep.

Named as in Ray Tune, where a trainer is tuned by running it in a function. Here ``Tuner(trainer)`` does it directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.run.callbacks import UserCallback
from powertrain.worker import context, session
from powertrain.worker.progress import StopRun

if TYPE_CHECKING:
    from powertrain.run.callbacks import RunContext

#: Report entry with the path of the checkpoint that the inner run committed.
CHECKPOINT_PATH_KEY = "checkpoint_path"


class TuneReportCallback(UserCallback):
    """Forward the reports of an inner trainer's rank 0 to the sweep.

    Create it in the function that the Tuner runs, and pass it to the inner trainer with
    ``RunConfig(callbacks=[TuneReportCallback()])``. Checkpoints stay where the inner run commits them: the report has
    their path as "checkpoint_path".

    Raises:
        ConfigError: It is made outside of a trial.

    Example::

        def trial(config):
            TorchTrainer(train, run_config=RunConfig(callbacks=[TuneReportCallback()])).fit()
    """

    def __init__(self) -> None:
        if not session.in_worker():
            raise ConfigError(
                "TuneReportCallback() reports to a sweep, and there is none here. Make it in the function that "
                "tune.Tuner gets, or leave it out."
            )

        self._is_stopped = False

    def after_report(
        self, run_context: RunContext, metrics: list[dict[str, Any]], checkpoint: Any | None
    ) -> None:
        """Report a row of the inner run.

        Args:
            run_context: The inner run.
            metrics: The report of each rank.
            checkpoint: The checkpoint that was committed with it.
        """
        if self._is_stopped:
            return
        own = dict(metrics[0])
        if checkpoint is not None:
            own[CHECKPOINT_PATH_KEY] = str(checkpoint.path)
        try:
            context.report(own)
        except (
            StopRun
        ) as stop:  # the sweep stops this trial here; the function continues after the inner fit()
            self._is_stopped = True
            run_context.end_early(str(stop))
