"""One fact as one line of a journal, with a hash of itself, so that a changed character is found.

::

    {"fact":"ended","time":1.0,"state":"finished","reason":"","check":"<xxh3-64 of what stands before the comma>"}

Lines of earlier versions have no hash and are read as they are. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from powertrain.run import events as ev

_CHECK = re.compile(rb',"check":"([0-9a-f]{16})"}\Z')


def encode_line(event: ev.Event) -> bytes:
    """Return the fact as one line, with its line break."""
    return as_line(ev.encode(event))


def as_line(encoded: bytes) -> bytes:
    """Return a JSON object as one line with its hash and its line break."""
    body = encoded[:-1]
    return body + b',"check":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n'


@dataclass
class JournalLines:
    """The facts of one file of a journal, read in one piece or as it grows."""

    events: list[Any] = field(default_factory=list)
    #: Whole lines that are damaged.
    damaged: int = 0
    #: Whole lines with facts that this version does not know.
    unknown: int = 0
    #: The last bytes, without a line break after them.
    rest: bytes = b""
    #: Turns a line into a fact; raises ``msgspec.DecodeError`` for one that it does not know.
    decode: Callable[[bytes], Any] = ev.decode

    def feed(self, data: bytes) -> list[Any]:
        """Take the next bytes of the file; returns the facts that are new."""
        *whole, self.rest = (self.rest + data).split(b"\n")
        before = len(self.events)
        for line in whole:
            if line:
                self._take(line)
        return self.events[before:]

    def finish(self) -> bool:
        """The file has no more bytes: take a last line that lacks only its line break. True where one was cut."""
        line, self.rest = self.rest, b""
        if not line:
            return False
        before = self.damaged
        self._take(line)
        was_cut, self.damaged = self.damaged > before, before
        return was_cut

    def _take(self, line: bytes) -> None:
        found = _CHECK.search(line)
        if found and found[1] != xxhash.xxh3_64_hexdigest(line[: found.start()]).encode():
            self.damaged += 1
            return
        try:
            self.events.append(self.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if _is_object(line):
                self.unknown += 1
            else:
                self.damaged += 1


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
