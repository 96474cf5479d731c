"""The plan of a Dataset: sources, operations on their rows, and the blocks in use. Values only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from powertrain.data.plan.mixing import MixedOrder, Mixture
from powertrain.data.plan.order import EpochOrder, Ints, Shuffle

if TYPE_CHECKING:
    import pyarrow as pa

    from powertrain.data.operations.operation import Operation
    from powertrain.data.sources.base import Source

#: In-memory data of up to this many rows is permuted row by row; larger data like files, block by block.
MOST_PERMUTED_ROWS = 2**24
#: In place of a number of rows: all rows of a block, which are counted when its source is inspected.
WHOLE_BLOCK = -1


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
    #: The blocks in use, all or none of them a ``WHOLE_BLOCK``; None for all of all sources, in order.
    blocks: tuple[Block, ...] | None = None
    #: True for shuffled rows, and the seed; None draws one when it is first needed.
    shuffled: bool = False
    seed: int | None = None
    #: How the parts are interleaved; None for one after the other. Components have shuffles of their own.
    mixture: Mixture | None = None

    @property
    def is_plain(self) -> bool:
        """True when row i of all blocks is row i of the dataset: neither shuffled nor mixed."""
        return not self.shuffled and self.mixture is None

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
        elif any(block.rows == WHOLE_BLOCK for block in blocks):
            blocks = tuple(
                replace(block, rows=facts[block.part].blocks[block.index].rows) for block in blocks
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
        if self.plan.mixture is not None:
            return sum(self.plan.mixture.rows(self._rows_of_parts()))
        return sum(block.rows for block in self.blocks)

    def _rows_of_parts(self) -> list[int]:
        found = [0] * len(self.plan.parts)
        for block in self.blocks:
            found[block.part] += block.rows
        return found

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
        if self.plan.mixture is not None:
            digest.update(self.plan.mixture.describe().encode())
        return digest.hexdigest()

    @property
    def shuffle(self) -> Shuffle:
        """The shuffle of an epoch: see :class:`~powertrain.data.plan.order.EpochOrder`."""
        if self.plan.mixture is not None:
            return "mix"
        if not self.plan.shuffled:
            return "none"
        return _shuffle_of(self.plan.parts, self.rows)

    def order(self, *, seed: int, epoch: int, shuffle: Shuffle, lanes: int) -> EpochOrder:
        """Return the order of an epoch."""
        if shuffle != "mix" or self.plan.mixture is None:
            return EpochOrder(self.block_rows, seed=seed, epoch=epoch, shuffle=shuffle, lanes=lanes)
        mixture = self.plan.mixture
        shuffles: list[Shuffle] = []
        rows = self._rows_of_parts()
        for number, shuffled in enumerate(mixture.shuffled):
            mine = [part for part, owner in enumerate(mixture.component_of_part) if owner == number]
            parts = [self.plan.parts[part] for part in mine]
            shuffles.append(_shuffle_of(parts, sum(rows[part] for part in mine)) if shuffled else "none")
        owners = np.fromiter((block.part for block in self.blocks), np.int64, len(self.blocks))
        return MixedOrder(mixture, owners, self.block_rows, shuffles, seed=seed, epoch=epoch, lanes=lanes)

    @property
    def is_exact(self) -> bool:
        """True when every source row yields exactly one row: no opaque filter, no count-changing map."""
        return all(operation.keeps_count for part in self.plan.parts for operation in part.operations)

    @property
    def has_row_numbers(self) -> bool:
        """True when rows hold values that follow from their numbers, which another choice of blocks would change."""
        return any(operation.keeps_row_numbers for part in self.plan.parts for operation in part.operations)

    def schema(self) -> pa.Schema:
        """Return the schema of the first part's source; that after operations is only known by running them."""
        return self.plan.parts[0].source.inspect().schema


def _shuffle_of(parts: Iterable[Part], rows: int) -> Shuffle:
    """Return the shuffle of the rows of some parts: row by row where random access is free."""
    in_memory = all(part.source.in_memory for part in parts)
    return "rows" if in_memory and rows <= MOST_PERMUTED_ROWS else "blocks"


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


def mix(plans: Iterable[Plan], weights: Iterable[float], stop: str) -> Plan:
    """Return the plan of the rows of all plans, interleaved by weight; none of the plans is a mixture."""
    plans = list(plans)
    joined = union([replace(plan, shuffled=False) for plan in plans])
    owners = tuple(number for number, plan in enumerate(plans) for _ in plan.parts)
    mixture = Mixture(
        owners,
        tuple(weights),
        stop,
        tuple(plan.shuffled for plan in plans),
        tuple(plan.seed for plan in plans),
    )
    return replace(joined, mixture=mixture)


def _first_seed(plans: Iterable[Plan]) -> int | None:
    return next((plan.seed for plan in plans if plan.seed is not None), None)
