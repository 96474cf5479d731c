"""A torch profile of a few steps of a live rank, from one end of a step to another.

The profiler is started and stopped on the training thread, where the loop's operators run. The trace is written and
packed on a side thread, while the loop goes on.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from powertrain.trace.device import activity_window
from powertrain.trace.profiling.orders import ProfileCost, ProfileOrder, ProfileResult

if TYPE_CHECKING:
    from powertrain.trace.recording.recorder import Recorder

#: Level of compression: traces are mostly repetitions, and the loop waits for the same cores.
_COMPRESSION = 1
#: Header and trailer of gzip, so that Perfetto and other viewers open the file as it is.
_GZIP = 16 + zlib.MAX_WBITS
#: Allocations and releases of which the CUDA allocator keeps the history.
_ALLOCATIONS_LIMIT = 100_000


class ProfileWindow:
    """Profiles one order at a time. ``deliver`` gets each result, on any thread."""

    def __init__(self, recorder: Recorder, deliver: Callable[[ProfileResult], None]) -> None:
        self._recorder, self._deliver = recorder, deliver
        self._lock = threading.Lock()
        #: The current order, from its arrival to its result.
        self._order: ProfileOrder | None = None
        self._profiler: Any = None
        #: What ended when the window began: steps are counted by the same optimizer.
        self._boundary = 0
        self._ended = self._left = self._first = 0
        self._began = self._start_seconds = 0.0
        self._packer: threading.Thread | None = None

    def begin(self, order: ProfileOrder) -> None:
        """Profile the next steps. Any thread. The result says why where that is not possible."""
        with self._lock:
            is_free = self._order is None
            if is_free:
                self._order = order
                self._ended = 0
        if not is_free:
            self._deliver(ProfileResult(ask=order.ask, error="another profile of this rank is under way"))
            return
        self._recorder.watch_step_ends(self._on_step_end)

    def close(self) -> None:
        """End a window that is open when the function ends, and wait until its trace is packed. Training thread."""
        self._recorder.unwatch_step_ends(self._on_step_end)
        self._await_packing()
        if self._order is None:
            return
        if self._profiler is None:
            after = self._order.after
            self._fail(f"the function ended before step {after}" if after else "no step ended any more")
            return
        try:
            self._stop()
        except Exception as error:  # the profiler's: the telemetry of the rank is still to be sent
            self._fail(f"{type(error).__name__}: {error}")
        self._await_packing()

    def _await_packing(self) -> None:
        if self._packer is not None:
            self._packer.join()

    # -- the training thread

    def _on_step_end(self, boundary: int) -> None:
        order = self._order
        if order is None:
            return
        try:
            if self._profiler is None:
                self._ended += 1
                if self._ended >= order.after:
                    self._start(order, boundary)
            elif boundary == self._boundary:
                self._left -= 1
                if not self._left:
                    self._stop()
        except Exception as error:  # the profiler's, never the loop's
            self._profiler = None
            self._recorder.unwatch_step_ends(self._on_step_end)
            self._fail(f"{type(error).__name__}: {error}")

    def _start(self, order: ProfileOrder, boundary: int) -> None:
        torch = sys.modules.get("torch")
        if torch is None:
            raise RuntimeError("the training function has not imported torch")
        from torch.profiler import ProfilerActivity, profile

        if activity_window.is_any_open():
            return  # for a step or two; then the next end of a step starts the profile
        if torch.autograd._profiler_enabled():
            raise RuntimeError("the training function's own profiler is running")
        began = time.perf_counter()
        has_gpu = torch.cuda.is_initialized()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
        profiler = profile(activities=activities, with_stack=True, profile_memory=order.memory)
        profiler.start()
        if order.memory and has_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS_LIMIT)
        self._profiler, self._boundary, self._left = profiler, boundary, order.steps
        self._first = self._recorder.steps
        self._began = time.perf_counter()
        self._start_seconds = self._began - began

    def _stop(self) -> None:
        order, profiler = self._order, self._profiler
        assert order is not None
        self._profiler = None
        self._recorder.unwatch_step_ends(self._on_step_end)
        ended = time.perf_counter()
        profiler.stop()
        cost = ProfileCost(
            start=self._start_seconds, steps=ended - self._began, stop=time.perf_counter() - ended
        )
        done = ProfileResult(ask=order.ask, steps=order.steps - self._left, first_step=self._first, cost=cost)
        self._packer = threading.Thread(
            target=self._pack, args=(done, profiler, order.memory), name="powertrain-profile", daemon=True
        )
        self._packer.start()

    # -- the side thread

    def _pack(self, done: ProfileResult, profiler: Any, memory: bool) -> None:
        began = time.perf_counter()
        try:
            trace = packed_trace(profiler)
            snapshot = _allocator_history() if memory else b""
            cost = msgspec.structs.replace(done.cost, packing=time.perf_counter() - began)
            done = msgspec.structs.replace(done, trace=trace, memory=snapshot, cost=cost)
        except Exception as error:
            done = ProfileResult(ask=done.ask, error=f"{type(error).__name__}: {error}")
        self._finish(done)

    def _fail(self, reason: str) -> None:
        """Deliver the reason why the current order has no profile."""
        assert self._order is not None
        self._finish(ProfileResult(ask=self._order.ask, error=reason))

    def _finish(self, result: ProfileResult) -> None:
        with self._lock:
            self._order = None
        self._deliver(result)


def packed_trace(profiler: Any) -> bytes:
    """Return the trace of a stopped profiler with the user's line of each operator, compressed."""
    from powertrain.trace.profiling.user_lines import lines_of

    lines = msgspec.json.encode(lines_of(profiler.profiler.kineto_results.experimental_event_tree()))
    descriptor, path = tempfile.mkstemp(prefix="powertrain-profile-", suffix=".json")
    os.close(descriptor)
    try:
        profiler.export_chrome_trace(path)
        with open(path, "rb") as file:
            text = file.read()
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    # The file is one object: ours becomes its first member, which viewers ignore.
    packer = zlib.compressobj(_COMPRESSION, wbits=_GZIP)
    head = b'{"powertrain": ' + lines + b", "
    return b"".join([packer.compress(head), packer.compress(text[text.index(b"{") + 1 :]), packer.flush()])


def _allocator_history() -> bytes:
    """Return what torch's memory viewer opens: the allocations of the window with their stacks; b"" without a GPU."""
    torch = sys.modules["torch"]
    if not torch.cuda.is_initialized():
        return b""
    import pickle

    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    packer = zlib.compressobj(_COMPRESSION, wbits=_GZIP)
    return packer.compress(pickle.dumps(snapshot)) + packer.flush()
