"""The plan of a Dataset: sources, operations on their rows, and the blocks in use. Values only."""

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

#: In-memory data of up to this many rows is permuted row by row; larger data like files, block by block.
MOST_PERMUTED_ROWS = 2**24


@dataclass(frozen=True)
class Part:
    """One source and the operations on its rows."""

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
    #: The blocks in use; None for all of all sources, in order.
    blocks: tuple[Block, ...] | None = None
    #: True for shuffled rows, and the seed; None draws one when it is first needed.
    shuffled: bool = False
    seed: int | None = None

    def then(self, operation: Operation) -> Plan:
        """Return this plan with one more operation."""
        parts = tuple(replace(part, operations=(*part.operations, operation)) for part in self.parts)
        return replace(self, parts=parts)

    def inspected(self) -> Inspected:
        """Return the plan with its sources inspected: reads footers, lists directories, counts rows. Raises
        DataError."""
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
    """A plan whose sources have been inspected: the manifest of its blocks."""

    plan: Plan
    blocks: tuple[Block, ...]
    #: Of the sources, one each.
    fingerprints: tuple[str, ...] = field(default=(), repr=False)
    #: Of the sources, as older versions of this package made them.
    earlier_fingerprints: tuple[str, ...] = field(default=(), repr=False)

    @property
    def rows(self) -> int:
        """Number of rows, before operations that remove or add some."""
        return sum(block.rows for block in self.blocks)

    @property
    def block_rows(self) -> Ints:
        return np.fromiter((block.rows for block in self.blocks), np.int64, len(self.blocks))

    @property
    def fingerprint(self) -> str:
        """A text of 32 characters that changes with the rows, their number or their order in the files."""
        return self._with_blocks(self.fingerprints)

    @property
    def earlier_fingerprint(self) -> str:
        """The fingerprint in positions saved by older versions; the same one where nothing has changed."""
        return self._with_blocks(self.earlier_fingerprints or self.fingerprints)

    def _with_blocks(self, fingerprints: tuple[str, ...]) -> str:
        digest = hashlib.blake2b(digest_size=16)
        digest.update("/".join(fingerprints).encode())
        numbers = np.array([(b.part, b.index, b.start, b.rows) for b in self.blocks], "<i8")
        digest.update(numbers.tobytes())
        return digest.hexdigest()

    @property
    def shuffle(self) -> Shuffle:
        """The shuffle of an epoch: see :class:`~powertrain.data.plan.order.EpochOrder`."""
        if not self.plan.shuffled:
            return "none"
        in_memory = all(part.source.in_memory for part in self.plan.parts)
        return "rows" if in_memory and self.rows <= MOST_PERMUTED_ROWS else "blocks"

    @property
    def is_exact(self) -> bool:
        """True when every source row yields exactly one row: no opaque filter, no count-changing map."""
        return all(operation.keeps_count for part in self.plan.parts for operation in part.operations)

    def schema(self) -> pa.Schema:
        """Return the schema of the first part's source; that after operations is only known by running them."""
        return self.plan.parts[0].source.inspect().schema


def union(plans: Iterable[Plan]) -> Plan:
    """Return the plan of the rows of all plans, one after the other, in one order."""
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
