"""Reports a Trainer's metrics and checkpoints to the run. Importing this module imports transformers."""

from __future__ import annotations

import os
from typing import Any

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.huggingface.library import load
from powertrain.huggingface.transformers import saved
from powertrain.worker.context import barrier, checkpoint_dir, get_context, report, should_checkpoint

_TrainerCallback: Any = load("transformers").TrainerCallback


class ReportCallback(_TrainerCallback):  # type: ignore[misc]
    """Report to the run whenever the Trainer saves: its newest metrics, with a copy of the saved checkpoint.

    A checkpoint of the run holds the Trainer's own in the directory ``checkpoint`` (``CHECKPOINT_NAME``), as with Ray
    Train. Metrics are the newest value of everything that the Trainer has logged, and ``step``. A training that ends
    without a save (``save_strategy="no"``) reports its metrics once, at its end. Where the run is about to be stopped
    or resized, the Trainer saves at its next step, whatever its ``save_strategy``.

    Args:
        *args: Passed on to ``transformers.TrainerCallback``, as Ray Train does.
        **kwargs: As ``args``.

    Raises:
        OutsideWorkerError: The Trainer trains outside of a training function.

    Example::

        trainer = transformers.Trainer(model=model, args=args, train_dataset=rows, callbacks=[ReportCallback()])
    """

    CHECKPOINT_NAME = saved.CHECKPOINT_NAME

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: The step of the newest report.
        self._reported = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count the reports."""
        self._reported = -1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the Trainer save where the run is about to stop, to lose workers or to get more."""
        if should_checkpoint():
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the newest metrics with the checkpoint that the Trainer has just saved."""
        context = get_context()
        if context.get_world_size() > 1:
            barrier()  # every rank has written its own files into the directory
        directory = saved.saved_at(args.output_dir, state.global_step)
        if directory is None or context.get_local_rank() != 0:
            self._report(state, None)
            return
        with checkpoint_dir() as reported:
            # A copy: the Trainer deletes its directory by its own rules, and writes into it again after a restart.
            saved.copy_directory(directory, os.path.join(reported, self.CHECKPOINT_NAME))
            self._report(state, Checkpoint.from_directory(reported))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the metrics of a training whose end was not saved."""
        if state.global_step > self._reported:
            self._report(state, None)

    def _report(self, state: Any, checkpoint: Checkpoint | None) -> None:
        metrics: dict[str, Any] = {}
        for entry in state.log_history:
            metrics.update(entry)
        metrics["step"] = self._reported = state.global_step
        report(metrics, checkpoint)


#: Ray Train's name.
RayTrainReportCallback = ReportCallback
