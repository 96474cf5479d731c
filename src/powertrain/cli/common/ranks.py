"""Ranks as they are named on the command line. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import typer

#: More ranks than any run has: a slip of the finger must not make a list of a billion.
_LAST_RANK = 1 << 20


def parse_ranks(words: Sequence[str]) -> tuple[int, ...]:
    """Return the ranks of ``["0-3,7", "9"]``, sorted and unique; raises ``typer.BadParameter`` for invalid ones."""
    ranks: set[int] = set()
    for word in words:
        for part in word.split(","):
            first, dash, last = (piece.strip() for piece in part.partition("-"))
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise typer.BadParameter(f"{part!r} is not a rank. Name ranks as in 0-3,7.")
            low, high = int(first), int(last or first)
            if not low <= high <= _LAST_RANK:
                raise typer.BadParameter(f"{part!r} names no ranks: the lower comes first, as in 0-3.")
            ranks.update(range(low, high + 1))
    return tuple(sorted(ranks))
