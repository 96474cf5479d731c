"""Ends of records in the bytes of text files, for cutting a file between them. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np


class ByteStream(Protocol):
    """A stream that is read from the front."""

    def read(self, size: int, /) -> bytes: ...


def pieces(stream: ByteStream, cut: int, last_end: Callable[[bytes], int]) -> Iterator[bytes]:
    """Yield the rest of ``stream``, in pieces of about ``cut`` bytes that end at the end of a record.

    ``last_end`` returns the end of the last whole record in some bytes, 0 where there is none. Only a record longer
    than ``cut`` makes a larger piece.
    """
    held, target = b"", cut
    while True:
        more = stream.read(target - len(held))
        if not more:
            if held:
                yield held
            return
        held += more
        if len(held) < target:
            continue
        end = last_end(held)
        if end == 0:
            target *= 2
            continue
        yield held[:end]
        held = held[end:]
        target = max(cut, 2 * len(held))


def last_line_end(data: bytes) -> int:
    """Return the end of the last line, for files with a record on each line."""
    return data.rfind(b"\n") + 1


@dataclass(frozen=True)
class Dialect:
    """The syntax of a CSV file: one byte each, None where it is not used."""

    delimiter: bytes = b","
    quote: bytes | None = b'"'
    escape: bytes | None = None

    def last_end(self, data: bytes) -> int:
        """Return the end of the last whole record in ``data``, which begins with one; 0 where there is none."""
        # A carriage return at the very end may be the first half of a line end.
        data = data[:-1] if data.endswith(b"\r") else data
        if self.escape is None and (self.quote is None or self.quote not in data):
            return max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        quotes = self._quotes(data) if self.escape is None else None
        if quotes is not None:
            return _last_even(data, quotes)
        return max(self.ends(data), default=0)

    def ends(self, data: bytes) -> Iterator[int]:
        """Yield the end of each whole record in ``data``, found field by field."""
        place = 0
        while found := self._record.match(data, place):
            place = found.end()
            yield place

    def _quotes(self, data: bytes) -> Any:
        """Return the positions of quotes, if every second one opens a field or follows the one before (``""`` is a
        quote within quotes); None where some are in the middle of a field and have no meaning."""
        assert self.quote is not None
        values = np.frombuffer(data, np.uint8)
        places = np.flatnonzero(values == self.quote[0])
        opening = places[::2]
        before = values[np.maximum(opening - 1, 0)]
        opens = (opening == 0) | np.isin(before, list(self.delimiter + b"\r\n"))
        opens[1:] |= opening[1:] - places[1::2][: len(opening) - 1] == 1
        return places if opens.all() else None

    @cached_property
    def _record(self) -> re.Pattern[bytes]:
        delimiter = re.escape(self.delimiter)
        quote = re.escape(self.quote) if self.quote is not None else None
        escape = re.escape(self.escape) if self.escape is not None else None
        escaped = rb"|" + escape + rb"." if escape is not None else b""
        plain = rb"(?:[^" + delimiter + (escape or b"") + rb"\r\n]" + escaped + rb")*"
        if quote is None:
            field = plain
        else:
            inner = rb"(?:[^" + quote + (escape or b"") + rb"]" + escaped + rb"|" + quote + quote + rb")*"
            field = (
                rb"(?:"
                + quote
                + inner
                + quote
                + rb"(?!"
                + quote
                + rb")"
                + plain
                + rb"|(?!"
                + quote
                + rb")"
                + plain
                + rb")"
            )
        record = field + rb"(?:" + delimiter + field + rb")*(?:\r\n|\n|\r)"
        return re.compile(record, re.DOTALL)


def _last_even(data: bytes, quotes: Any) -> int:
    """Return the position behind the last line end that has an even number of quotes before it."""
    values = np.frombuffer(data, np.uint8)
    line_ends = np.flatnonzero((values == 10) | (values == 13))
    outside = line_ends[np.searchsorted(quotes, line_ends) % 2 == 0]
    return int(outside[-1]) + 1 if len(outside) else 0
