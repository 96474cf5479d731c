"""Floating-point operations of one step, counted once, early in the run.

The count is torch's own (``torch.utils.flop_counter``): matrix products, convolutions and attention, forward and
backward, by the shapes of their arguments. Operations that torch recomputes (activation checkpointing) count again.
Kernels that never pass torch's dispatcher are not seen: replayed CUDA graphs, and products that ``torch.compile`` has
put into kernels of its own (``mode="max-autotune"``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.trace.recording.recorder import Recorder

#: Number of steps before the counted one: the first steps compile, tune and allocate.
STEPS_BEFORE = 5


class StepFlops:
    """Counts the operations of one step of the recording thread, from one end of a step to the next.

    The counted step is slower by some microseconds for each operator; all others are unaffected. An error here ends
    the count, never the step.
    """

    def __init__(self, recorder: Recorder, after: int = STEPS_BEFORE) -> None:
        self._recorder, self._left = recorder, after
        self._mode: Any = None
        #: What ended the step before: with several optimizers, a step ends with the same one.
        self._boundary = 0
        #: The operations of the counted step; None until it has ended, 0 where nothing was counted.
        self.counted: int | None = None
        recorder.watch_step_ends(self._on_step_end)

    def close(self) -> None:
        """End a count that is under way. Training thread."""
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
                self.counted = self._mode.total
                self.close()
        except Exception:  # torch's, never the loop's: the run has no count then
            self.close()

    def _start(self, boundary: int) -> None:
        torch = sys.modules.get("torch")
        if torch is None or _is_occupied(torch):
            self.close()
            return
        mode = _counting_mode()
        _end_in_forked_children()
        mode.__enter__()
        _entered.add(mode)
        self._mode, self._boundary = mode, boundary


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


def _counting_mode() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.total, self.is_over = 0, False

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Let compiled code run as compiled: without it, the step would need the memory of one that is not."""
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            formula = None if self.is_over else flop_registry.get(getattr(func, "_overloadpacket", None))
            if formula is not None:
                with contextlib.suppress(Exception):  # of a formula that does not fit
                    self.total += int(formula(*args, **kwargs, out_val=result))
            return result

    return Counting()
