"""A callback that reports metrics and checkpoints of Lightning's Trainer to the run."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from powertrain.config.checkpoint import CheckpointUploadMode
from powertrain.config.validation import ValidationTaskConfig
from powertrain.errors import ConfigError
from powertrain.lightning.packages import PackageClass, callback
from powertrain.values.arguments import as_flag, as_whole, plain_scalar
from powertrain.worker import context, session

_MOST = 2**62
CHECKPOINT_NAME = "checkpoint.ckpt"


class _Reporting:
    """The hooks. A checkpoint is made between two optimizer steps only: gradients are in none."""

    CHECKPOINT_NAME = CHECKPOINT_NAME

    def __init__(
        self,
        checkpoint_upload_mode: CheckpointUploadMode | str | None = None,
        validation: bool | ValidationTaskConfig = False,
        *,
        every_n_steps: int | None = None,
        on_epoch_end: bool = True,
    ) -> None:
        super().__init__()
        self.checkpoint_upload_mode = checkpoint_upload_mode
        self.validation = validation
        self._every_n_steps = (
            None
            if every_n_steps is None
            else as_whole(every_n_steps, "ReportCallback(every_n_steps=...)", 1, _MOST, ConfigError)
        )
        self._on_epoch_end = as_flag(on_epoch_end, "ReportCallback(on_epoch_end=...)", ConfigError)
        if not self._on_epoch_end and self._every_n_steps is None:
            raise ConfigError(
                "ReportCallback(on_epoch_end=False) would never report. Say after how many steps it should: "
                "every_n_steps=100."
            )
        #: The optimizer steps that were made when it reported last, and when it looked last whether it should.
        self._reported_step = self._seen_step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"reported_step": self._reported_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._reported_step = self._seen_step = int(state_dict.get("reported_step", 0))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._seen_step:  # gradients are being accumulated
            return
        before, self._seen_step = self._seen_step, step
        is_asked_for = context.should_checkpoint()
        every = self._every_n_steps
        is_due = every is not None and step // every > before // every
        # After the last batch of an epoch comes its validation, and then its end.
        if is_asked_for or (is_due and not (trainer.is_last_batch and self._reports_end(step))):
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        step = trainer.global_step
        # A run that is limited by steps and resumed at the end of an epoch ends that epoch once more.
        if step != self._reported_step and self._reports_end(step):
            self._report(trainer)

    def _reports_end(self, step: int) -> bool:
        """Return whether the end of an epoch after so many steps is reported."""
        every = self._every_n_steps
        return self._on_epoch_end or (every is not None and step // every > self._reported_step // every)

    def _report(self, trainer: Any) -> None:
        metrics = {name: plain_scalar(value) for name, value in trainer.callback_metrics.items()}
        metrics["epoch"], metrics["step"] = trainer.current_epoch, trainer.global_step
        self._reported_step = trainer.global_step
        strategy = trainer.strategy
        feeds = getattr(strategy, "feeds", None)
        positions = feeds.align_positions(trainer) if feeds is not None else _positions_after(trainer)
        from powertrain.checkpoint.checkpoint import Checkpoint

        with context.checkpoint_dir() as directory:
            path = os.path.join(directory, self.CHECKPOINT_NAME)
            with getattr(strategy, "own_path", nullcontext)(path):
                trainer.save_checkpoint(path, weights_only=False)
            checkpoint = Checkpoint.from_directory(directory) if os.listdir(directory) else None
            if checkpoint is not None and positions is not None:
                session.current("report").data.capture(checkpoint, positions)
            context.report(
                metrics,
                checkpoint=checkpoint,
                checkpoint_upload_mode=self.checkpoint_upload_mode,
                validation=self.validation,
            )


def _positions_after(trainer: Any) -> dict[str, Any] | None:
    """Return the position of the data after the last batch of an epoch, with a strategy of another package.

    Lightning leaves them without requesting another batch. None within an epoch.
    """
    if not trainer.is_last_batch:
        return None
    return {
        name: {**state, "epoch": state["epoch"] + 1, "position": 0}
        if state.get("position", 0) >= state.get("rows", 0) > 0
        else state
        for name, state in session.current("report").data.positions().items()
    }


class ReportCallback(metaclass=PackageClass, build=callback(_Reporting)):
    """Reports logged metrics with a checkpoint at the end of each epoch, and between: give one to the Trainer.

    A report has ``trainer.callback_metrics``, and the numbers of the epoch and of optimizer steps as "epoch" and
    "step". The checkpoint has what Lightning's own has, as "checkpoint.ckpt": a file, or with a strategy that saves
    shards a directory. The run commits it, and keeps in it where the data stand. A checkpoint is also made when the run
    asks for one, because it is about to end or to get another number of workers.

    Args:
        checkpoint_upload_mode: That of :func:`powertrain.report`.
        validation: That of :func:`powertrain.report`.
        every_n_steps: Report after each so many optimizer steps, too.
        on_epoch_end: Whether the end of each epoch is reported.

    Raises:
        ConfigError: The arguments would never report, or have a wrong type.

    Example::

        trainer = lightning.Trainer(strategy=DDPStrategy(), callbacks=[ReportCallback(every_n_steps=500)])
    """

    if TYPE_CHECKING:  # what it stands for is a class of Lightning's
        CHECKPOINT_NAME: str

        def __new__(
            cls,
            checkpoint_upload_mode: CheckpointUploadMode | str | None = None,
            validation: bool | ValidationTaskConfig = False,
            *,
            every_n_steps: int | None = None,
            on_epoch_end: bool = True,
        ) -> Any:
            """Make an instance of the class for the package in use."""
