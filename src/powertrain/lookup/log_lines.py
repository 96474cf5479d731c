"""Lines of log files: split, read from the end, made safe for a terminal.

A log holds arbitrary output of a rank: lines may be unterminated, binary or long. Little of one file is in memory at a
time, and a line that is longer than :data:`LONGEST` comes in pieces.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator
from typing import BinaryIO

from powertrain.text.printable import clean_output, reset_colours

#: Bytes of the longest line that is kept together; of a piece that is read at a time.
LONGEST = 1 << 16
_PIECE = 1 << 16


class LineSplitter:
    """Splits bytes into lines, without their ends."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that end in ``data``; a line that is too long comes in pieces."""
        *whole, rest = (self._rest + data).split(b"\n")
        if max(map(len, whole), default=0) > LONGEST:
            whole = [piece for line in whole for piece in _pieces(line)]
        *full, self._rest = _pieces(rest)
        return whole + full

    def finish(self) -> list[bytes]:
        """Return the rest of an unterminated line."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


def _pieces(line: bytes) -> list[bytes]:
    """Return ``line`` in pieces that are not too long; at least one."""
    return [line[start : start + LONGEST] for start in range(0, len(line), LONGEST)] or [b""]


def read_pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the rest of the file in pieces."""
    while piece := file.read(_PIECE):
        yield piece


def start_of_last(file: BinaryIO, count: int) -> int:
    """Return the offset of the last ``count`` lines. Only the end of the file is read, in pieces."""
    end = position = file.seek(0, os.SEEK_END)
    if count <= 0 or end == 0:
        return end
    file.seek(end - 1)
    missing = count + (file.read(1) == b"\n")  # an end of the last line begins no other
    while position > 0:
        start = max(0, position - _PIECE)
        file.seek(start)
        piece = file.read(position - start)
        found = len(piece)
        while missing and (found := piece.rfind(b"\n", 0, found)) >= 0:
            missing -= 1
        if not missing:
            return start + found + 1
        position = start
    return 0


def last_matching(file: BinaryIO, count: int, pattern: re.Pattern[str]) -> tuple[list[bytes], int]:
    """Return the last ``count`` lines of the file that match ``pattern``, and the offset to read from.

    An unterminated line is left to the next read; if it matches so far, it is one of the ``count``.
    """
    lines, found = LineSplitter(), deque[bytes](maxlen=count)
    for piece in read_pieces(file):
        found.extend(line for line in lines.feed(piece) if matches(line, pattern))
    unfinished = b"".join(lines.finish())
    if unfinished and len(found) == count > 0 and matches(unfinished, pattern):
        found.popleft()
    return list(found), file.tell() - len(unfinished)


def matches(line: bytes, pattern: re.Pattern[str] | None) -> bool:
    """Return whether the line matches the pattern, or there is no pattern."""
    return pattern is None or pattern.search(line.decode("utf-8", "replace")) is not None


def for_terminal(line: bytes) -> bytes:
    """Return a line for a terminal: coloured text without other controls; of a progress bar the last state."""
    text = line.decode("utf-8", "replace").rstrip("\r")
    return reset_colours(clean_output(text[text.rfind("\r") + 1 :])).encode()
