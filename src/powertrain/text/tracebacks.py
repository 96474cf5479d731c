"""Tracebacks for people: the frames of the user's own code stay, those of this package are folded to one line. Pure.

The files of this package, and the installed ones, are identified once, here: also for stacks of running threads.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

#: Directory of this package.
OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
#: Names of text compiled by libraries: import hooks, numpy's dispatch, torch's graphs.
_GENERATED = ("<frozen", "<__array_function__", "<eval_with_key")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
#: This package as another machine has installed it.
_OURS_ELSEWHERE = tuple(f"{directory}powertrain{os.sep}" for directory in _INSTALLED)

_HEADER = re.compile(r"^( *)Traceback \(most recent call last\):$")
_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$')
_REPEATED = re.compile(r"^ *\[Previous line repeated (\d+) more times?\]$")
#: Lines of one traceback that are held back to fold it: recursion errors of Python's have 1,000 frames at most.
_LONGEST = 10_000


def is_ours(file: str) -> bool:
    """Return True for a file of this package, here or installed on another machine."""
    return file.startswith(OURS) or any(part in file for part in _OURS_ELSEWHERE)


def is_installed(file: str) -> bool:
    """Return True for a file of the standard library or of an installed package."""
    return file.startswith((*_libraries(), *_GENERATED)) or any(part in file for part in _INSTALLED)


@cache
def _libraries() -> tuple[str, ...]:
    """Return the directories of Python's own modules and of installed ones. Read late: it takes milliseconds."""
    import sysconfig

    names = ("stdlib", "purelib", "platlib")
    return tuple({os.path.join(sysconfig.get_path(name), "") for name in names})


@dataclass(frozen=True)
class TracebackFrame:
    """One frame of a traceback's text; ``lines`` are all of it, as they were printed."""

    file: str
    line: int
    function: str
    lines: tuple[str, ...]

    @property
    def is_users(self) -> bool:
        return not is_ours(self.file) and not is_installed(self.file)

    @property
    def count(self) -> int:
        """Number of frames that it stands for: Python folds repeated ones."""
        return 1 + sum(int(found[1]) for line in self.lines if (found := _REPEATED.match(line)))


class TracebackFolder:
    """Folds the tracebacks in a stream of lines. Other lines pass unchanged and at once."""

    def __init__(self) -> None:
        self._block: list[str] = []
        self._indent = ""

    def feed(self, lines: Iterable[str]) -> list[str]:
        """Add lines and return those that can be shown. A traceback is held back until its last frame has come."""
        shown: list[str] = []
        for line in lines:
            if self._block and line.startswith(f"{self._indent}  ") and len(self._block) < _LONGEST:
                self._block.append(line)
                continue
            shown += self.finish()
            if header := _HEADER.match(line):
                self._indent, self._block = header[1], [line]
            else:
                shown.append(line)
        return shown

    def finish(self) -> list[str]:
        """Return the lines held back."""
        block, self._block = self._block, []
        return _folded(block) if block else []


def fold_traceback(text: str) -> str:
    """Return ``text`` with all tracebacks in it folded."""
    folder = TracebackFolder()
    return "\n".join([*folder.feed(text.split("\n")), *folder.finish()])


def users_frames(text: str) -> list[TracebackFrame]:
    """Return the frames of the user's own code in the last traceback of ``text``, the innermost last."""
    blocks: list[list[str]] = []
    for line in text.split("\n"):
        if _HEADER.match(line):
            blocks.append([])
        elif blocks:
            blocks[-1].append(line)
    return [frame for frame in _frames(blocks[-1])[0] if frame.is_users] if blocks else []


def _frames(lines: Sequence[str]) -> tuple[list[TracebackFrame], list[str]]:
    """Return the frames, and the lines before the first of them."""
    frames: list[TracebackFrame] = []
    starts = [place for place, line in enumerate(lines) if _FRAME.match(line)]
    for place, start in enumerate(starts):
        end = starts[place + 1] if place + 1 < len(starts) else len(lines)
        match = _FRAME.match(lines[start])
        assert match is not None
        frames.append(
            TracebackFrame(match["file"], int(match["line"]), match["function"], tuple(lines[start:end]))
        )
    return frames, list(lines[: starts[0]] if starts else lines)


def _folded(block: Sequence[str]) -> list[str]:
    """Return one folded traceback, its header first. One without a user's frame stays whole, as the fault may be
    ours."""
    frames, before = _frames(block[1:])
    if not any(frame.is_users for frame in frames):
        return list(block)
    lines = [block[0], *before]
    between: list[TracebackFrame] = []
    for frame in frames:
        if frame.is_users:
            lines += _fold_between(between)
            lines += frame.lines
            between = []
        else:
            between.append(frame)
    return lines + _fold_between(between)


def _fold_between(frames: Sequence[TracebackFrame]) -> list[str]:
    """Fold the frames between two user frames: this package's become one line, those of libraries around them stay."""
    ours = [place for place, frame in enumerate(frames) if is_ours(frame.file)]
    if not ours:
        return [line for frame in frames for line in frame.lines]
    first, last = ours[0], ours[-1]
    count = sum(frame.count for frame in frames[first : last + 1])
    indent = frames[first].lines[0].partition("File")[0]
    return [
        *(line for frame in frames[:first] for line in frame.lines),
        f"{indent}... {count} {'frame' if count == 1 else 'frames'} of powertrain",
        *(line for frame in frames[last + 1 :] for line in frame.lines),
    ]
