"""Batch plans: a global batch of fixed size, split over any number of ranks: ``get_context().batch_plan(...)``.

:func:`plan` is pure. :data:`gradient_weight` is the current weight of this process's gradient: sources of samples set
it, reductions of gradients read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from powertrain.config.checks import Refusal, whole
from powertrain.errors import ConfigError
from powertrain.values.arguments import shorten

#: Maximum number of passes of one optimizer step: each is an entry of the plan.
_MOST_PASSES = 1_000_000


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of a rank: rows ``start`` to ``start + size`` of the global batch."""

    index: int
    start: int
    #: At least 1.
    size: int
    #: Number of rows that count: all, or none if the row only fills a pass without samples for the rank.
    samples: int
    #: Factor for the mean loss of these rows, so that the gradients of all passes add up to the rank's mean.
    loss_scale: float
    #: True for the pass after which gradients are averaged over the ranks and the optimizer steps.
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One rank's part of every optimizer step: which samples of the global batch, in how many passes.

    The step is the same at any world size: the gradient is the mean over all ``global_batch_size`` samples, also if
    they do not divide evenly. Every rank makes the same number of passes. A complete loop::

        plan = powertrain.get_context().batch_plan(global_batch_size=1000, max_micro_batch=64)
        for batch in batches:                                # the same 1000 rows on every rank
            for micro in plan:
                rows = batch[micro.start : micro.start + micro.size]
                with contextlib.nullcontext() if micro.is_last else model.no_sync():
                    (criterion(model(rows)) * micro.loss_scale).backward()
            optimizer.step()
            optimizer.zero_grad()

    where ``criterion`` gives the mean over its rows. A model from ``prepare_model`` multiplies this rank's gradient by
    ``weight`` before it is averaged. With any other model multiply each loss by ``plan.weight`` as well.

    If a rank has fewer samples than passes (or none at all: more ranks than samples), a pass takes one row that fills
    it and counts nothing: its ``loss_scale`` is 0, and so is the ``weight`` of a rank without a sample. So every rank
    takes part in every pass, as a model sharded with FSDP requires; for such a model call
    ``model.set_requires_gradient_sync(micro.is_last)`` instead of entering ``no_sync()``.
    """

    global_batch_size: int
    rank: int
    world_size: int
    #: Index of the rank's first sample in the global batch.
    start: int
    #: Number of samples of the rank.
    samples: int
    #: Sizes of the passes: filled ones first, then in ascending order.
    micro_batches: tuple[int, ...]
    #: Weight of the rank's mean gradient in the average over ranks: ``samples * world_size / global_batch_size``.
    weight: float
    #: The factor for each pass's mean loss: its share of the rank's samples, 0 if it has none.
    loss_scales: tuple[float, ...]
    #: Called with ``weight`` whenever a step begins: another plan may have been used since.
    begin: Callable[[float], None] = field(default=lambda weight: None, compare=False, repr=False)

    @property
    def accumulation_steps(self) -> int:
        """The number of passes of one optimizer step; the same on every rank."""
        return len(self.micro_batches)

    def __len__(self) -> int:
        return self.accumulation_steps

    def __iter__(self) -> Iterator[MicroBatch]:
        self.begin(self.weight)
        start, last = self.start, self.accumulation_steps - 1
        for index, (size, scale) in enumerate(zip(self.micro_batches, self.loss_scales, strict=True)):
            samples = size if scale else 0
            yield MicroBatch(index, start, size, samples, scale, is_last=index == last)
            start += samples


def plan(global_batch_size: int, rank: int, world_size: int, max_micro_batch: int | None = None) -> BatchPlan:
    """Return the part of ``rank`` of ``world_size`` in a batch of ``global_batch_size`` samples.

    No pass is larger than ``max_micro_batch``; without one the rank makes a single pass.
    """
    total = _whole("global_batch_size", global_batch_size, 1)
    world_size = _whole("world_size", world_size, 1)
    rank = _whole("rank", rank, 0, world_size - 1)
    start, end = rank * total // world_size, (rank + 1) * total // world_size
    samples = end - start
    passes = 1
    if max_micro_batch is not None:
        largest_part = -(-total // world_size)
        passes = -(-largest_part // _whole("max_micro_batch", max_micro_batch, 1))
    if passes > _MOST_PASSES:
        raise ConfigError(
            f"batch_plan(global_batch_size={total}, max_micro_batch={max_micro_batch}) would take {passes:,} passes "
            f"for one step, and at most {_MOST_PASSES:,} can be planned. Use a larger max_micro_batch."
        )
    sizes = _sizes(samples, passes)
    return BatchPlan(
        global_batch_size=total,
        rank=rank,
        world_size=world_size,
        start=start,
        samples=samples,
        micro_batches=tuple(max(size, 1) for size in sizes),
        weight=samples * world_size / total,
        loss_scales=tuple(size / samples if samples else 0.0 for size in sizes),
    )


def _sizes(rows: int, passes: int) -> tuple[int, ...]:
    """Split ``rows`` into ``passes`` parts that differ by at most one, the smaller ones first."""
    size, larger = divmod(rows, passes)
    return (size,) * (passes - larger) + (size + 1,) * larger


def _whole(name: str, value: Any, at_least: int, at_most: int | None = None) -> int:
    check = whole(at_least) if at_most is None else whole(at_least, at_most)
    try:
        return int(check(value))
    except Refusal as refusal:
        raise ConfigError(
            f"batch_plan({name}={shorten(value)}) cannot be used: {refusal.why}. {refusal.fix}"
        ) from None


# --------------------------------------------------------------------------- gradient weight


class GradientWeight:
    """The weight of this process's gradient in the average over all ranks; 1 until it is set.

    The weights of all ranks add up to the world size, and either all are 1 or none is: so a model handles the first
    other weight on every rank in the same step.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew: the weight is 1, without callbacks."""
        #: Read whenever gradients are reduced. Change it with :meth:`set`.
        self.value = 1.0
        self._ever_uneven = False
        self._waiting: list[Callable[[], None]] = []

    def set(self, weight: float) -> None:
        """Set the weight from the next reduction on.

        If a model cannot apply it, its error is raised and the weight is unchanged.
        """
        if weight != 1.0:
            while self._waiting:
                self._waiting[0]()
                del self._waiting[0]
            self._ever_uneven = True
        self.value = weight

    def when_uneven(self, act: Callable[[], None]) -> None:
        """Call ``act`` once, before the first weight other than 1 applies; immediately if there was one already."""
        if self._ever_uneven:
            act()
        else:
            self._waiting.append(act)


#: The weight of this process.
gradient_weight = GradientWeight()
