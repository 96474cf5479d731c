"""The cut of an epoch into steps and ranks, and the samplers that draw this rank's rows."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DistributedSampler

from powertrain.data.plan.order import EpochOrder, after_epoch, part_of, steps_left
from powertrain.data.plan.position import Position

if TYPE_CHECKING:
    from powertrain.torch.data_loader.course import Course
    from powertrain.torch.data_loader.options import Tail


@dataclass(frozen=True)
class StepCut:
    """The cut of an epoch of ``rows`` into steps of ``global_batch`` rows, and this rank's part of each."""

    rows: int
    global_batch: int
    tail: Tail
    rank: int
    world_size: int

    def steps(self, position: int = 0) -> int:
        """Return the number of steps from ``position`` on."""
        return steps_left(self.rows, position, self.global_batch, self.tail)

    def after(self, position: int) -> int:
        """Return the end of the step that begins at ``position``."""
        return min(position + self.global_batch, self.rows)

    def part(self, position: int) -> tuple[int, int]:
        """Return this rank's part of that step, as places within it."""
        return part_of(self.after(position) - position, self.rank, self.world_size)

    def weight(self, position: int) -> float:
        """Return the weight of this rank's gradient in that step; 0 where its only row is a filler."""
        total = self.after(position) - position
        low, high = self.part(position)
        return (high - low) * self.world_size / total if total > 0 else 1.0

    def carried(self, position: int) -> int:
        """Return the start of the next epoch when this one has no step left at ``position``."""
        return after_epoch(self.rows, position, self.global_batch, self.tail)

    def indices(self, position: int, order: Callable[[int], EpochOrder]) -> list[int]:
        """Return this rank's rows of the step that begins at ``position``; one of the step's where it has none.

        ``order(n)`` is that of ``n`` epochs ago: a position below 0 stands for rows that were carried over.
        """
        low, high = self.part(position)
        # A rank without a row still has to take part in the step.
        mine = (low, high) if low < high else (0, 1)
        rows: list[int] = []
        at, end = position, self.after(position)
        while at < end:
            ago = -(at // self.rows)
            until = min(end, (1 - ago) * self.rows)
            then = order(ago)
            slots = then.step(at + ago * self.rows, until + ago * self.rows)
            # Only those of this rank are located: others' rows need permutations that are not needed otherwise.
            slots = slots[max(mine[0] - (at - position), 0) : max(mine[1] - (at - position), 0)]
            rows += then.locate(slots).offsets.tolist()
            at = until
        return rows


def epoch_order(start: Position, ago: int = 0) -> EpochOrder:
    """Return the order of the epoch of a lap, or of that ``ago`` epochs before, over the rows 0 to N - 1."""
    return EpochOrder(
        [start.rows], seed=start.seed, epoch=start.epoch - ago, shuffle=start.shuffle, lanes=start.lanes
    )


class OrderedShard(DistributedSampler[Any]):
    """This rank's rows of an epoch, step by step; every row of the dataset is some rank's, once."""

    def __init__(self, dataset: Any, cut: StepCut, course: Course, beginning: Position) -> None:
        # Not DistributedSampler's own __init__, which cuts an epoch another way.
        self.dataset, self.num_replicas, self.rank = dataset, cut.world_size, cut.rank
        self.shuffle, self.seed = beginning.shuffle != "none", beginning.seed
        self.drop_last = cut.tail == "drop"
        self.cut, self._course, self._start = cut, course, beginning

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch under way, or that of the next iteration."""
        return int(self._course.state_or_saved()["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration of the loader this epoch."""
        self._course.set_epoch(epoch)

    def begin(self, start: Position) -> None:
        """Begin the lap at ``start``, to which later requests belong."""
        self._start, self.seed = start, start.seed

    def steps(self) -> Iterator[list[int]]:
        """Yield the rows of this rank in each step of the newest lap, from its start."""
        return _steps_from(self._start, self.cut)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.steps())

    def __len__(self) -> int:
        """Return the number of rows of this rank in a whole epoch, fillers included."""
        steps = self.cut.steps()
        if not steps:
            return 0
        sizes = []
        for position in (0, (steps - 1) * self.cut.global_batch):
            low, high = self.cut.part(position)
            sizes.append(max(high - low, 1))
        return (steps - 1) * sizes[0] + sizes[1]


def _steps_from(start: Position, cut: StepCut) -> Iterator[list[int]]:
    # Two are kept, for steps that begin with rows of the epoch before.
    order = functools.lru_cache(2)(functools.partial(epoch_order, start))
    position = start.position
    for _ in range(cut.steps(position)):
        yield cut.indices(position, order)
        position = cut.after(position)


class StepBatches(BatchSampler):
    """The steps of an :class:`OrderedShard` as batches of indices."""

    def __init__(self, shard: OrderedShard) -> None:
        # Not BatchSampler's own __init__: steps of a rank may differ in size.
        self.sampler: OrderedShard = shard
        self.batch_size = -(-shard.cut.global_batch // shard.cut.world_size)
        self.drop_last = shard.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return self.sampler.steps()

    def __len__(self) -> int:
        return self.sampler.cut.steps()


class DrawnShard(DistributedSampler[Any]):
    """A rank's share of the user's own sampler (or batch sampler).

    Each rank draws the whole order, under one seed so that all draw the same, and takes its part.
    """

    def __init__(self, drawn_from: Any, rank: int, world_size: int, course: Course, drop_last: bool) -> None:
        # Not DistributedSampler's own __init__, which needs the length of a dataset.
        self.dataset, self.num_replicas, self.rank = drawn_from, world_size, rank
        self.shuffle, self.drop_last = False, drop_last
        self._course = course
        self.epoch, self.seed = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._course.set_epoch(epoch)
        self._enter(epoch)

    def begin(self, start: Position) -> None:
        """Begin the lap at ``start``, to which later draws belong."""
        self.seed = start.seed
        self._enter(start.epoch)

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        sampler: Any = self.dataset
        if not hasattr(sampler, "__len__"):
            return endless_share(sampler, self.rank, self.num_replicas)
        with _drawing_alike(self.seed + self.epoch):
            drawn = list(sampler)
        return iter(share(drawn, self.rank, self.num_replicas, self.drop_last))

    def __len__(self) -> int:
        return len(share(range(len(cast(Any, self.dataset))), self.rank, self.num_replicas, self.drop_last))


def share(drawn: Sequence[Any], rank: int, world_size: int, drop_last: bool) -> Sequence[Any]:
    """Return every ``world_size``-th element from ``rank`` on; all ranks get equally many.

    A remainder is left out with ``drop_last`` and otherwise filled up from the beginning.
    """
    if drop_last:
        return drawn[rank : len(drawn) - len(drawn) % world_size : world_size]
    part = list(drawn[rank::world_size])
    if drawn and len(part) < -(-len(drawn) // world_size):
        part.append(drawn[(len(drawn) - len(drawn) % world_size + rank) % len(drawn)])
    return part


def endless_share(drawn: Iterable[Any], rank: int, world_size: int) -> Iterator[Any]:
    """Yield the share as :func:`share` does, for a sampler without a length, which must draw alike on every rank."""
    rounds = iter(drawn)
    while len(round_ := list(itertools.islice(rounds, world_size))) == world_size:
        yield round_[rank]


@contextlib.contextmanager
def _drawing_alike(seed: int) -> Iterator[None]:
    """Derive random numbers from ``seed`` inside the block, and restore the generators after it."""
    seed %= 2**32
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        # Not torch.manual_seed, which would reseed the GPU too.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
