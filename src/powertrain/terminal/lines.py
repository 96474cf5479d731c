"""Output of ranks, assembled into lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from powertrain.text.printable import clean_output, indent_continuation, without_colours
from powertrain.text.redaction import redact

#: A longer line of a rank is shown in pieces.
_LINE_LIMIT = 64 * 2**10
#: A pipe that poll() calls writable takes 4096 bytes at once: 1024 characters in UTF-8.
PIECE = 1024


@dataclass(frozen=True)
class Line:
    """One line to print: ``rank`` -1 for the run's own, ``style`` for live mode.

    Every line of a run passes here, so here its own lose control characters and secrets of addresses: texts in them
    come from names, errors, other hosts and earlier starts. Line ends in such a text are followed by blanks. Output of
    a rank has been cleaned by :class:`LineAssembler`.
    """

    text: str
    rank: int = -1
    style: str = ""

    def __post_init__(self) -> None:
        if self.rank < 0:
            object.__setattr__(self, "text", indent_continuation(without_colours(redact(self.text))))

    def plain(self) -> str:
        """Return the line for a stream without colours."""
        return self.text if self.rank < 0 else f"[rank {self.rank}] {self.text}"


_LINE_PARTS = re.compile(rb"[\r\n]|[^\r\n]+")


class LineAssembler:
    """Turns one rank's bytes into lines, the same lines however the bytes are cut.

    A carriage return starts the line over, as on a screen: of a progress bar the last state remains. Bytes
    that are not UTF-8 are replaced. At most one line of ``_LINE_LIMIT`` bytes is held.
    """

    def __init__(self) -> None:
        self._current = bytearray()
        self._returned = False
        #: True while the unfinished line has been restarted by a carriage return: a progress bar.
        self.is_bar = False

    def feed(self, data: bytes) -> list[str]:
        """Take more bytes; return the lines they complete."""
        lines: list[str] = []
        for part in _LINE_PARTS.findall(data):
            if part == b"\r":
                self._returned = True
            elif part == b"\n":
                lines.append(self._take())
            else:
                if self._returned:
                    self._current.clear()
                    self._returned, self.is_bar = False, True
                self._current += part
                lines += self._overflow()
        return lines

    def finish(self) -> list[str]:
        """Return the unfinished line, if there is one."""
        return [self._take()] if self._current else []

    def unfinished(self) -> str:
        """Return the unfinished line."""
        return _readable(bytes(self._current))

    def _take(self) -> str:
        text = self.unfinished()
        self._current.clear()
        self._returned = self.is_bar = False
        return text

    def _overflow(self) -> Iterator[str]:
        while len(self._current) > _LINE_LIMIT:
            cut = _LINE_LIMIT
            while cut > _LINE_LIMIT - 4 and self._current[cut] & 0xC0 == 0x80:
                cut -= 1  # not inside a character
            yield _readable(bytes(self._current[:cut]))
            del self._current[:cut]


def _readable(data: bytes) -> str:
    return clean_output(data.decode("utf-8", "replace"))
