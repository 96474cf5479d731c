"""Directories that a Trainer has saved, in its output directory and in checkpoints of the run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from typing import Any

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.storage.local import copy_file

#: Where the Trainer's files lie in a checkpoint of the run, as with Ray Train.
CHECKPOINT_NAME = "checkpoint"
#: The file that a Trainer writes last.
_STATE = "trainer_state.json"
_SAVED = re.compile(r"checkpoint-(\d+)")


def is_whole(directory: str) -> bool:
    """True where a Trainer has saved all of its files. One that was killed meanwhile leaves a part of them."""
    return os.path.isfile(os.path.join(directory, _STATE))


def saved_at(output_dir: str, step: int) -> str | None:
    """Return the checkpoint that a Trainer has saved at ``step``; None where it has saved none.

    By the step and not the newest one: the output directory may hold checkpoints of an earlier training.
    """
    directory = os.path.join(output_dir, f"checkpoint-{step}")
    return directory if os.path.isdir(directory) else None


def newest_whole(output_dir: str) -> str | None:
    """Return the directory with the highest step that a Trainer has saved completely; None for none."""
    try:
        names = os.listdir(output_dir)
    except OSError:
        return None
    steps = sorted((int(found[1]) for name in names if (found := _SAVED.fullmatch(name))), reverse=True)
    directories = (os.path.join(output_dir, f"checkpoint-{step}") for step in steps)
    return next((directory for directory in directories if is_whole(directory)), None)


@contextlib.contextmanager
def opened(checkpoint: Checkpoint) -> Iterator[str | None]:
    """Give the Trainer's directory in a checkpoint of the run; None where it has none."""
    with checkpoint.as_directory() as directory:
        yield inside(directory)


def inside(directory: str) -> str | None:
    """Return the Trainer's directory in that of a checkpoint, or ``directory`` itself where that is one."""
    found = (os.path.join(directory, CHECKPOINT_NAME), directory)
    return next((path for path in found if is_whole(path)), None)


def read_state(directory: str) -> dict[str, Any]:
    """Read the state of a Trainer that it has saved; {} where it cannot be read, which the Trainer itself reports."""
    try:
        with open(os.path.join(directory, _STATE), encoding="utf-8") as file:
            state = json.load(file)
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def copy_directory(source: str, target: str) -> None:
    """Copy a directory by the cheapest means there is. ``target`` is replaced, and never holds a part of it."""
    unfinished = f"{target}.unfinished"
    for left in (unfinished, target):
        shutil.rmtree(left, ignore_errors=True)
    for parent, _, names in os.walk(source):
        below = os.path.normpath(os.path.join(unfinished, os.path.relpath(parent, source)))
        os.makedirs(below)
        for name in names:
            copy_file(os.path.join(parent, name), os.path.join(below, name))
    os.rename(unfinished, target)
