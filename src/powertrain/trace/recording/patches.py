"""Patches of torch that mark phases, for tracing without changes to the loop.

The user's models, loaders and optimizers are left unchanged: torch's own classes and functions are replaced, and
restored by :meth:`Patches.close`. Only DDP's parameters get hooks, which torch omits from copies and files.
``torch.compile`` traces through every replacement, but not through the optimizer hooks: those run around the compiled
part of a step, because without them no step would be detected. Loads torch when patches are installed.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from types import CodeType
from typing import TYPE_CHECKING, Any

from powertrain.trace.recording import cuda
from powertrain.trace.recording.arrival import Arrival
from powertrain.trace.recording.batch_sizes import SMALL_COPY, goes_to_device, size_of
from powertrain.trace.recording.marks import (
    FETCHED,
    IGNORED,
    LEARN,
    LEAVE,
    LOOK,
    MADE_HERE,
    MOST_MARKS,
    NOBODY,
)
from powertrain.trace.recording.phases import BACKWARD, COLLECTIVE, H2D, INPUT
from powertrain.trace.recording.recorder import Recorder
from powertrain.trace.recording.replacements import (
    Replacements,
    patch_captures,
    patch_collectives,
    patch_optimizers,
    patch_profilers,
    patch_saving,
)
from powertrain.trace.recording.timed_loaders import Exchange, MakingTimes, OfInstances, copied

if TYPE_CHECKING:
    from powertrain.trace.recording.patch_choice import Choice


#: The module of torch's compiler that keeps which functions it leaves alone.
_COMPILER = "torch._dynamo.eval_frame"


class _Within:
    """The current context of the recording thread, for fast patches."""

    __slots__ = ("model",)

    def __init__(self) -> None:
        #: In a model's forward or in a backward pass: calls of modules are part of it.
        self.model = False


class Patches:
    """Patches of torch for a recorder, until :meth:`close`."""

    def __init__(self, recorder: Recorder, choice: Choice) -> None:
        """Install the patches of ``choice``."""
        self.recorder, self.choice = recorder, choice
        self._within = _Within()
        self._replaced = Replacements(recorder)
        #: Waits until the compiler is loaded, to make it skip our functions.
        self._compiler: Arrival | None = None
        #: For modules that were called directly, whether they are models (and not losses). Keyed by id, because a
        #: user's module need not be hashable; and the weak references that report their deletion.
        self._is_model: dict[int, bool] = {}
        self._met: dict[int, weakref.ref[Any]] = {}
        self._exchanges: list[Exchange] = []
        #: Times reported by loader workers, by iterator.
        self._making: weakref.WeakKeyDictionary[Any, MakingTimes] = weakref.WeakKeyDictionary()
        installers = [
            (choice.dataloader, self._patch_loaders),
            (choice.forward, self._patch_forward),
            (choice.backward, self._patch_backward),
            (choice.h2d, self._patch_copies),
            (choice.rest, lambda: patch_optimizers(self._replaced)),
            (choice.rest, lambda: patch_collectives(self._replaced)),
            (choice.rest, lambda: patch_saving(self._replaced)),
            # Independent of the choice: a model on a GPU is timed from its first call on.
            (True, lambda: patch_captures(self._replaced)),
            (True, lambda: patch_profilers(self._replaced)),
        ]
        try:
            for is_chosen, patch in installers:
                if is_chosen:
                    patch()
        except BaseException:
            self._replaced.close()
            raise

    def close(self) -> None:
        """Restore all replaced functions. Idempotent."""
        if self._compiler is not None:
            self._compiler.give_up()
        self._replaced.close()

    # -- loaders

    def _patch_loaders(self) -> None:
        from torch.utils.data import DataLoader, dataloader

        iterator: Any = dataloader._BaseDataLoaderIter
        made_here: Any = dataloader._SingleProcessDataLoaderIter
        next_of, recorder, seconds_of = iterator.__next__, self.recorder, self.seconds_of_newest
        note, clock, log = recorder.note, recorder.clock, recorder.log

        def next_within(batches: Any) -> Any:
            with recorder.phase(INPUT):
                return next_of(batches)

        @functools.wraps(next_of)
        def timed_next(batches: Any) -> Any:
            if recorder.depth or get_ident() != recorder.thread:
                return next_within(batches)
            note((INPUT, clock()))  # as recorder.enter does: see _patch_forward
            recorder.depth = 1
            try:
                batch = next_of(batches)
                samples, tokens = size_of(batch)
                amounts = samples, tokens, MADE_HERE if type(batches) is made_here else seconds_of(batches)
            except BaseException:
                recorder.leave(0)
                raise
            if amounts != recorder.amounts:
                recorder.set_amounts(amounts)
            recorder.depth = 0
            now = clock()
            note((FETCHED, now))
            if now >= recorder.due or len(log) > MOST_MARKS:
                recorder.process_marks()
            return batch

        self._replaced.replace(iterator, "__next__", timed_next)
        # Loader workers are started here.
        self._replaced.replace(DataLoader, "__iter__", self._replaced.timed(DataLoader.__iter__, INPUT))
        self._patch_loaders_processes()

    def seconds_of_newest(self, batches: Any) -> float:
        """Return the seconds of making the newest batch of a loader's iterator, for :meth:`Recorder.batch`."""
        if not getattr(batches, "_num_workers", 1):
            return MADE_HERE
        times = self._making.get(batches)
        return 0.0 if times is None else times.newest()

    def _patch_loaders_processes(self) -> None:
        """Patch loader processes so that they report the time of making batches."""
        from torch.utils.data import dataloader

        iterator: Any = dataloader._MultiProcessingDataLoaderIter
        begin, making = iterator.__init__, self._making

        @functools.wraps(begin)
        def begin_telling(batches: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            making[batches] = times = MakingTimes(loader.num_workers)
            with times.of_children():
                begin(batches, loader, *args, **kwargs)

        self._replaced.replace(iterator, "__init__", begin_telling)

    # -- models

    def _patch_forward(self) -> None:
        from torch import is_grad_enabled, nn
        from torch.compiler import is_dynamo_compiling as is_compiling

        recorder, within, met, meet = self.recorder, self._within, self._is_model, self._meet
        note, clock, log = recorder.note, recorder.clock, recorder.log
        plain: Callable[..., Any] = nn.Module.__call__

        def call_within(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if (depth := recorder.enter(LEARN if is_grad_enabled() else LOOK)) == IGNORED:
                return (module._compiled_call_impl or module._call_impl)(*args, **kwargs)
            within.model = True
            try:
                return (module._compiled_call_impl or module._call_impl)(*args, **kwargs)
            finally:
                within.model = False
                recorder.leave(depth)

        # torch's profiler reads the argument "self" of what stands in this place, and crashes where there is none.
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if within.model or is_compiling():
                # Inlined from torch's own implementation, so that calls of submodules cost nothing.
                return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
            is_model = met.get(id(self))
            if is_model is None and get_ident() == recorder.thread:
                is_model = meet(self)
            if not is_model:
                return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
            if recorder.depth or recorder.timing is not None or get_ident() != recorder.thread:
                return call_within(self, args, kwargs)
            # The common case. The recorder's work is inlined here: most of the cost of a call that runs once per step
            # is loading its code into the processor's caches.
            note((LEARN if is_grad_enabled() else LOOK, clock()))
            recorder.depth = 1
            within.model = True
            try:
                return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
            finally:
                within.model = False
                recorder.depth = 0
                now = clock()
                note((LEAVE, now))
                if now >= recorder.due or len(log) > MOST_MARKS:
                    recorder.process_marks()

        self._leave_to_compiler(call.__code__, call_within.__code__)
        self._replaced.replace(nn.Module, "__call__", functools.wraps(plain)(call))
        self._patch_buffers()

    def _leave_to_compiler(self, *codes: CodeType) -> None:
        """Let ``torch.compile`` compile what a module does, not our call of it.

        All modules would be compilations of that one call, which are limited in number and bear its name.
        """

        def skip() -> None:
            for code in codes:
                sys.modules[_COMPILER].skip_code(code)

        self._compiler = Arrival(_COMPILER, skip, lambda error: None)
        self._compiler.wait()

    def is_model(self, module: Any) -> bool:
        """Return True for a model, False for a loss, which has no parameters.

        The first call for a module also determines whether it is on a GPU and whether its gradients are exchanged.
        """
        is_model = self._is_model.get(id(module))
        return self._meet(module) if is_model is None else is_model

    def _meet(self, module: Any) -> bool:
        key = id(module)
        parameter = None
        try:
            parameter = next(module.parameters(), None)
            if parameter is not None and parameter.is_cuda:
                self.recorder.time_on(cuda.timer)
            if self.choice.backward:
                self._watch_gradients(module)
        except Exception:  # a module by type only: not a reason to end training
            pass
        self._is_model[key] = parameter is not None
        self._met[key] = weakref.ref(module, lambda _: self._forget(key))
        return self._is_model[key]

    def _forget(self, key: int) -> None:
        """Forget a deleted module, because another may get its id."""
        self._is_model.pop(key, None)
        self._met.pop(key, None)

    def _watch_gradients(self, module: Any) -> None:
        """Watch the gradients of every submodule that exchanges them with other ranks."""
        from torch.nn.parallel import DistributedDataParallel

        known = [exchange.model() for exchange in self._exchanges]
        for part in module.modules():
            if isinstance(part, DistributedDataParallel) and not any(part is model for model in known):
                exchange = Exchange(part, self.recorder)
                self._replaced.on_close(exchange.close)
                self._exchanges.append(exchange)

    def _patch_buffers(self) -> None:
        """Time DDP's buffer broadcast, in which all ranks wait for rank 0."""
        from torch.nn.parallel import DistributedDataParallel as Distributed

        if hasattr(Distributed, "_sync_buffers"):
            self._replaced.replace(
                Distributed, "_sync_buffers", self._replaced.timed(Distributed._sync_buffers, COLLECTIVE)
            )

    def _patch_backward(self) -> None:
        import torch

        #: ``Tensor.backward`` calls the first function.
        self._replaced.replace(
            torch.autograd, "backward", self._backward(torch.autograd.backward, is_part_of_model=False)
        )
        self._replaced.replace(
            torch.autograd, "grad", self._backward(torch.autograd.grad, is_part_of_model=True)
        )

    def _backward(self, function: Callable[..., Any], is_part_of_model: bool) -> Callable[..., Any]:
        """Return ``function`` timed as a backward pass; within a model's forward it counts as forward if allowed."""
        from torch.compiler import is_dynamo_compiling as is_compiling

        recorder, within, exchanges = self.recorder, self._within, self._exchanges
        note, clock, log = recorder.note, recorder.clock, recorder.log

        def backward_within(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if (depth := recorder.enter(BACKWARD)) == IGNORED:
                return function(*args, **kwargs)
            was_within, within.model = within.model, True
            try:
                return function(*args, **kwargs)
            finally:
                within.model = was_within
                recorder.leave(depth)
                for exchange in exchanges:
                    exchange.learn()

        @functools.wraps(function)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or (is_part_of_model and within.model):
                return function(*args, **kwargs)
            if recorder.depth or recorder.timing is not None or get_ident() != recorder.thread:
                return backward_within(args, kwargs)
            note((BACKWARD, clock()))  # as in _patch_forward
            recorder.depth = 1
            within.model = True  # recomputation (activation checkpointing) belongs to the backward pass
            try:
                return function(*args, **kwargs)
            finally:
                within.model = False
                recorder.depth = 0
                now = clock()
                note((LEAVE, now))
                if now >= recorder.due or len(log) > MOST_MARKS:
                    recorder.process_marks()
                for exchange in exchanges:
                    exchange.learn()

        return backward

    # -- copies to a device

    def _patch_copies(self) -> None:
        """Patch copies to a device: immediately, or when CUDA is first used.

        A process that computes on the CPU has no such copies, and its tensors' most called methods need not be
        replaced.
        """
        import torch

        accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
        if accelerator is not None and accelerator.type != "cuda":
            self._patch_tensors()
            return
        # Weak, because torch keeps the callback until CUDA is used.
        patches = weakref.ref(self)

        def cuda_is_used() -> None:
            if (living := patches()) is not None and not living._replaced.is_closed:
                living._patch_tensors()
                # Known models may be moved to a GPU now, and are inspected again.
                living._is_model.clear()
                living._met.clear()

        torch_cuda: Any = torch.cuda
        torch_cuda._lazy_call(cuda_is_used)

    def _patch_tensors(self) -> None:
        import torch
        from torch.compiler import is_dynamo_compiling as is_compiling

        recorder = self.recorder
        note, clock, log = recorder.note, recorder.clock, recorder.log
        to: Any = torch.Tensor.to
        to_cuda: Any = torch.Tensor.cuda

        def timed_to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not tensor.is_cpu or not goes_to_device(args, kwargs) or is_compiling():
                return to(tensor, *args, **kwargs)
            if recorder.depth or recorder.timing is not None or get_ident() != recorder.thread:
                return copied(recorder, tensor, to, args, kwargs)
            note((H2D, clock()))  # as in _patch_forward
            recorder.depth = 1
            try:
                if tensor.nbytes >= SMALL_COPY and not tensor.is_pinned():
                    recorder.copies_pageable()
                return to(tensor, *args, **kwargs)
            finally:
                recorder.depth = 0
                now = clock()
                note((LEAVE, now))
                if now >= recorder.due or len(log) > MOST_MARKS:
                    recorder.process_marks()

        def timed_cuda(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.is_cpu and not is_compiling():
                return copied(recorder, tensor, to_cuda, args, kwargs)
            return to_cuda(tensor, *args, **kwargs)

        self._replaced.replace(torch.Tensor, "to", OfInstances(to, timed_to))
        self._replaced.replace(torch.Tensor, "cuda", OfInstances(to_cuda, timed_cuda))


_installed: Patches | None = None


def install(recorder: Recorder, choice: Choice) -> Patches | None:
    """Patch torch for this process, replacing earlier patches; does nothing without a recorder."""
    global _installed
    uninstall()
    if recorder.thread != NOBODY:
        _installed = Patches(recorder, choice)
    return _installed


def uninstall() -> None:
    """Restore torch to its state before :func:`install`. Idempotent."""
    global _installed
    if _installed is not None:
        _installed.close()
        _installed = None


def installed() -> Patches | None:
    """Return the current patches of this process."""
    return _installed
