"""The rows of a manifest after a limit, a split or a repartition. Pure: blocks in, blocks out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Union

from powertrain.data.plan.plan import Block


def between(blocks: Iterable[Block], start: int, stop: int) -> tuple[Block, ...]:
    """Return rows ``start`` to before ``stop``, counted over all blocks, without empty blocks."""
    found, first = [], 0
    for block in blocks:
        low, high = max(start - first, 0), min(stop - first, block.rows)
        if low < high:
            found.append(replace(block, start=block.start + low, rows=high - low))
        first += block.rows
    return tuple(found)


def pieces(blocks: Sequence[Block], cuts: Sequence[int]) -> list[tuple[Block, ...]]:
    """Return the rows before, between and after the ascending ``cuts``; a cut beyond the end is at the end."""
    found: list[list[Block]] = [[] for _ in range(len(cuts) + 1)]
    piece = first = 0
    for block in blocks:
        at = 0
        while at < block.rows:
            while piece < len(cuts) and cuts[piece] <= first + at:
                piece += 1
            stop = block.rows if piece == len(cuts) else min(block.rows, cuts[piece] - first)
            found[piece].append(replace(block, start=block.start + at, rows=stop - at))
            at = stop
        first += block.rows
    return [tuple(piece) for piece in found]


def even_cuts(rows: int, count: int) -> list[int]:
    """Return the cuts of ``rows`` rows into ``count`` pieces whose sizes differ by at most one."""
    return [number * rows // count for number in range(1, count)]


def proportional_cuts(rows: int, proportions: Sequence[float]) -> list[int]:
    """Return the cuts that give each piece its proportion of the rows, rounded down; the rest is one more piece."""
    total, cuts = Fraction(0), []
    for proportion in proportions:
        total += decimal(proportion)
        cuts.append(int(total * rows))
    return cuts


def rows_of_test(rows: int, test_size: Union[int, float]) -> int:
    """Return the number of test rows: at least one, with at least one left, where there are two."""
    if isinstance(test_size, int):
        return test_size
    return max(min(rows - int((1 - decimal(test_size)) * rows), rows - 1), min(rows, 1))


def shares(counts: Sequence[int], wanted: int) -> list[int]:
    """Return how many to take from each count so that ``wanted`` are taken in all, each in proportion to its size."""
    total, before, taken = sum(counts), 0, []
    for count in counts:
        after = before + count
        taken.append(after * wanted // total - before * wanted // total if total else 0)
        before = after
    return taken


def repartitioned(blocks: Sequence[Block], cuts: Sequence[int]) -> tuple[Block, ...] | None:
    """Return the same rows in blocks that end at these cuts, or None where one would need rows of two blocks."""
    parts = pieces(blocks, cuts)
    if any(len(part) > 1 for part in parts):
        return None
    return tuple(part[0] for part in parts if part)


def by_part(blocks: Iterable[Block]) -> dict[int, list[Block]]:
    """Return the blocks of each part of a plan, in their order."""
    found: dict[int, list[Block]] = {}
    for block in blocks:
        found.setdefault(block.part, []).append(block)
    return found


def sizes(rows: int, cuts: Sequence[int]) -> Iterator[int]:
    """Yield the numbers of rows before, between and after the cuts."""
    edges = [0, *cuts, rows]
    return (high - low for low, high in itertools.pairwise(edges))


def decimal(number: float) -> Fraction:
    """Return a number as it was written: 0.1 is one tenth, which the float is not."""
    return Fraction(repr(float(number)))
