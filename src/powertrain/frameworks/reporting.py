"""What the callbacks have in common: which metrics are reported under which names, and checkpoints with one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from powertrain.arguments import as_flag, as_whole, shorten
from powertrain.errors import ConfigError
from powertrain.worker import context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from powertrain.checkpoint.checkpoint import Checkpoint

_MOST = 2**62
#: Takes the metrics that would be reported and returns those that are.
Postprocessing = Callable[[dict[str, Any]], Mapping[str, Any]]


def as_names(metrics: Any, caller: str) -> dict[str, str] | None:
    """Return the argument ``metrics`` of a callback as a dict: by reported name the library's own; None for all.

    Raises:
        ConfigError: It is no name, list of names or dict of names.
    """
    if not metrics:
        return None
    if isinstance(metrics, str):
        return {metrics: metrics}
    names = dict(metrics) if isinstance(metrics, Mapping) else None
    if isinstance(metrics, (list, tuple, set, frozenset)):
        names = {name: name for name in metrics}
    if names is None or not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise ConfigError(
            f"{caller}(metrics={shorten(metrics)}) takes the name of a metric, a list of names, or a dict such as "
            "{'loss': 'eval-logloss'} that gives each another name."
        )
    return names


def check_filename(filename: Any, caller: str) -> str:
    """Return the name of a file in a checkpoint; raises :class:`ConfigError` for anything else."""
    if (
        isinstance(filename, str)
        and filename
        and filename == os.path.basename(filename)
        and filename[0] != "."
    ):
        return filename
    raise ConfigError(
        f"{caller}(filename={shorten(filename)}) takes the name of a file, without a directory."
    )


@contextmanager
def file_checkpoint(filename: str, write: Callable[[str], None]) -> Iterator[Checkpoint | None]:
    """Give a checkpoint with one file, for a report inside; None on a rank that wrote nothing.

    Args:
        filename: The name of the file.
        write: Called with the path of the file on every rank: for many libraries saving is a collective.
    """
    from powertrain.checkpoint.checkpoint import Checkpoint

    with context.checkpoint_dir() as directory:
        write(os.path.join(directory, filename))
        yield Checkpoint.from_directory(directory) if os.listdir(directory) else None


class BoosterReporting:
    """Reports evaluations of a boosting library, and saves its model as one file.

    Args:
        metrics: Metrics to report: a name, a list of names, or a dict from the reported name to the library's. By
            default all.
        filename: The name of the model's file in a checkpoint.
        frequency: Every so many iterations a checkpoint is saved; 0 for never.
        checkpoint_at_end: Whether a checkpoint is saved after the last iteration.
        results_postprocessing_fn: Takes the metrics that would be reported and returns those that are.
    """

    #: The library, for messages.
    library = ""

    def __init__(
        self,
        metrics: Any,
        filename: str,
        frequency: int,
        checkpoint_at_end: bool,
        results_postprocessing_fn: Postprocessing | None,
    ) -> None:
        name = type(self).__name__
        self._names = as_names(metrics, name)
        self.filename = check_filename(filename, name)
        self._frequency = as_whole(frequency, f"{name}(frequency=...)", 0, _MOST, ConfigError)
        self._saves_at_end = as_flag(checkpoint_at_end, f"{name}(checkpoint_at_end=...)", ConfigError)
        if results_postprocessing_fn is not None and not callable(results_postprocessing_fn):
            raise ConfigError(
                f"{name}(results_postprocessing_fn={shorten(results_postprocessing_fn)}) takes a function of a dict of "
                "metrics that returns one."
            )
        self._postprocess = results_postprocessing_fn

    def is_due(self, iteration: int) -> bool:
        """Return whether an iteration, counted from 0, has a checkpoint."""
        return self._frequency > 0 and (iteration + 1) % self._frequency == 0

    def choose(self, evaluations: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is reported of the evaluations of an iteration.

        Args:
            evaluations: By the library's name, "dataset-metric".

        Raises:
            ConfigError: A metric that was asked for is not among them.
        """
        chosen = dict(evaluations)
        if self._names is not None:
            if missing := [name for name in self._names.values() if name not in evaluations]:
                raise ConfigError(
                    f"{type(self).__name__}(metrics=...) names {missing[0]!r}, and {self.library} has evaluated "
                    f"{', '.join(map(repr, evaluations)) or 'nothing'}. Name one of these, or pass the dataset to be "
                    "evaluated to the training."
                )
            chosen = {reported: evaluations[name] for reported, name in self._names.items()}
        return dict(self._postprocess(chosen)) if self._postprocess is not None else chosen

    def send(self, metrics: dict[str, Any], model: Any, should_save: bool) -> None:
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
