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

#: Of DDP's parameters, those whose gradients come last: when the last of them is there, all are.
_LAST_GRADIENTS = 4


class MakingTimes:
    """How long a loader's processes make batches. They add it up in memory that they share with the one that reads.

    Only processes that are forked from this one know of it; of others nothing is known.
    """

    #: In a process that is forked here, the one to add to.
    mine: MakingTimes | None = None

    def __init__(self, processes: int) -> None:
        #: Seconds and batches of the first process, of the second, and so on.
        self._sums = memoryview(mmap.mmap(-1, 16 * processes)).cast("d")
        self._seconds = self._count = self._mean = 0.0

    @contextlib.contextmanager
    def of_children(self) -> Iterator[None]:
        """Processes that are forked within are the loader's, and say how long they make batches. This one does not: it
        may have other loaders, and need not ask itself with each of their batches whether it does."""
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
        """It has made a batch. In that process."""
        self._sums[2 * process] += seconds
        self._sums[2 * process + 1] += 1.0

    def newest(self) -> float:
        """Seconds in which one of the newest batches was made; 0 where that is not known."""
        sums = self._sums.tolist()
        seconds, count = sum(sums[::2]), sum(sums[1::2])
        if count > self._count:
            self._mean = (seconds - self._seconds) / (count - self._count)
            self._seconds, self._count = seconds, count
        return self._mean


def _telling_how_long(fetch: Callable[..., Any]) -> Callable[..., Any]:
    """``fetch``, which makes a batch; in a loader's process it says how long that took."""
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
    """A method that is replaced for instances only: tables that are keyed by ``torch.Tensor.to``, as subclasses of
    tensors have them, find the same as ever."""

    __slots__ = ("_method", "_plain")

    def __init__(self, plain: Any, method: Callable[..., Any]) -> None:
        self._plain, self._method = plain, method

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self._plain if instance is None else MethodType(self._method, instance)


def copied(recorder: Recorder, tensor: Any, how: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``how(tensor, …)``, its time counted as a copy to a device, the memory it comes from noted."""
    depth = recorder.enter(H2D)
    try:
        if depth != IGNORED and tensor.nbytes >= SMALL_COPY and not tensor.is_pinned():
            recorder.copies_pageable()
        return how(tensor, *args, **kwargs)
    finally:
        recorder.leave(depth)


class Exchange:
    """Says when all gradients of a DDP model are there, so that the rest of its backward pass is waiting.

    The order in which they come is learned in the first pass; from then on only the last few have hooks.
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
        """A backward pass is over."""
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
