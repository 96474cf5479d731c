"""Callbacks that report the evaluations of a boosting library, and save its model as one file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from powertrain.errors import ConfigError
from powertrain.frameworks.reporting import Postprocessing, as_names, check_filename, file_checkpoint
from powertrain.values.arguments import as_flag, as_whole, shorten
from powertrain.worker import context

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.frameworks.boosting.library import BoostingLibrary

_MOST = 2**62


class BoosterReporting:
    """Reports the evaluations of each iteration as "dataset-metric", and checkpoints of the model.

    Every rank reports; rank 0 saves the model, which is the same on all of them. A checkpoint is also saved when the
    run asks for one, because it is about to end or to get another number of workers.

    Args:
        metrics: Metrics to report: a name, a list of names, or a dict from the reported name to the library's. By
            default all.
        filename: The name of the model's file in a checkpoint; by default ``CHECKPOINT_NAME``.
        frequency: Save a checkpoint after every so many iterations of the whole model; 0 for never.
        checkpoint_at_end: Save a checkpoint after the last iteration.
        results_postprocessing_fn: Takes the metrics that would be reported and returns those that are.

    Raises:
        ConfigError: An argument has a wrong value.
    """

    library: ClassVar[BoostingLibrary]
    CHECKPOINT_NAME: ClassVar[str]

    def __init__(
        self,
        metrics: str | list[str] | dict[str, str] | None = None,
        filename: str | None = None,
        frequency: int = 0,
        checkpoint_at_end: bool = True,
        results_postprocessing_fn: Postprocessing | None = None,
    ) -> None:
        name = type(self).__name__
        self._names = as_names(metrics, name)
        self.filename = check_filename(self.CHECKPOINT_NAME if filename is None else filename, name)
        self._frequency = as_whole(frequency, f"{name}(frequency=...)", 0, _MOST, ConfigError)
        self._saves_at_end = as_flag(checkpoint_at_end, f"{name}(checkpoint_at_end=...)", ConfigError)
        if results_postprocessing_fn is not None and not callable(results_postprocessing_fn):
            raise ConfigError(
                f"{name}(results_postprocessing_fn={shorten(results_postprocessing_fn)}) takes a function of a dict of "
                "metrics that returns one."
            )
        self._postprocess = results_postprocessing_fn
        self._last_metrics: dict[str, Any] = {}
        self._has_saved_last = False

    @classmethod
    def get_model(cls, checkpoint: Checkpoint, filename: str | None = None) -> Any:
        """Return the model of a checkpoint.

        Args:
            checkpoint: A checkpoint that this callback has reported.
            filename: The name of the file, as it was given to the callback.

        Returns:
            The model, a ``Booster`` of the library.

        Raises:
            CheckpointError: The checkpoint holds no such model.
            ImportError: The library is not installed.

        Example:
            >>> booster = ReportCallback.get_model(result.checkpoint)
        """
        name = cls.CHECKPOINT_NAME if filename is None else filename
        return cls.library.load_model(checkpoint, name, f"{cls.__name__}.get_model")

    def _begin(self) -> None:
        """Forget an earlier training: a callback may be used for several."""
        self._last_metrics, self._has_saved_last = {}, False

    def _report(self, evaluations: Mapping[str, Any], model: Any, iteration: int, is_last: bool) -> None:
        """Report an iteration, counted from 0, and save the model where that is due."""
        # The models of a cross-validation cannot be saved, so checkpoint requests of the run are ignored.
        is_wanted = hasattr(model, "save_model") and context.should_checkpoint()
        is_due = is_wanted or (self._frequency > 0 and (iteration + 1) % self._frequency == 0)
        self._last_metrics = self._choose(evaluations)
        self._has_saved_last = is_due or (is_last and self._saves_at_end)
        self._send(self._last_metrics, model, self._has_saved_last)

    def finish(self, model: Any) -> None:
        """Report the last metrics once more, with a checkpoint, where one is due at the end and was not saved yet."""
        # The models of a cross-validation are not saved, so there is nothing to add to the last report.
        if self._saves_at_end and not self._has_saved_last and hasattr(model, "save_model"):
            self._has_saved_last = True
            self._send(self._last_metrics, model, True)

    def _choose(self, evaluations: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reported metrics of an iteration's evaluations, by the library's "dataset-metric"."""
        chosen = dict(evaluations)
        if self._names is not None:
            if missing := [name for name in self._names.values() if name not in evaluations]:
                raise ConfigError(
                    f"{type(self).__name__}(metrics=...) names {missing[0]!r}, and {self.library.title} has evaluated "
                    f"{', '.join(map(repr, evaluations)) or 'nothing'}. Name one of these, or pass the dataset to be "
                    "evaluated to the training."
                )
            chosen = {reported: evaluations[name] for reported, name in self._names.items()}
        return dict(self._postprocess(chosen)) if self._postprocess is not None else chosen

    def _send(self, metrics: dict[str, Any], model: Any, should_save: bool) -> None:
        """Report metrics, and the model with them where it can and should be saved."""
        if not should_save or not hasattr(model, "save_model"):  # a cross-validation has many models
            context.report(metrics)
            return
        is_first = context.get_context().get_world_rank() == 0
        write: Callable[[str], Any] = model.save_model if is_first else _write_nothing
        with file_checkpoint(self.filename, write) as checkpoint:
            context.report(metrics, checkpoint=checkpoint)


def _write_nothing(path: str) -> None:
    """All ranks have the same model: one of them saves it."""
