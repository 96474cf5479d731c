"""Warnings and tracebacks that several ranks print alike: in full for the first rank, in one line for the others. Pure.

All ranks run the same code, so a warning of a library comes from each of them, and so does the traceback of a broken
collective. The log of each rank has all of its output.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable

_TRACEBACK = "Traceback (most recent call last):"
#: A line of Python's warnings: file, line, category. The line of source code follows it, indented.
_WARNING = re.compile(r"^\S.*?:\d+: (?P<category>\w*Warning): ")
_DIGITS = re.compile(r"\d+")
#: Number of remembered texts, and of buffered lines of an incomplete traceback.
_REMEMBERED, _HELD_LINES = 500, 2000


class Echoes:
    """Folds output that another rank has printed before."""

    def __init__(self) -> None:
        #: The rank that printed a text first, by text.
        self._first: OrderedDict[str, int] = OrderedDict()
        #: Lines of an incomplete traceback, by rank.
        self._held: dict[int, list[str]] = {}
        #: Ranks whose next line belongs to a warning that was folded.
        self._skipping: set[int] = set()

    def fold(self, rank: int, lines: Iterable[str]) -> list[str]:
        """Return the lines to show for ``lines`` of ``rank``. A traceback is held until it is whole."""
        shown: list[str] = []
        for line in lines:
            shown += self._fold_line(rank, line)
        return shown

    def finish(self, rank: int) -> list[str]:
        """Return the buffered lines of ``rank``, after its last line."""
        self._skipping.discard(rank)
        return self._held.pop(rank, [])

    def _fold_line(self, rank: int, line: str) -> list[str]:
        held = self._held.get(rank)
        if held is not None:
            held.append(line)
            if line.startswith(" ") and len(held) < _HELD_LINES:
                return []
            return self._fold_traceback(rank, self._held.pop(rank))
        if rank in self._skipping:
            self._skipping.discard(rank)
            if line.startswith("  "):
                return []
        if line == _TRACEBACK:
            self._held[rank] = [line]
            return []
        if found := _WARNING.match(line):
            return self._fold_warning(rank, line, found["category"])
        return [line]

    def _fold_traceback(self, rank: int, block: list[str]) -> list[str]:
        # Numbers in the message differ between ranks: ports, processes, ranks.
        first = self._first_rank("\n".join([*block[:-1], _DIGITS.sub("#", block[-1])]), rank)
        if first == rank:
            return block
        return [f"{block[-1]} (same traceback as rank {first}; in full in the log of this rank)"]

    def _fold_warning(self, rank: int, line: str, category: str) -> list[str]:
        first = self._first_rank(line, rank)
        if first == rank:
            return [line]
        self._skipping.add(rank)
        return [f"the same {category} as rank {first} (in full in the log of this rank)"]

    def _first_rank(self, text: str, rank: int) -> int:
        """Return the rank that printed ``text`` first: ``rank`` if it is new."""
        first = self._first.setdefault(text, rank)
        self._first.move_to_end(text)
        if len(self._first) > _REMEMBERED:
            self._first.popitem(last=False)
        return first
