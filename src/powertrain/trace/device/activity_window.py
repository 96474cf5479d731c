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
from typing import TYPE_CHECKING, Any

from powertrain.trace.device.activity import Activity, DeviceActivity, summarize
from powertrain.trace.recording import marks
from powertrain.trace.recording.phases import COLLECTIVE, COUNT, FORWARD, INSIDE, OPTIMIZER, OUTSIDE

if TYPE_CHECKING:
    from powertrain.trace.recording.recorder import Recorder

#: Variables that NVIDIA's own profilers set for the programs that they start: only one may record at a time.
_OTHER_PROFILERS = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
#: Windows that are open in this process: one at most, but for ranks that train as threads.
_open: set[int] = set()
#: Steps before the window: after those that compile, tune and allocate, and the one whose operators are counted.
STEPS_BEFORE = 12
#: The window ends with the first step after so many seconds, or after so many steps.
_LEAST_SECONDS, _MOST_STEPS = 0.01, 8
#: Change of the pace after which a new window is taken; and the most that it may cost of the time since the last.
_CHANGE, _MOST_COST = 1.3, 0.01
#: Seconds over which the pace is measured.
_PACE_INTERVAL_S = 5.0


def is_any_open() -> bool:
    """Return whether torch's profiler is in use by a window, for some steps. Training thread."""
    return bool(_open)


class ActivityWindow:
    """Takes windows of the recording thread's steps. An error of the profiler ends that, never a step."""

    def __init__(self, recorder: Recorder, after: int = STEPS_BEFORE) -> None:
        self._recorder, self._left = recorder, after
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
        elif not 1 / _CHANGE < pace / self._pace < _CHANGE and self._cost < _MOST_COST * (
            now - self._taken_at
        ):
            self._pace, self._left = pace, 1
            self._recorder.watch_step_ends(self._on_step_end)

    def close(self) -> None:
        """End an open window, and wait for the reading of the last. Training thread."""
        self._recorder.unwatch_step_ends(self._on_step_end)
        if self._profiler is not None:
            self._stop()
        if self._reader is not None:
            self._reader.join()

    @property
    def _is_open(self) -> bool:
        return self._profiler is not None or self._on_step_end in self._recorder.at_step_end

    # -- the training thread

    def _on_step_end(self, boundary: int) -> None:
        try:
            if self._profiler is not None:
                if boundary == self._boundary:
                    self._ended += 1
                    is_long = time.perf_counter() - self._began >= _LEAST_SECONDS
                    if is_long or self._ended >= _MOST_STEPS:
                        self._stop()
            else:
                self._left -= 1
                if self._left <= 0:
                    self._start(boundary)
        except Exception:  # the profiler's, never the loop's: the run has no such times then
            self._give_up()

    def _start(self, boundary: int) -> None:
        torch = sys.modules.get("torch")
        has_gpu = torch is not None and self._recorder.device is not None and torch.cuda.is_initialized()
        if not has_gpu or any(name in os.environ for name in _OTHER_PROFILERS):
            self._give_up()
            return
        assert torch is not None
        if torch.autograd._profiler_enabled() or torch.cuda.is_current_stream_capturing():
            self._left = 1  # the user's own profile, or a captured graph: after the next step
            return
        began = time.perf_counter()
        profiler: Any = torch.autograd.profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True)
        _open.add(id(self))
        profiler.__enter__()
        self._profiler, self._boundary, self._ended = profiler, boundary, 0
        self._tee = _PhaseChanges(self._recorder)
        self._began = time.perf_counter()
        self._cost = self._began - began

    def _stop(self) -> None:
        profiler, tee, steps = self._profiler, self._tee, self._ended
        self._profiler = self._tee = None
        self._recorder.unwatch_step_ends(self._on_step_end)
        assert tee is not None
        end = time.perf_counter_ns()
        tee.close()
        _open.discard(id(self))
        profiler.__exit__(None, None, None)
        self._cost += time.perf_counter() - end * 1e-9
        self._taken_at = time.monotonic()
        if steps:
            self._reader = threading.Thread(
                target=self._read, args=(profiler, tee, steps, end), name="powertrain-device", daemon=True
            )
            self._reader.start()

    def _give_up(self) -> None:
        self._recorder.unwatch_step_ends(self._on_step_end)
        if self._tee is not None:
            self._tee.close()
        profiler, self._profiler, self._tee = self._profiler, None, None
        _open.discard(id(self))
        if profiler is not None:
            with contextlib.suppress(Exception):
                profiler.__exit__(None, None, None)

    # -- a side thread

    def _read(self, profiler: Any, tee: _PhaseChanges, steps: int, end: int) -> None:
        with contextlib.suppress(Exception):  # torch's internals have moved
            activities = (_activity(event) for event in profiler.kineto_results.events())
            found = summarize(activities, tee.changes(), steps, end + tee.to_unix)
            if found is not None:
                self._results.append(found)


def _activity(event: Any) -> Activity:
    is_on_device = str(event.device_type()).endswith("CUDA")
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
        found = [
            (value + self.to_unix, phase)
            for number, value in zip(self._noted[::2], self._noted[1::2], strict=True)
            if (phase := _PHASE_AFTER.get(number)) is not None and isinstance(value, int)
        ]
        return sorted(found)


#: The phase after each mark, as far as a mark alone tells it.
_PHASE_AFTER = {
    **{phase: phase for phase in range(COUNT)},
    marks.LEARN: FORWARD,
    marks.LOOK: FORWARD,
    marks.LEAVE: INSIDE,
    marks.FETCHED: INSIDE,
    marks.GRADIENTS: COLLECTIVE,
    marks.BEGINS: OPTIMIZER,
    marks.ENDED: OUTSIDE,
}
