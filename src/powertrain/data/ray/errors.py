"""Messages for Ray's errors while computing rows, with the user's own error first."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from powertrain.errors import DataError

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_FRAME = re.compile(r'^ +File "(?P<path>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
_LIBRARY = re.compile(r"/lib/python|\.pyx$")
#: Python's separators between an exception and its cause, or the one that was being handled.
_BETWEEN = re.compile(
    r"^The above exception was the direct (?P<cause>cause) of the following exception:$"
    r"|^During handling of the above exception, another exception occurred:$",
    re.MULTILINE,
)


def ray_error_message(error: Exception) -> str:
    """Return the reason why Ray could not compute rows, beginning with the exception of the user's function, if any.

    Ray's full message follows on separate lines.
    """
    for each in _chain(error):
        # Ray's error has the type of the original one, which is its cause.
        if isinstance(each, DataError) and getattr(each, "cause", None) is None:
            return str(each)
    text = _COLOURS.sub("", str(error)).strip()
    raised = _original_error(text)
    if raised:
        return f"Ray says: {raised}\n{text}"
    return f"Ray says: {type(error).__name__}: {text}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error``, its cause, and so on, as far as Ray has kept it."""
    seen: set[int] = set()
    below: Any = error
    while isinstance(below, BaseException) and id(below) not in seen:
        yield below
        seen.add(id(below))
        below = getattr(below, "cause", None) or below.__cause__


def _original_error(text: str) -> str:
    """Return the original exception of a text with tracebacks in one line, and where it was raised; or "".

    Ray Data keeps that of the user's function in the text only: the object is not sent between processes.
    """
    begin, end = 0, len(text)
    for between in reversed(list(_BETWEEN.finditer(text))):
        if not between["cause"]:
            begin = between.end()
            break
        end = between.start()
    frames = list(_FRAME.finditer(text, begin, end))
    if not frames:
        return ""
    lines = text[frames[-1].end() : end].splitlines()
    raised = next((line for line in lines if line and not line[0].isspace()), "")
    # Prefer the user's own files to a library that they call.
    where = next((frame for frame in reversed(frames) if not _LIBRARY.search(frame["path"])), frames[-1])
    place = f"{os.path.basename(where['path'])}:{where['line']} in {where['function']}"
    return f"{raised} ({place})" if raised else ""
