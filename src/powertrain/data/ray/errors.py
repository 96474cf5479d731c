"""What Ray says when it cannot compute rows, with the user's own error first."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from powertrain.errors import DataError

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FRAME = re.compile(r'^ +File "(?P<path>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"/lib/python|\.pyx$")
#: What Python puts between an exception and the one that was raised from it, or while it was handled.
_BETWEEN = re.compile(
    r"^The above exception was the direct (?P<cause>cause) of the following exception:$"
    r"|^During handling of the above exception, another exception occurred:$",
    re.MULTILINE,
)


def what_ray_says(error: Exception) -> str:
    """Why Ray could not compute rows, in sentences that begin with the exception of the user's function, if it is one.

    All that Ray has said follows, in lines of their own.
    """
    for each in _chain(error):
        # An error of Ray's passes for the one that it stands for, which it has as its cause.
        if isinstance(each, DataError) and getattr(each, "cause", None) is None:
            return str(each)
    told = _COLOURS.sub("", str(error)).strip()
    raised = _raised_first(told)
    if raised:
        return f"Ray says: {raised}\n{told}"
    return f"Ray says: {type(error).__name__}: {told}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, what it was raised for, and so on, as far as Ray has kept it."""
    seen: set[int] = set()
    below: Any = error
    while isinstance(below, BaseException) and id(below) not in seen:
        yield below
        seen.add(id(below))
        below = getattr(below, "cause", None) or below.__cause__


def _raised_first(told: str) -> str:
    """The exception that all others in a text with tracebacks come from, in a line, and where it was raised; or "".

    Ray Data keeps that of the user's function in the text only: the object does not survive the way between processes.
    """
    begin, end = 0, len(told)
    for between in reversed(list(_BETWEEN.finditer(told))):
        if not between["cause"]:
            begin = between.end()
            break
        end = between.start()
    frames = list(_FRAME.finditer(told, begin, end))
    if not frames:
        return ""
    lines = told[frames[-1].end() : end].splitlines()
    raised = next((line for line in lines if line and not line[0].isspace()), "")
    # Of the user's own files rather than of a library that they call.
    where = next((frame for frame in reversed(frames) if not _LIBRARY.search(frame["path"])), frames[-1])
    place = f"{os.path.basename(where['path'])}:{where['line']} in {where['function']}"
    return f"{raised} ({place})" if raised else ""
