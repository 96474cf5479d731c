"""Adapter from a trainable class to a function, so that the rest of a sweep handles only functions and trainers."""

from __future__ import annotations

from typing import Any

from powertrain.errors import ConfigError
from powertrain.tune.trainable.base import Trainable
from powertrain.values.arguments import as_flag, as_whole, shorten
from powertrain.worker import context
from powertrain.worker.progress import StopRun

#: Entries of a result that the sweep adds itself, or that are not metrics.
_NOT_REPORTED = frozenset(
    {
        "config",
        "date",
        "done",
        "hostname",
        "iterations_since_restore",
        "node_ip",
        "pid",
        "should_checkpoint",
        "time_since_restore",
        "time_this_iter_s",
        "time_total_s",
        "timestamp",
        "timesteps_since_restore",
        "training_iteration",
        "trial_id",
    }
)
_MOST = 2**62


class TrainableFunction:
    """The training function of a trainable class. See :func:`as_function`."""

    def __init__(
        self,
        trainable_class: type[Trainable],
        reuse: bool,
        checkpoint_frequency: int,
        checkpoint_at_end: bool,
    ) -> None:
        self.trainable_class = trainable_class
        self._reuse, self._frequency, self._saves_at_end = reuse, checkpoint_frequency, checkpoint_at_end
        self._kept: Trainable | None = None
        # The function's name in messages, and whether its module is pickled with it.
        self.__name__, self.__qualname__ = trainable_class.__name__, trainable_class.__qualname__
        self.__module__, self.__doc__ = trainable_class.__module__, trainable_class.__doc__

    def __call__(self, config: dict[str, Any]) -> None:
        """Train until the result of a step is "done". Called in the process of the trial.

        Args:
            config: The configuration of the trial.
        """
        trainable = self._make(config)
        is_kept = False
        try:
            checkpoint = context.get_checkpoint()
            if checkpoint is not None:
                trainable.restore(checkpoint)
            while not self._advance(trainable):
                pass
            is_kept = self._reuse
        except StopRun:  # the sweep ends the trial: the object is intact
            is_kept = self._reuse
            raise
        finally:
            if is_kept:
                self._kept = trainable
            else:
                trainable.stop()

    def close(self) -> None:
        """Clean up the object that was kept for the next trial."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.stop()

    def _make(self, config: dict[str, Any]) -> Trainable:
        """Return the kept object if it accepts this configuration; a new one otherwise."""
        kept, self._kept = self._kept, None
        if kept is not None:
            try:
                if kept.reset(config):
                    return kept
            except BaseException:
                kept.stop()
                raise
            kept.stop()
        return self.trainable_class(config)

    def _advance(self, trainable: Trainable) -> bool:
        """Train for one iteration and report it; return whether it was the last."""
        result = trainable.train()
        is_done = bool(result.get("done"))
        metrics = {key: value for key, value in result.items() if key not in _NOT_REPORTED}
        # Queried in each iteration, so that the run announces the end or a pause of the trial before it happens.
        is_wanted = can_save(self.trainable_class) and context.should_checkpoint()
        if not (is_wanted or self._is_due(trainable, result, is_done)):
            context.report(metrics)
            return is_done
        from powertrain.checkpoint.checkpoint import Checkpoint

        with context.checkpoint_dir() as directory:
            trainable.save(str(directory))
            context.report(metrics, checkpoint=Checkpoint.from_directory(directory))
        return is_done

    def _is_due(self, trainable: Trainable, result: dict[str, Any], is_done: bool) -> bool:
        if result.get("should_checkpoint") or (is_done and self._saves_at_end):
            return True
        return self._frequency > 0 and trainable.iteration % self._frequency == 0

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_kept": None}  # another process makes its own


def as_function(
    trainable_class: type[Trainable],
    *,
    reuse: bool = False,
    checkpoint_frequency: int | None = 0,
    checkpoint_at_end: bool | None = False,
) -> TrainableFunction:
    """Return the training function of a trainable class: set up, continue from a checkpoint, step and report.

    If the class defines ``save_checkpoint``, a checkpoint is also saved on request of the run, before the trial is
    paused, stopped or moved.

    Args:
        trainable_class: The class.
        reuse: Whether a process that runs several trials keeps the object, and hands it the next configuration through
            ``reset_config``. The caller of the function then calls its ``close`` after the last trial.
        checkpoint_frequency: Every so many iterations a checkpoint is saved; 0 or None for never.
        checkpoint_at_end: Whether a checkpoint is saved with the report of a step that is "done".

    Raises:
        ConfigError: The class is not derived from ``Trainable``, or does not define a required method.
    """
    if not is_trainable_class(trainable_class):
        raise ConfigError(
            f"{shorten(trainable_class)} is no class that is derived from powertrain.tune.Trainable. Derive it, or "
            "give a function of the configuration."
        )
    name = trainable_class.__name__
    if trainable_class.step is Trainable.step:
        raise ConfigError(
            f"{name} has no method step(). Define it to train for one iteration and return metrics."
        )
    given_as = "CheckpointConfig(checkpoint_frequency=...)"
    frequency = as_whole(checkpoint_frequency or 0, given_as, 0, _MOST, ConfigError)
    saves_at_end = as_flag(checkpoint_at_end or False, "CheckpointConfig(checkpoint_at_end=...)", ConfigError)
    if (frequency or saves_at_end) and not can_save(trainable_class):
        raise ConfigError(
            f"{name} has no method save_checkpoint(), and CheckpointConfig asks for checkpoints "
            f"(checkpoint_frequency={frequency}, checkpoint_at_end={saves_at_end}). Define it, or leave these out."
        )
    return TrainableFunction(trainable_class, as_flag(reuse, "reuse_actors"), frequency, saves_at_end)


def is_trainable_class(value: Any) -> bool:
    """Return whether a value is a class that is derived from :class:`Trainable`."""
    return isinstance(value, type) and issubclass(value, Trainable)


def can_save(trainable_class: type[Trainable]) -> bool:
    """Return whether a class can save its state."""
    return trainable_class.save_checkpoint is not Trainable.save_checkpoint
