"""Wrappers for training loops that mark phases. They work in a worker and elsewhere, patched or not.

Time observed by two wrappers is counted once, so they can be combined freely. Loads torch only when it is needed.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import GeneratorType, TracebackType
from typing import Any, TypeVar

from powertrain.errors import ConfigError
from powertrain.trace.recording import (
    batch_sizes,
    current,
    marks,
    patches,
    timed_loaders,
)
from powertrain.trace.recording.phases import BACKWARD, H2D, INPUT

Thing = TypeVar("Thing")


class _MarkedStep:
    """Context manager for one step, or decorator for a function that makes one."""

    __slots__ = ("_model", "_recorder")

    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._recorder = current.current()
        installed = patches.installed()
        if installed is not None and self._model is not None:
            installed.is_model(self._model)
        self._recorder.begin_marked_step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._recorder.end_marked_step(failed=kind is not None)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with _MarkedStep(self._model):
                return function(*args, **kwargs)

        return marked


def trace_step(model: Any = None) -> Any:
    """Mark the code within as one training step, from ``zero_grad`` to ``optimizer.step``.

    Also a decorator of a function that makes one step. A step that raises is not counted; its time is part of the next
    one.

    Args:
        model: The model; its device and its exchange of gradients are then known from the first step on.

    Returns:
        A context manager, which is a decorator too.

    Example::

        for batch in loader:
            with trace_step(model):
                ...
    """
    if inspect.isroutine(model):
        return _MarkedStep(None)(model)
    return _MarkedStep(model)


class _TimedIterator:
    """An iterator whose ``next`` is time spent waiting for input."""

    def __init__(self, batches: Iterator[Any], is_made_here: bool) -> None:
        self._batches, self._is_made_here = batches, is_made_here

    def __iter__(self) -> _TimedIterator:
        return self

    def __next__(self) -> Any:
        recorder = current.current()
        depth = recorder.enter(INPUT)
        try:
            batch = next(self._batches)
            samples, tokens = (0, 0) if depth else batch_sizes.size_of(batch)
            seconds = 0.0 if depth else self._seconds_of_newest()
        except BaseException:
            recorder.leave(depth)
            raise
        if depth:
            recorder.leave(depth)
        else:
            recorder.fetched(0, samples, tokens, seconds)
        return batch

    def _seconds_of_newest(self) -> float:
        """Return the seconds of making the newest batch, from the loader's processes if it has timed ones."""
        if self._is_made_here:
            return marks.MADE_HERE
        installed = patches.installed() if hasattr(self._batches, "_num_workers") else None
        return installed.seconds_of_newest(self._batches) if installed is not None else 0.0

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # accessed by copy and pickle before initialization
            raise AttributeError(name)
        return getattr(self._batches, name)


class _TimedIterable:
    """A loader with timed iterators; all other attributes are the loader's own."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> _TimedIterator:
        recorder = current.current()
        depth = recorder.enter(INPUT)
        try:
            batches = iter(self._loader)
        finally:
            recorder.leave(depth)
        return _TimedIterator(batches, _is_made_here(self._loader, batches))

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # accessed by copy and pickle before initialization
            raise AttributeError(name)
        return getattr(self._loader, name)


def _is_made_here(loader: Any, batches: Any) -> bool:
    """Return whether a batch is made in ``next`` itself, so that the call's time is the time of making it."""
    return isinstance(batches, GeneratorType) or getattr(loader, "num_workers", None) == 0


def wrap_dataloader_fetch(iterable: Any) -> Any:
    """Return the loader with its ``next`` recorded as waiting for input.

    Args:
        iterable: A loader or an iterator of any kind.

    Returns:
        The loader or iterator to use in its place.

    Example::

        for batch in wrap_dataloader_fetch(loader):
            ...
    """
    if hasattr(iterable, "__next__"):
        return _TimedIterator(iterable, _is_made_here(iterable, iterable))
    if hasattr(iterable, "__iter__"):
        return _TimedIterable(iterable)
    raise _wrong("wrap_dataloader_fetch", iterable, "a loader or an iterator")


class _TimedForward:
    """A timed ``forward`` of one model. A copy of the model gets its own."""

    def __init__(self, model: Any, own: Callable[..., Any] | None) -> None:
        """Create a timed forward. ``own`` is the model's own ``forward``, set on the instance instead of its class."""
        self._model, self._own = weakref.ref(model), own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        recorder = current.current()
        depth = recorder.enter_forward(torch.is_grad_enabled())
        try:
            return self._forward(*args, **kwargs)
        finally:
            recorder.leave(depth)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._own is not None:
            return self._own(*args, **kwargs)
        model: Any = self._model()
        return type(model).forward(model, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _TimedForward:
        return _TimedForward(copy.deepcopy(self._model(), memo), copy.deepcopy(self._own, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return _TimedForward, (self._model(), self._own)


def wrap_forward(model: Thing) -> Thing:
    """Record calls of a model, also of ``model.forward`` directly, as the forward phase. A second call changes nothing.

    Args:
        model: A ``torch.nn.Module``.

    Returns:
        The model itself.

    Example::

        model = wrap_forward(model)
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise _wrong("wrap_forward", model, "a torch.nn.Module")
    own = vars(model).get("forward")
    if not isinstance(own, _TimedForward):
        model.forward = _TimedForward(model, own)
    return model


class _TimedLoss:
    """A loss with a timed ``backward``; all other attributes are the loss's own."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        with current.current().phase(BACKWARD):
            return self._loss.backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_loss":  # accessed by copy and pickle before initialization
            raise AttributeError(name)
        return getattr(self._loss, name)


def wrap_backward(loss_or_function: Any) -> Any:
    """Return a loss whose ``backward`` is recorded as the backward phase; or, for a function, a function that is.

    Args:
        loss_or_function: A loss, or a function that runs the backward pass.

    Returns:
        The loss or function to use in its place.

    Example::

        wrap_backward(loss).backward()
        wrap_backward(accelerator.backward)(loss)
    """
    if callable(getattr(loss_or_function, "backward", None)):
        return _TimedLoss(loss_or_function)
    if not callable(loss_or_function):
        raise _wrong("wrap_backward", loss_or_function, "something with a backward method, or a function")

    @functools.wraps(loss_or_function)
    def backward(*args: Any, **kwargs: Any) -> Any:
        with current.current().phase(BACKWARD):
            return loss_or_function(*args, **kwargs)

    return backward


def wrap_optimizer(optimizer: Thing) -> Thing:
    """Record the steps of an optimizer; they also end steps of a loop that does not mark its own.

    A second call changes nothing.

    Args:
        optimizer: An optimizer, or an object with a ``step`` method.

    Returns:
        The optimizer itself.

    Example::

        optimizer = wrap_optimizer(torch.optim.AdamW(model.parameters()))
    """
    from torch.optim import Optimizer

    if isinstance(optimizer, Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        # An optimizer wrapper such as Accelerate's: it steps another optimizer, or skips steps to accumulate.
        wrap_optimizer(getattr(optimizer, "optimizer", None))
        return optimizer
    if isinstance(optimizer, Optimizer):
        if _optimizer_begins not in optimizer._optimizer_step_pre_hooks.values():
            optimizer.register_step_pre_hook(_optimizer_begins)
            optimizer.register_step_post_hook(_optimizer_ended)
        return optimizer
    changed: Any = optimizer
    plain = getattr(optimizer, "step", None)
    if not callable(plain):
        raise _wrong("wrap_optimizer", optimizer, "something with a step method")
    if not isinstance(plain, _TimedStep):
        changed.step = _TimedStep(optimizer, plain)
    return optimizer


class _TimedStep:
    """A timed ``step`` of an optimizer that is not torch's."""

    def __init__(self, optimizer: Any, plain: Callable[..., Any]) -> None:
        self._optimizer, self._plain = weakref.ref(optimizer), plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = current.current()
        optimizer = self._optimizer()
        recorder.optimizer_begins(optimizer)
        try:
            return self._plain(*args, **kwargs)
        finally:
            recorder.optimizer_ended(optimizer)


def _optimizer_begins(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _are_optimizers_patched():
        current.current().optimizer_begins(optimizer)


def _optimizer_ended(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _are_optimizers_patched():
        current.current().optimizer_ended(optimizer)


def _are_optimizers_patched() -> bool:
    installed = patches.installed()
    return installed is not None and installed.choice.rest


class _TimedCopy:
    """An object with a timed ``to``; all other attributes are its own."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def to(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        thing, recorder = self._thing, current.current()
        if isinstance(thing, torch.Tensor):
            if thing.is_cpu and batch_sizes.goes_to_device(args, kwargs):
                return timed_loaders.copied(recorder, thing, torch.Tensor.to, args, kwargs)
            return thing.to(*args, **kwargs)
        with recorder.phase(H2D):
            return thing.to(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_thing":  # accessed by copy and pickle before initialization
            raise AttributeError(name)
        return getattr(self._thing, name)

    def __len__(self) -> int:
        return len(self._thing)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._thing)

    def __getitem__(self, key: Any) -> Any:
        return self._thing[key]

    def __contains__(self, item: Any) -> bool:
        return item in self._thing


def wrap_h2d(thing: Any) -> Any:
    """Return a tensor or batch whose ``to`` counts as a copy to a device; ``to`` returns the unwrapped copy."""
    if not callable(getattr(thing, "to", None)):
        raise _wrong("wrap_h2d", thing, "something with a to method")
    return _TimedCopy(thing)


def _wrong(function: str, thing: Any, wanted: str) -> ConfigError:
    return ConfigError(
        f"{function} was given an object of type {type(thing).__name__}, and cannot time that. It takes {wanted}."
    )
