"""Checkpoints that hold one model in one file, as Ray Train's checkpoints of frameworks do."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from powertrain.checkpoint.checkpoint import Checkpoint, temporary_checkpoint
from powertrain.errors import CheckpointError

_CheckpointT = TypeVar("_CheckpointT", bound=Checkpoint)


def saved_model(
    cls: type[_CheckpointT], filename: str, write: Callable[[str], Any], path: str | None, preprocessor: Any
) -> _CheckpointT:
    """Return a checkpoint with one file.

    Args:
        cls: The class of the checkpoint.
        filename: The name of the file.
        write: Writes the model to the path that it is given.
        path: A directory to write to; None for a temporary one that is removed with the last reference to the
            checkpoint in this process.
        preprocessor: Only None: keep a preprocessor in the metadata.

    Raises:
        CheckpointError: ``path`` is no directory, or a preprocessor is given.
    """
    if preprocessor is not None:
        raise CheckpointError(
            f"preprocessor={type(preprocessor).__name__} cannot be kept in a checkpoint here. Keep it in the metadata: "
            "checkpoint.update_metadata({'preprocessor': preprocessor.serialize()})."
        )
    if path is not None and not os.path.isdir(path):
        raise CheckpointError(f"path={path!r} is not a directory. Give an empty one, or leave it out.")
    checkpoint = temporary_checkpoint(cls) if path is None else cls(path)
    write(os.path.join(checkpoint.path, filename))
    return checkpoint
