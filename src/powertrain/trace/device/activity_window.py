"""A short window of steps in which torch's profiler records the device's kernels, once early in the run.

CUDA events between phases count a device that waits for the host as working. The profiler's records of kernels tell the
two apart, at some microseconds for each kernel of these steps and about 20 ms for its start. The window is taken again
when the pace of the steps has changed, and only where that costs at most a hundredth of the time since the last.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from powertrain.trace.device.activity import Activity, DeviceActivity, summarize
from powertrain.trace.recording import marks
from powertrain.trace.recording.cuda import captures
from powertrain.trace.recording.phases import COLLECTIVE, COUNT, FORWARD, INSIDE, OPTIMIZER, OUTSIDE

if TYPE_CHECKING:
    from powertrain.trace.recording.recorder import Recorder

#: Variables that NVIDIA's own profilers set for the programs that they start: only one may record at a time.
_OTHER_PROFILERS = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
#: Steps before the window: after those that compile, tune and allocate, and the one whose operators are counted.
STEPS_BEFORE = 12
#: The window ends with the first step after so many seconds and steps, or after so many steps.
_LEAST_SECONDS, _LEAST_STEPS, _MOST_STEPS = 0.01, 3, 8
#: Change of the pace after which a new window is taken; and the most that it may cost of the time since the last.
_CHANGE, _MOST_COST = 1.3, 0.01
#: Seconds over which the pace is measured, and that the end of a run waits for the reading of a window.
_PACE_INTERVAL_S, _READING_TIMEOUT_S = 5.0, 5.0

_lock = threading.Lock()
#: The open window by thread: one in a process, because torch's profiler records the whole process.
_open: dict[int, ActivityWindow] = {}
#: Threads that start the profiler for a window; and whether anybody else has started it in this process.
_starting: set[int] = set()
_others = threading.Event()


def is_any_open() -> bool:
    """Return whether torch's profiler is in use by a window, for some steps."""
    return bool(_open)


def make_way() -> None:
    """Close this thread's window and take no other in this process: the user's own profiler starts."""
    if get_ident() in _starting:
        return
    _others.set()
    window = _open.get(get_ident())
    if window is not None:
        window.abandon()


class ActivityWindow:
    """Takes windows of the recording thread's steps. An error of the profiler ends that, never a step."""

    def __init__(
        self,
        recorder: Recorder,
        after: int = STEPS_BEFORE,
        is_too_large: Callable[[], bool] = lambda: False,
    ) -> None:
        """Create it. ``is_too_large`` returns whether a step has too many operators to record them all."""
        self._recorder, self._left, self._is_too_large = recorder, after, is_too_large
        self._profiler: Any = None
        self._boundary = self._ended = 0
        self._tee: _PhaseChanges | None = None
        self._began = self._cost = 0.0
        self._reader: threading.Thread | None = None
        self._results: list[DeviceActivity] = []
        #: Steps and time of the last look at the pace; the pace at the last window, 0 for unknown.
        self._looked: tuple[int, float] | None = None
        self._pace = 0.0
        self._taken_at = time.monotonic()
        recorder.watch_step_ends(self._on_step_end)

    def news(self) -> DeviceActivity | None:
        """Return the newest result, once. Service thread."""
        newest = self._results[-1] if self._results else None
        self._results.clear()
        return newest

    def look_at_pace(self) -> None:
        """Take another window if steps have become slower or faster since the last. Service thread."""
        now, steps = time.monotonic(), self._recorder.steps
        if self._looked is None or steps < self._looked[0]:
            self._looked = steps, now
            return
        done, seconds = steps - self._looked[0], now - self._looked[1]
        if seconds < _PACE_INTERVAL_S or not done or self._is_open:
            return
        self._looked, pace = (steps, now), seconds / done
        if not self._pace or not self._cost:
            self._pace = pace
        elif (
            not 1 / _CHANGE < pace / self._pace < _CHANGE
            and self._cost < _MOST_COST * (now - self._taken_at)
            and not _others.is_set()
        ):
            self._pace, self._left = pace, 1
            self._recorder.watch_step_ends(self._on_step_end)

    def close(self) -> None:
        """Drop an open window, and wait for the reading of the last. Training thread."""
        self.abandon()
        if self._reader is not None:
            self._reader.join(_READING_TIMEOUT_S)

    def abandon(self) -> None:
        """Drop an open window without waiting for the device, which may never end its work. Training thread."""
        self._recorder.unwatch_step_ends(self._on_step_end)
        profiler, tee = self._profiler, self._tee
        self._profiler = self._tee = None
        _open.pop(get_ident(), None)
        if tee is not None:
            tee.close()
        if profiler is not None:
            _disable()

    @property
    def _is_open(self) -> bool:
        return self._profiler is not None or self._on_step_end in self._recorder.at_step_end

    # -- the training thread

    def _on_step_end(self, boundary: int) -> None:
        try:
            with captures.kept_out() as may_ask:
                if not may_ask or _is_capturing():
                    return  # what follows would end the capture of a graph
                if self._profiler is None:
                    self._left -= 1
                    if self._left <= 0:
                        self._start(boundary)
                elif boundary == self._boundary:
                    self._ended += 1
                    is_long = time.perf_counter() - self._began >= _LEAST_SECONDS
                    if (is_long and self._ended >= _LEAST_STEPS) or self._ended >= _MOST_STEPS:
                        self._stop()
        except Exception:  # the profiler's, never the loop's: the run has no such times then
            self.abandon()

    def _start(self, boundary: int) -> None:
        torch: Any = sys.modules["torch"]
        is_under_another = _others.is_set() or any(name in os.environ for name in _OTHER_PROFILERS)
        if self._recorder.device is None or is_under_another or self._is_too_large():
            self.abandon()
            return
        with _lock:
            if _open or torch.autograd._profiler_enabled():
                self._left = 1  # another rank's window in this process: after the next step
                return
            _open[get_ident()] = self
        began = time.perf_counter()
        profiler: Any = torch.autograd.profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True)
        _starting.add(get_ident())
        try:
            profiler.__enter__()
        finally:
            _starting.discard(get_ident())
        self._profiler, self._boundary, self._ended = profiler, boundary, 0
        self._tee = _PhaseChanges(self._recorder)
        self._began = time.perf_counter()
        self._cost = self._began - began

    def _stop(self) -> None:
        profiler, tee, steps = self._profiler, self._tee, self._ended
        assert tee is not None
        self._recorder.unwatch_step_ends(self._on_step_end)
        end = time.perf_counter_ns()
        tee.close()
        self._tee = None
        profiler.__exit__(None, None, None)
        self._profiler = None
        _open.pop(get_ident(), None)
        now = time.perf_counter()
        self._cost += now - end * 1e-9
        self._taken_at = time.monotonic()
        seconds = (end * 1e-9 - self._began) / steps
        self._reader = threading.Thread(
            target=self._read,
            args=(profiler, tee, steps, seconds, end),
            name="powertrain-device",
            daemon=True,
        )
        self._reader.start()

    # -- a side thread

    def _read(self, profiler: Any, tee: _PhaseChanges, steps: int, seconds: float, end: int) -> None:
        with contextlib.suppress(Exception):  # torch's internals have moved
            device = sys.modules["torch"].autograd.DeviceType.CUDA
            activities = (_activity(event, device) for event in profiler.kineto_results.events())
            found = summarize(activities, tee.changes(), steps, seconds, end + tee.to_unix)
            if found is not None:
                self._results.append(found)


def _is_capturing() -> bool:
    cuda = sys.modules["torch"].cuda
    return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())


def _disable() -> None:
    with contextlib.suppress(Exception):
        sys.modules["torch"].autograd._disable_profiler()


def _activity(event: Any, device: Any) -> Activity:
    is_on_device = event.device_type() == device
    return Activity(event.name(), event.start_ns(), event.duration_ns(), is_on_device, event.correlation_id())


class _PhaseChanges:
    """Copies the recorder's marks while it is open. Training thread, but for :meth:`changes`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: Nanoseconds from the recorder's clock to Unix time, which the profiler's times are in.
        self.to_unix = time.time_ns() - time.perf_counter_ns()
        self._noted: list[Any] = []
        recorder.process_marks()
        recorder.copied_marks = self._noted

    def close(self) -> None:
        self._recorder.process_marks()
        self._recorder.copied_marks = None

    def changes(self) -> list[tuple[int, int]]:
        """Return when the phase changed, in Unix nanoseconds, and to which."""
        found = []
        rest = INSIDE
        for number, value in zip(self._noted[::2], self._noted[1::2], strict=True):
            if number == marks.BEGINS:
                rest = OPTIMIZER  # a closure may compute within the optimizer's step, and returns to it
            elif number == marks.ENDED:
                rest = INSIDE
            phase = rest if number in _BACK else _PHASE_AFTER.get(number)
            if phase is not None and isinstance(value, int):
                found.append((value + self.to_unix, phase))
        return sorted(found)


#: Marks that return to the rest of a step, and the phase after other marks, as far as a mark alone tells it.
_BACK = frozenset({marks.LEAVE, marks.FETCHED})
_PHASE_AFTER = {
    **{phase: phase for phase in range(COUNT)},
    marks.LEARN: FORWARD,
    marks.LOOK: FORWARD,
    marks.GRADIENTS: COLLECTIVE,
    marks.BEGINS: OPTIMIZER,
    marks.ENDED: OUTSIDE,
}
