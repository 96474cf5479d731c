"""The common part of the callbacks: names of the reported metrics, and checkpoints with one file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.values.arguments import shorten
from powertrain.worker import context

if TYPE_CHECKING:
    from collections.abc import Iterator

    from powertrain.checkpoint.checkpoint import Checkpoint

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
