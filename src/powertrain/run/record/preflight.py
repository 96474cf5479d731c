"""Checks of the directories that a run will use, before any process starts. Nothing is created."""

from __future__ import annotations

import os

from powertrain.config.data import DataConfig
from powertrain.config.run import RunConfig
from powertrain.errors import ConfigError


def check_directories(run: RunConfig, data: DataConfig) -> None:
    """Raise :class:`ConfigError` for a directory of this machine that can be seen not to be usable."""
    config = run.checkpoint_config
    working_dir = None if run.working_dir == "scratch" else run.working_dir
    named = [
        ("CheckpointConfig(staging_dir=...)", config.staging_dir, True),
        ("RunConfig(working_dir=...)", working_dir, False),
        ("DataConfig(cache_dir=...)", data.cache_dir, True),
    ]
    for option, given, is_written in named:
        if given is not None and (why := why_unusable(os.fspath(given), is_written=is_written)):
            raise ConfigError(f"{option} cannot be used: {why}. Give a directory that you can write to.")


def why_unusable(path: str, *, is_written: bool) -> str:
    """Return why ``path`` is not a directory, or cannot be made one, as a clause; "" where it may be.

    Args:
        path: Where the directory is, or will be made.
        is_written: True when files will be made in it; otherwise one that exists need only be entered.
    """
    given = directory = os.path.abspath(os.path.expanduser(path))
    while not os.path.lexists(directory):
        directory = os.path.dirname(directory)
    if not os.path.isdir(directory):
        what = "a link that leads nowhere" if os.path.islink(directory) else "a file, not a directory"
        return f"{directory!r} is {what}"
    needed = os.W_OK | os.X_OK if is_written or directory != given else os.X_OK
    if not os.access(directory, needed):
        return f"{directory!r} is not writable for this user"
    return ""
