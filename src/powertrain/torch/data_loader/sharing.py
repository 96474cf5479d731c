"""Decide how a loader is shared among the ranks."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from powertrain.data.plan.order import LANES
from powertrain.data.plan.position import Position
from powertrain.errors import ConfigError
from powertrain.torch.data_loader.course import Course
from powertrain.torch.data_loader.options import LARGEST_SEED, OWN
from powertrain.torch.data_loader.shards import (
    DrawnShard,
    OrderedShard,
    StepBatches,
    StepCut,
)

if TYPE_CHECKING:
    from powertrain.torch.data_loader.options import Wishes
    from powertrain.worker.session import Session

#: Up to this many rows are ordered by one permutation; more are shuffled in pieces, to bound its size.
ROWS_IN_ONE_PERMUTATION = 2**24
#: Bounds the size of a state for any name of the dataset's class.
_LONGEST_TYPE_NAME = 100


@dataclass
class Sharing:
    """The division of a loader's rows among ranks."""

    course: Course
    #: This package's sampler; ``None`` where the loader's own stays.
    shard: OrderedShard | DrawnShard | None = None
    #: False where the user sets the weight of a rank's gradient.
    weighs: bool = True
    #: Gradient weight of the batch handed out last.
    weight: float = 1.0

    @property
    def cut(self) -> StepCut | None:
        """The cut of steps, where the k-th batch that is handed out is known to be the k-th step."""
        return self.shard.cut if isinstance(self.shard, OrderedShard) else None


@dataclass(frozen=True)
class _Usual:
    """A sampler over the whole of its data, in order or shuffled, and its batching."""

    sampler: Any
    #: ``None`` where rows are given one by one.
    batch_size: int | None
    drop_last: bool

    @property
    def is_shuffled(self) -> bool:
        return isinstance(self.sampler, RandomSampler)


def _usual(loader: DataLoader[Any]) -> _Usual | None:
    batches: Any = loader.batch_sampler
    if loader.batch_size is None and batches is not None:
        if type(batches) is not BatchSampler:
            return None
        found = _Usual(batches.sampler, batches.batch_size, batches.drop_last)
    else:
        found = _Usual(loader.sampler, loader.batch_size, loader.drop_last)
    sampler = found.sampler
    if type(sampler) is SequentialSampler:
        return found
    takes_all = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    return found if takes_all else None


def share_out(loader: DataLoader[Any], add_sampler: bool, wishes: Wishes, session: Session) -> Sharing:
    """Replace the samplers of ``loader`` by this rank's, where possible; rank 0 warns where it is not."""
    place = session.place
    streams = isinstance(loader.dataset, IterableDataset)
    distributed = _is_distributed(loader.sampler) or _is_distributed(loader.batch_sampler)
    usual = None if streams or distributed or not add_sampler else _usual(loader)
    if usual is not None:
        return _share_in_order(loader, usual, wishes, session)
    _refuse_wishes(loader, wishes, add_sampler)
    if place.rank == 0:
        _warn_of_limits(loader, add_sampler, place.world_size)
    seed = _order_seed(None, loader, wishes, place.world_size)
    beginning = _beginning(loader.dataset, -1 if streams else _length(loader.dataset), seed, OWN)
    course = Course(beginning, wishes.seed, _restarts(session))
    if streams or distributed or not add_sampler or place.world_size == 1:
        return Sharing(course, weighs=add_sampler)
    return Sharing(course, _share_drawn(loader, course, place.rank, place.world_size))


def _share_in_order(loader: DataLoader[Any], usual: _Usual, wishes: Wishes, session: Session) -> Sharing:
    rank, world_size = session.place.rank, session.place.world_size
    if wishes.global_batch_size is not None and usual.batch_size is None:
        raise ConfigError(
            f"prepare_data_loader(global_batch_size={wishes.global_batch_size}) was given a loader with "
            "batch_size=None, which makes no batches. Give the loader a batch_size, or leave global_batch_size out."
        )
    rows = len(usual.sampler.data_source)
    global_batch = wishes.global_batch_size or (usual.batch_size or 1) * world_size
    cut = StepCut(
        rows, global_batch, wishes.tail or ("drop" if usual.drop_last else "partial"), rank, world_size
    )
    seed = _order_seed(getattr(usual.sampler, "generator", None), loader, wishes, world_size)
    shuffle = "none" if not usual.is_shuffled else "rows" if rows <= ROWS_IN_ONE_PERMUTATION else "blocks"
    beginning = _beginning(loader.dataset, rows, seed, shuffle)
    course = Course(beginning, wishes.seed, _restarts(session))
    shard = OrderedShard(usual.sampler.data_source, cut, course, beginning)
    # Past DataLoader's guard against changes, which is there for loaders already in use.
    if usual.batch_size is None:
        loader.__dict__.update(sampler=shard)
    else:
        batches = StepBatches(shard)
        own_size = loader.batch_size if loader.batch_size is None else batches.batch_size
        loader.__dict__.update(sampler=shard, batch_sampler=batches, batch_size=own_size)
    if comes_in_any_order(loader) and rank == 0:
        _warn_of_any_order()
    return Sharing(course, shard)


def _share_drawn(loader: DataLoader[Any], course: Course, rank: int, world_size: int) -> DrawnShard:
    """Replace the user's own sampler by this rank's share of it."""
    batches: Any = loader.batch_sampler
    if loader.batch_size is None and batches is not None and type(batches) is not BatchSampler:
        shard = DrawnShard(batches, rank, world_size, course, drop_last=False)
        loader.__dict__.update(sampler=shard, batch_sampler=shard)
        return shard
    drop_last = loader.drop_last if batches is None else batches.drop_last
    shard = DrawnShard(
        loader.sampler if batches is None else batches.sampler, rank, world_size, course, drop_last
    )
    if batches is not None:
        batches = BatchSampler(shard, batches.batch_size, drop_last)
    loader.__dict__.update(sampler=shard, batch_sampler=batches)
    return shard


def _beginning(dataset: Any, rows: int, seed: int, shuffle: str) -> Position:
    """Return the start of epoch 0. ``rows`` is -1 where unknown."""
    return Position(
        epoch=0,
        position=0,
        seed=seed,
        lanes=LANES if shuffle == "blocks" else 1,
        shuffle=shuffle,
        fingerprint=f"{type(dataset).__name__[:_LONGEST_TYPE_NAME]}:{rows}",
        rows=rows,
    )


def _is_distributed(sampler: Any) -> bool:
    """Return True when the user's sampler already gives each rank its own part."""
    return any(
        isinstance(part, DistributedSampler) or hasattr(part, "num_replicas")
        for part in (sampler, getattr(sampler, "sampler", None))
    )


def comes_in_any_order(loader: DataLoader[Any]) -> bool:
    return loader.num_workers > 0 and not getattr(loader, "in_order", True)


def _restarts(session: Session) -> bool:
    return bool(session.place.data.on_change == "restart_epoch")


def _length(dataset: Any) -> int:
    """Return the number of rows; -1 where unknown."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # has no length, or raises to say so
        return -1


def _order_seed(
    generator: torch.Generator | None, loader: DataLoader[Any], wishes: Wishes, world_size: int
) -> int:
    """Return the seed of the row order, the same on every rank: the given one, or the user's generator's, or that of
    ``enable_reproducibility``, or 0; for one rank, that of the user's ``torch.manual_seed``."""
    from powertrain.torch import device

    generator = generator or loader.generator
    if wishes.seed is not None:
        seed = wishes.seed
    elif generator is not None:
        seed = generator.initial_seed()
    elif (reproducible := device.settings().seed) is not None:
        seed = reproducible
    else:
        seed = torch.initial_seed() if world_size == 1 else 0
    return int(seed) & LARGEST_SEED


def _refuse_wishes(loader: DataLoader[Any], wishes: Wishes, add_sampler: bool) -> None:
    """Raise where an option needs an order of this package."""
    wished = [option for option in ("global_batch_size", "tail") if getattr(wishes, option) is not None]
    if not wished:
        return
    if not add_sampler:
        why = "add_dist_sampler=False leaves the loader's rows alone"
    elif isinstance(loader.dataset, IterableDataset):
        why = f"{type(loader.dataset).__name__} is an IterableDataset, which gives rows as it likes"
    else:
        why = "this loader has a sampler of its own, which decides what is in a batch"
    raise ConfigError(
        f"prepare_data_loader({wished[0]}={getattr(wishes, wished[0])!r}) cannot be used: {why}. Use it with a "
        "map-style dataset and shuffle=True or shuffle=False, or leave it out."
    )


def _warn_of_limits(loader: DataLoader[Any], add_sampler: bool, world_size: int) -> None:
    """Warn of data that cannot be shared out, or whose position cannot be kept."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = sampler.sampler if type(sampler) is BatchSampler else sampler
    is_shared = add_sampler and world_size > 1
    if isinstance(loader.dataset, IterableDataset):
        message = (
            f"{type(loader.dataset).__name__} is an IterableDataset, in which no position can be kept: after a "
            "restart its epoch begins again from its start. Use a map-style dataset or powertrain.data to go on "
            "exactly."
        )
        if is_shared:
            message += (
                " No sampler can shard it either: every worker will read all of it. Let its __iter__ give each "
                "worker its own part (see powertrain.get_context()), and pass add_dist_sampler=False to say so."
            )
    elif not hasattr(sampler, "__len__"):
        message = (
            f"{type(sampler).__name__} has no length, so nobody knows how many batches an epoch has, and no position "
            "in it can be kept: after a restart the epoch begins again from its start."
        )
        if is_shared:
            message += f" It must draw the same on all {world_size} workers, of which each takes its turns."
    else:
        return
    warnings.warn(message, stacklevel=4)


def _warn_of_any_order() -> None:
    warnings.warn(
        "This loader has in_order=False, so nobody knows which batch of the epoch comes next: after a restart the "
        "epoch begins again from its start, and a smaller last step counts as much as a whole one. Leave in_order "
        "at True to go on exactly.",
        stacklevel=5,
    )
