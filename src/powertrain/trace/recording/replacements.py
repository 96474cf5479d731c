"""Timed replacements of torch functions, restorable: optimizers, collectives, graphs and saving.

Models, loaders and copies, which depend on detecting models, are patched in ``patches.py``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

from powertrain.trace.device import activity_window, allocations
from powertrain.trace.recording import cuda
from powertrain.trace.recording.marks import BEGINS, ENDED, MOST_MARKS
from powertrain.trace.recording.phases import COLLECTIVE, REPORT
from powertrain.trace.recording.recorder import Recorder

#: Functions of torch.distributed in which ranks wait for each other; asynchronous ones wait in ``Work.wait``.
_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


class Replacements:
    """Attributes of torch that are replaced until :meth:`close`."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.is_closed = False
        self._undo = contextlib.ExitStack()

    def close(self) -> None:
        """Restore all replaced attributes. Idempotent."""
        self.is_closed = True
        self._undo.close()

    def on_close(self, function: Callable[[], Any]) -> None:
        """Call ``function`` in :meth:`close`."""
        self._undo.callback(function)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` until :meth:`close`; a replacement that other code has installed since stays."""
        is_own = name in vars(owner)
        before = vars(owner).get(name)
        setattr(owner, name, value)

        def put_back() -> None:
            if vars(owner).get(name) is not value:
                return
            if is_own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

        self._undo.callback(put_back)

    def timed(self, function: Callable[..., Any], phase: int) -> Callable[..., Any]:
        """Return ``function`` with its time counted as ``phase``."""
        from torch.compiler import is_dynamo_compiling as is_compiling

        recorder = self.recorder

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return function(*args, **kwargs)
            depth = recorder.enter(phase)
            try:
                return function(*args, **kwargs)
            finally:
                recorder.leave(depth)

        return timed


def patch_optimizers(replaced: Replacements) -> None:
    """Mark the begin and end of each optimizer step."""
    import torch
    from torch.optim import optimizer as optimizers

    recorder = replaced.recorder
    begins, ended = _optimizer_hooks(replaced.recorder)
    replaced.on_close(optimizers.register_optimizer_step_pre_hook(begins).remove)
    replaced.on_close(optimizers.register_optimizer_step_post_hook(ended).remove)
    scaler: Any = torch.amp.GradScaler
    step = scaler.step

    @functools.wraps(step)
    def scaled_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_scaling or get_ident() != recorder.thread:
            return step(self, optimizer, *args, **kwargs)
        # Also a step if the scaler skips it because gradients were infinite.
        recorder.optimizer_begins(optimizer)
        recorder.is_scaling = True
        try:
            return step(self, optimizer, *args, **kwargs)
        finally:
            recorder.is_scaling = False
            recorder.optimizer_ended(optimizer)

    replaced.replace(scaler, "step", scaled_step)


def _optimizer_hooks(recorder: Recorder) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the hooks before and after each optimizer's step."""
    note, clock, log = recorder.note, recorder.clock, recorder.log

    def begins(optimizer: Any, args: Any, kwargs: Any) -> None:
        if (
            recorder.device is None
            and id(optimizer) == recorder.which
            and not recorder.is_scaling
            and get_ident() == recorder.thread
        ):
            note((BEGINS, clock()))  # as in Patches._patch_forward
        else:
            recorder.optimizer_begins(optimizer)

    def ended(optimizer: Any, args: Any, kwargs: Any) -> None:
        if (
            recorder.device is None
            and not recorder.at_step_end
            and id(optimizer) == recorder.which
            and not recorder.is_scaling
            and get_ident() == recorder.thread
        ):
            now = clock()
            note((ENDED, now))
            if now >= recorder.due or len(log) > MOST_MARKS:
                recorder.process_marks()
        else:
            recorder.optimizer_ended(optimizer)

    for hook in (begins, ended):
        # Lets torch.compile call the hooks unchanged; otherwise it would warn that it cannot trace them.
        vars(hook)["_torchdynamo_disable"] = True
    return begins, ended


def patch_captures(replaced: Replacements) -> None:
    """Do not query the device while a graph is being captured, because that would end the capture."""
    import torch

    graph: Any = torch.cuda.CUDAGraph
    plain_begin, plain_end, captures = graph.capture_begin, graph.capture_end, cuda.captures

    @functools.wraps(plain_begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            captures.begins(graph)
            return plain_begin(graph, *args, **kwargs)
        except BaseException:
            captures.ended(graph)
            raise

    @functools.wraps(plain_end)
    def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return plain_end(graph, *args, **kwargs)
        finally:
            captures.ended(graph)

    # The end of a capture in progress would never be reported after the patches are removed.
    replaced.on_close(captures.forget)
    replaced.replace(graph, "capture_begin", capture_begin)
    replaced.replace(graph, "capture_end", capture_end)


def patch_profilers(replaced: Replacements) -> None:
    """Let a profiler or memory history that the loop starts have the place of ours: a process has only one of each."""
    from torch.autograd import profiler
    from torch.cuda import memory

    def after(give_way: Callable[[], None], plain: Any) -> Any:
        @functools.wraps(plain)
        def start(*args: Any, **kwargs: Any) -> Any:
            give_way()
            return plain(*args, **kwargs)

        return start

    for owner, name, give_way in (
        (profiler, "_prepare_profiler", activity_window.make_way),
        (profiler, "_enable_profiler", activity_window.make_way),
        (memory, "_record_memory_history", allocations.leave_history_to_user),
    ):
        if (plain := getattr(owner, name, None)) is not None:
            replaced.replace(owner, name, after(give_way, plain))


def patch_collectives(replaced: Replacements) -> None:
    """Time the waits of ranks for each other."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import _functional_collectives as functional
    from torch.distributed import distributed_c10d

    for name in _COLLECTIVES:
        plain = getattr(distributed_c10d, name, None)
        if plain is None:
            continue
        timed = replaced.timed(plain, COLLECTIVE)
        for owner in (distributed_c10d, dist):
            if vars(owner).get(name) is plain:
                replaced.replace(owner, name, timed)
    work: Any = dist.Work
    replaced.replace(work, "wait", replaced.timed(work.wait, COLLECTIVE))
    # Sharded tensors wait here, for example in clipping the gradients of an FSDP model.
    replaced.replace(functional, "wait_tensor", replaced.timed(functional.wait_tensor, COLLECTIVE))


def patch_saving(replaced: Replacements) -> None:
    """Count files that a loop writes before it reports them as part of the cost of its checkpoint."""
    import torch
    from torch import serialization

    plain = serialization.save
    timed = replaced.timed(plain, REPORT)
    for owner in (torch, serialization):
        if vars(owner).get("save") is plain:
            replaced.replace(owner, "save", timed)
