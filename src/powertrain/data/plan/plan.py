"""What a Dataset stands for: sources, what is done to their rows, and which blocks of them count. Values only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from powertrain.data.plan.order import Ints, Shuffle

if TYPE_CHECKING:
    import pyarrow as pa

    from powertrain.data.operations.operation import Operation
    from powertrain.data.sources.base import Source

#: In-memory data of up to this many rows is permuted row by row; a larger one like files, block by block.
MOST_PERMUTED_ROWS = 2**24


@dataclass(frozen=True)
class Part:
    """One source and what is done to each of its rows on the way."""

    source: Source
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Block:
    """One unit of the order: ``rows`` rows of block ``index`` of a part's source, from ``start`` on."""

    part: int
    index: int
    start: int
    rows: int


@dataclass(frozen=True)
class Plan:
    """A lazy dataset. Nothing is read to make one or to change one."""

    parts: tuple[Part, ...]
    #: Which blocks count; None for all of all sources, in order.
    blocks: tuple[Block, ...] | None = None
    #: Whether rows are shuffled, and by which seed; None draws one when it is first needed.
    shuffled: bool = False
    seed: int | None = None

    def then(self, operation: Operation) -> Plan:
        """This plan with one more thing done to every row."""
        parts = tuple(replace(part, operations=(*part.operations, operation)) for part in self.parts)
        return replace(self, parts=parts)

    def inspected(self) -> Inspected:
        """With what the sources say of themselves. Reads footers, lists directories, counts rows: raises DataError."""
        facts = [part.source.inspect() for part in self.parts]
        blocks = self.blocks
        if blocks is None:
            blocks = tuple(
                Block(number, index, 0, found.rows)
                for number, fact in enumerate(facts)
                for index, found in enumerate(fact.blocks)
            )
        earlier = tuple(fact.earlier or fact.fingerprint for fact in facts)
        return Inspected(self, blocks, tuple(fact.fingerprint for fact in facts), earlier)


@dataclass(frozen=True)
class Inspected:
    """A plan whose sources have been looked at: the manifest of its blocks."""

    plan: Plan
    blocks: tuple[Block, ...]
    #: Of the sources, one each.
    fingerprints: tuple[str, ...] = field(default=(), repr=False)
    #: Of the sources, as older versions of this package made them.
    earlier_fingerprints: tuple[str, ...] = field(default=(), repr=False)

    @property
    def rows(self) -> int:
        """How many rows there are, before operations that leave some out or add some."""
        return sum(block.rows for block in self.blocks)

    @property
    def block_rows(self) -> Ints:
        return np.fromiter((block.rows for block in self.blocks), np.int64, len(self.blocks))

    @property
    def fingerprint(self) -> str:
        """Changes when rows, their number or their order in the files do: 32 characters."""
        return self._with_blocks(self.fingerprints)

    @property
    def earlier_fingerprint(self) -> str:
        """The fingerprint in the positions that older versions saved; the same one where nothing has changed."""
        return self._with_blocks(self.earlier_fingerprints or self.fingerprints)

    def _with_blocks(self, fingerprints: tuple[str, ...]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        digest.update("/".join(fingerprints).encode())
        numbers = np.array([(b.part, b.index, b.start, b.rows) for b in self.blocks], "<i8")
        digest.update(numbers.tobytes())
        return digest.hexdigest()

    @property
    def shuffle(self) -> Shuffle:
        """How an epoch is shuffled: see :class:`~powertrain.data.plan.order.EpochOrder`."""
        if not self.plan.shuffled:
            return "none"
        in_memory = all(part.source.in_memory for part in self.plan.parts)
        return "rows" if in_memory and self.rows <= MOST_PERMUTED_ROWS else "blocks"

    @property
    def is_exact(self) -> bool:
        """True when every row of the sources gives exactly one row: no opaque filter, no count-changing map."""
        return all(operation.keeps_count for part in self.plan.parts for operation in part.operations)

    def schema(self) -> pa.Schema:
        """The schema of the first part's source; what operations make of it is only known by running them."""
        return self.plan.parts[0].source.inspect().schema


def union(plans: Iterable[Plan]) -> Plan:
    """The rows of all plans, one after the other, in one order."""
    plans = list(plans)
    parts = tuple(part for plan in plans for part in plan.parts)
    blocks: list[Block] | None = None
    if any(plan.blocks is not None for plan in plans):
        blocks, first = [], 0
        for plan in plans:
            blocks += [replace(block, part=block.part + first) for block in plan.inspected().blocks]
            first += len(plan.parts)
    return Plan(
        parts, None if blocks is None else tuple(blocks), any(p.shuffled for p in plans), _first_seed(plans)
    )


def _first_seed(plans: Iterable[Plan]) -> int | None:
    return next((plan.seed for plan in plans if plan.seed is not None), None)
