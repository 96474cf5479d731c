"""Loaders with timed fetches."""

from __future__ import annotations

import contextlib
import functools
import mmap
import time
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from powertrain.trace.recording.batch_sizes import SMALL_COPY
from powertrain.trace.recording.marks import IGNORED
from powertrain.trace.recording.phases import H2D
from powertrain.trace.recording.recorder import Recorder

#: Number of DDP parameters with the latest gradients: when the last of these is ready, all are.
_LAST_GRADIENTS = 4


class MakingTimes:
    """Times of making batches in loader workers, summed in memory shared with the reading process.

    Only processes forked from this one report times; those of other processes are unknown.
    """

    #: In a forked loader worker, the times to add to.
    mine: MakingTimes | None = None

    def __init__(self, processes: int) -> None:
        #: Seconds and batches of the first worker, of the second, and so on.
        self._sums = memoryview(mmap.mmap(-1, 16 * processes)).cast("d")
        self._seconds = self._count = self._mean = 0.0

    @contextlib.contextmanager
    def of_children(self) -> Iterator[None]:
        """Make loader workers forked within the block report the time of making batches.

        The current process does not report: it may have other loaders, and needs no check for each of their batches.
        """
        from torch.utils.data._utils import fetch

        fetchers: list[Any] = [fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher]
        plain = [fetcher.fetch for fetcher in fetchers]
        before, MakingTimes.mine = MakingTimes.mine, self
        for fetcher in fetchers:
            fetcher.fetch = _telling_how_long(fetcher.fetch)
        try:
            yield
        finally:
            MakingTimes.mine = before
            for fetcher, method in zip(fetchers, plain, strict=True):
                fetcher.fetch = method

    def add(self, process: int, seconds: float) -> None:
        """Add a batch. Called in the loader worker."""
        self._sums[2 * process] += seconds
        self._sums[2 * process + 1] += 1.0

    def newest(self) -> float:
        """Return the seconds for one of the newest batches; 0 if not known."""
        sums = self._sums.tolist()
        seconds, count = sum(sums[::2]), sum(sums[1::2])
        if count > self._count:
            self._mean = (seconds - self._seconds) / (count - self._count)
            self._seconds, self._count = seconds, count
        return self._mean


def _telling_how_long(fetch: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fetch``, which makes a batch, with its time reported in a loader worker."""
    from torch.utils.data import get_worker_info

    @functools.wraps(fetch)
    def timed(*args: Any) -> Any:
        times = MakingTimes.mine
        process = None if times is None else get_worker_info()
        if times is None or process is None:
            return fetch(*args)
        began = time.perf_counter()
        batch = fetch(*args)
        times.add(process.id, time.perf_counter() - began)
        return batch

    return timed


class OfInstances:
    """A method replaced for instances only.

    Tables keyed by ``torch.Tensor.to``, which tensor subclasses have, still find the original.
    """

    __slots__ = ("_method", "_plain")

    def __init__(self, plain: Any, method: Callable[..., Any]) -> None:
        self._plain, self._method = plain, method

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._plain if instance is None else MethodType(self._method, instance)


def copied(recorder: Recorder, tensor: Any, how: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``how(tensor, …)`` as a copy to a device, and note whether the source memory is pinned."""
    depth = recorder.enter(H2D)
    try:
        if depth != IGNORED and tensor.nbytes >= SMALL_COPY and not tensor.is_pinned():
            recorder.copies_pageable()
        return how(tensor, *args, **kwargs)
    finally:
        recorder.leave(depth)


class Exchange:
    """Detect when all gradients of a DDP model are ready, so that the rest of its backward pass is waiting.

    The order of gradients is learned in the first pass; from then on only the last few parameters have hooks.
    """

    def __init__(self, model: Any, recorder: Recorder) -> None:
        self.model = weakref.ref(model)
        self._recorder = recorder
        self._came: list[int] = []
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._note, number))
            for number, parameter in enumerate(parameters)
        ]
        self._is_learning = True

    def _note(self, number: int, _: Any) -> None:
        self._came.append(number)
        self._recorder.gradients_are_there()

    def learn(self) -> None:
        """Learn the order of gradients after a backward pass."""
        if not self._is_learning or not self._came:
            return
        self._is_learning = False
        self.close()
        last = list(dict.fromkeys(reversed(self._came)))[:_LAST_GRADIENTS]
        living = [self._parameters[number]() for number in last]
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._recorder.gradients_are_there)
            for parameter in living
            if parameter is not None
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
