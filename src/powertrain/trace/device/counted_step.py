"""Operators of one step, counted once, early in the run.

Floating-point operations are counted by torch's own formulas (``torch.utils.flop_counter``): matrix products,
convolutions and attention, forward and backward, by the shapes of their arguments. Operations that torch recomputes
(activation checkpointing) count again. Kernels that never pass torch's dispatcher are not seen: replayed CUDA graphs,
and products that ``torch.compile`` has put into kernels of its own (``mode="max-autotune"``).

On a GPU, the operators that make the host wait for the device are noted too, with the line of the user's code.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

import msgspec

from powertrain.trace.profiling.user_lines import FileJudge

if TYPE_CHECKING:
    from powertrain.trace.recording.recorder import Recorder

#: Number of steps before the counted one: the first steps compile, tune and allocate.
STEPS_BEFORE = 5
#: Lines that are listed.
_LINES_LIMIT = 16
#: Operators that wait for the device wherever they meet one of its tensors.
_WAITING = frozenset(
    {
        "aten._local_scalar_dense",
        "aten._unique2",
        "aten.bincount",
        "aten.equal",
        "aten.masked_select",
        "aten.nonzero",
        "aten.unique_consecutive",
        "aten.unique_dim",
    }
)
_COPIES = frozenset({"aten._to_copy", "aten.copy_"})
#: Functions of torch.cuda that wait, besides operators.
_WAITING_FUNCTIONS = ("synchronize",)


class WaitingLine(msgspec.Struct, kw_only=True):
    """A line of the user's code that makes the host wait for the device."""

    #: As "train.py:31 in train".
    where: str
    #: The operator, such as "item" or "cpu".
    call: str
    count: int = 0
    seconds: float = 0.0


class StepOperators(msgspec.Struct, frozen=True, kw_only=True):
    """The operators of the counted step."""

    flops: int
    #: Those of matrix products of 32-bit floats on a GPU that may not use its 19-bit format (TF32).
    flops_of_full_floats: int = 0
    operators: int = 0
    #: Of these, operators of the optimizer's step.
    optimizer_operators: int = 0
    waiting: tuple[WaitingLine, ...] = ()


class CountedStep:
    """Counts the operators of one step of the recording thread, from one end of a step to the next.

    The counted step is slower by some microseconds for each operator; all others are unaffected. An error here ends
    the count, never the step.
    """

    def __init__(self, recorder: Recorder, after: int = STEPS_BEFORE) -> None:
        self._recorder, self._left = recorder, after
        self._mode: Any = None
        self._undo: Callable[[], None] = _nothing
        #: What ended the step before: with several optimizers, a step ends with the same one.
        self._boundary = 0
        #: The counted step; None until it has ended.
        self.counted: StepOperators | None = None
        recorder.watch_step_ends(self._on_step_end)

    def close(self) -> None:
        """End a count that is under way. Training thread."""
        self._undo()
        self._undo = _nothing
        with contextlib.suppress(Exception):  # torch's, never the loop's
            if self._mode is None or _leave(self._mode):
                self._mode = None
        self._recorder.unwatch_step_ends(self._on_step_end)

    def _on_step_end(self, boundary: int) -> None:
        try:
            if self._mode is None:
                self._left -= 1
                if self._left <= 0:
                    self._start(boundary)
            elif boundary == self._boundary and _leave(self._mode):
                self.counted = self._mode.counts.result()
                self.close()
        except Exception:  # torch's, never the loop's: the run has no count then
            self.close()

    def _start(self, boundary: int) -> None:
        torch = sys.modules.get("torch")
        if torch is None or _is_occupied(torch):
            self.close()
            return
        counts = _Counts(torch, self._recorder)
        mode = _counting_mode(counts)
        _end_in_forked_children()
        mode.__enter__()
        _entered.add(mode)
        self._mode, self._boundary = mode, boundary
        if counts.has_gpu:
            self._undo = _watch_functions(torch, counts)


def _nothing() -> None:
    pass


def _computes_full_floats(torch: Any) -> bool:
    """Return whether products of 32-bit floats must not use the shortened format of tensor cores."""
    try:
        return bool(torch.get_float32_matmul_precision() == "highest")
    except RuntimeError:  # torch refuses it where the newer setting is in use
        return getattr(torch.backends.cuda.matmul, "fp32_precision", "") in ("ieee", "none")


class _Counts:
    """What the mode has seen."""

    def __init__(self, torch: Any, recorder: Recorder) -> None:
        from torch.utils.flop_counter import flop_registry

        self._formulas, self._recorder = flop_registry, recorder
        self.has_gpu = bool(torch.cuda.is_initialized())
        self._tensor, self._single = torch.Tensor, torch.float32
        self._truth_types = (torch.bool, torch.uint8)
        self._is_full = self.has_gpu and _computes_full_floats(torch)
        self._flops = self._full_flops = self._operators = self._of_optimizer = 0
        self._waiting: dict[str, WaitingLine] = {}
        self._judge = FileJudge()

    def count(self, packet: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count one operator."""
        self._operators += 1
        # A closure computes forward and backward within the optimizer's step, the latter on a thread of autograd.
        is_update = self._recorder.is_optimizing and not self._recorder.depth
        self._of_optimizer += is_update and get_ident() == self._recorder.thread
        if (formula := self._formulas.get(packet)) is not None:
            flops = int(formula(*args, **kwargs, out_val=result))
            self._flops += flops
            if self._is_full and isinstance(args[0], self._tensor) and args[0].is_cuda:
                # Convolutions may use TF32 unless that is switched off.
                is_product = "conv" not in str(packet)
                self._full_flops += flops * (is_product and args[0].dtype == self._single)

    def waiting_call(self, packet: Any, args: Any, kwargs: Any, result: Any) -> str:
        """Return what a user would call the operator, if it makes the host wait for the device; else ""."""
        name = str(packet)
        if name in _WAITING:
            is_waiting = any(isinstance(one, self._tensor) and one.is_cuda for one in args)
            return name[len("aten.") :].replace("_local_scalar_dense", "item") if is_waiting else ""
        if name in _COPIES and not kwargs.get("non_blocking"):
            source = args[1] if name == "aten.copy_" else args[0]
            if len(args) > 2 and name == "aten.copy_" and args[2]:  # non_blocking
                return ""
            if isinstance(source, self._tensor) and isinstance(result, self._tensor):
                if source.is_cuda and result.device.type == "cpu":
                    return "cpu"
                if result.is_cuda and source.device.type == "cpu" and source.dim():
                    return "to a GPU"
            return ""
        if name == "aten.index" and args[0].is_cuda:  # assignments by a mask do not wait
            masks = (
                one for one in args[1] if isinstance(one, self._tensor) and one.dtype in self._truth_types
            )
            return "indexing by a mask" if any(True for _ in masks) else ""
        return ""

    def waited(self, call: str, seconds: float) -> None:
        """Note that the host waited for the device, called from the line above."""
        frame = sys._getframe(1)
        while frame is not None and not self._judge.is_of_user(frame.f_code.co_filename):
            frame = frame.f_back  # type: ignore[assignment]
        where = "a library"
        if frame is not None:
            where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        line = self._waiting.setdefault(f"{where} {call}", WaitingLine(where=where, call=call))
        line.count += 1
        line.seconds += seconds

    def result(self) -> StepOperators:
        longest = sorted(self._waiting.values(), key=lambda line: -line.seconds)
        return StepOperators(
            flops=self._flops,
            flops_of_full_floats=self._full_flops,
            operators=self._operators,
            optimizer_operators=self._of_optimizer,
            waiting=tuple(longest[:_LINES_LIMIT]),
        )


def _watch_functions(torch: Any, counts: _Counts) -> Callable[[], None]:
    """Note calls of functions that wait for the device; return what undoes that."""
    originals = {name: getattr(torch.cuda, name) for name in _WAITING_FUNCTIONS}
    if any(hasattr(original, "_powertrain_watched") for original in originals.values()):
        return _nothing  # by another rank in this process

    def watched(name: str, original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                counts.waited(f"torch.cuda.{name}", time.perf_counter() - began)

        call._powertrain_watched = True  # type: ignore[attr-defined]
        return call

    replaced = {name: watched(name, original) for name, original in originals.items()}
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)

    def undo() -> None:
        for name, function in replaced.items():
            if getattr(torch.cuda, name) is function:
                setattr(torch.cuda, name, originals[name])

    return undo


#: The modes that are entered in this process: one at most, but for ranks that train as threads.
_entered: weakref.WeakSet[Any] = weakref.WeakSet()


@functools.cache
def _end_in_forked_children() -> None:
    """Let workers of a DataLoader that are forked in the counted step load their batches without the mode."""
    os.register_at_fork(after_in_child=_leave_all)


def _leave_all() -> None:
    for mode in list(_entered):
        with contextlib.suppress(Exception):
            _leave(mode)


def _is_occupied(torch: Any) -> bool:
    """Return whether a mode of the loop's own is active, or a CUDA graph is being captured."""
    from torch.utils import _python_dispatch

    is_capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return is_capturing or bool(_python_dispatch._get_current_dispatch_mode_stack())


def _leave(mode: Any) -> bool:
    """Leave the mode if it is the newest; return whether it is left. torch leaves the newest, whichever it is."""
    from torch.utils import _python_dispatch

    mode.is_over = True
    if mode in _entered and _python_dispatch._get_current_dispatch_mode_stack()[-1:] == [mode]:
        _entered.discard(mode)
        mode.__exit__(None, None, None)
    return mode not in _entered


def _counting_mode(counts: _Counts) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.counts, self.is_over = counts, False

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Let compiled code run as compiled: without it, the step would need the memory of one that is not."""
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            began = time.perf_counter()
            result = func(*args, **kwargs)
            if not self.is_over:
                with contextlib.suppress(Exception):  # of a formula that does not fit
                    packet = getattr(func, "_overloadpacket", None)
                    if counts.has_gpu and (call := counts.waiting_call(packet, args, kwargs, result)):
                        counts.waited(call, time.perf_counter() - began)
                    counts.count(packet, args, kwargs, result)
            return result

    return Counting()
