"""Checks of trackers' settings."""

from __future__ import annotations

import importlib.util
import os
import re
from typing import Any

from powertrain.config.checks import Refusal, text
from powertrain.errors import ConfigError

#: A tracker's name is part of the name of a file.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def tracker_name(value: Any) -> str:
    """Check a name of a tracker."""
    given = text(value)
    if not _NAME.fullmatch(given):
        raise Refusal("it names a file", "Use letters, digits, '-' and '_', at most 64 of them.")
    return given


def file_path(value: Any) -> str:
    """Check a path of this machine, and make it absolute."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise Refusal("it is not a path", "Give a path of this machine.")
    path = os.fsdecode(value)
    if "://" in path or "\0" in path:
        raise Refusal("it is not a path of this machine", "Give a local or mounted path.")
    return os.path.abspath(os.path.expanduser(path))


def require(tracker: str, module: str, extra: str) -> None:
    """Raise :class:`ConfigError` where the package of a tracker is not installed. Imports nothing of it."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"The tracker {tracker!r} needs the package {module!r}, which is not installed here. Install it with: "
            f"pip install 'powertrain[{extra}]'."
        )
