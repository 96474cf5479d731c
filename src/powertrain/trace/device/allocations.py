"""Where device memory that is kept was allocated: the allocator's history of a few steps, once a leak is suspected.

A leak is suspected when the peak of the memory in use rises again and again. The history costs about a microsecond for
each allocation of these steps. It is not recorded while the user records it, and is the user's once they start to.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.trace.profiling.user_lines import FileJudge

if TYPE_CHECKING:
    from powertrain.trace.recording.recorder import Recorder

_MIB = 2.0**20
#: Peaks, some steps apart, each of which must exceed the one before; and the MiB between first and last.
_RISING, _LEAST_MIB = 4, 16.0
_STEPS_APART = 3
#: Steps before the first peak that counts: the first steps allocate what the others use again.
_STEPS_BEFORE = 10
#: Steps of which allocations are recorded.
_STEPS = 5
_ENTRIES_LIMIT = 60_000
#: Allocations of the window so far from which on it is given up: reading them would stop the loop for seconds.
_MOST_ALLOCATIONS = 20_000
#: Least MiB a step that a line must keep.
_LEAST_MIB_OF_LINE = 0.1
_LINES_LIMIT = 8


#: Windows in which the history is recorded.
_recording: set[KeptAllocations] = set()


def leave_history_to_user() -> None:
    """Give up all windows without ending torch's history: the user starts or ends it."""
    for window in list(_recording):
        window.give_up()


class KeptAllocations:
    """Finds the lines whose allocations outlive their steps. An error here ends that, never a step."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._peaks: deque[float] = deque(maxlen=_RISING + 1)
        self._last_step = 0
        self._is_done = False
        #: When the steps of the window began and ended, in microseconds; what ended the step before it.
        self._ends: list[int] = []
        self._boundary = self._before = 0
        self._lines: list[dict[str, Any]] | None = None
        self._reader: threading.Thread | None = None

    def look(self, peak_mib: float) -> None:
        """Note the peak of the memory in use; begin if it keeps rising. Service thread."""
        step = self._recorder.steps
        if self._is_done or step < _STEPS_BEFORE or step < self._last_step + _STEPS_APART:
            return
        self._last_step = step
        self._peaks.append(peak_mib)
        rises = all(earlier < later for earlier, later in itertools.pairwise(self._peaks))
        if len(self._peaks) > _RISING and rises and self._peaks[-1] - self._peaks[0] >= _LEAST_MIB:
            self._is_done = True
            self._recorder.watch_step_ends(self._on_step_end)

    def news(self) -> list[dict[str, Any]] | None:
        """Return the lines and their MiB a step, once they are known. Service thread."""
        lines, self._lines = self._lines, None
        return lines

    def close(self) -> None:
        """End an open window without a result. Training thread."""
        self._recorder.unwatch_step_ends(self._on_step_end)
        self._stop_recording()
        if self._reader is not None:
            self._reader.join()

    def give_up(self) -> None:
        """Forget an open window; torch's history goes on."""
        _recording.discard(self)
        self._recorder.unwatch_step_ends(self._on_step_end)

    def _on_step_end(self, boundary: int) -> None:
        try:
            if self not in _recording:
                self._start(boundary)
            elif self._allocations() - self._before > _MOST_ALLOCATIONS:
                self._recorder.unwatch_step_ends(self._on_step_end)
                self._stop_recording()
            elif boundary == self._boundary:
                self._ends.append(time.time_ns() // 1000)
                if len(self._ends) > _STEPS:
                    self._finish()
        except Exception:  # torch's, never the loop's
            self._recorder.unwatch_step_ends(self._on_step_end)
            self._stop_recording()

    def _start(self, boundary: int) -> None:
        torch = sys.modules["torch"]
        if torch._C._cuda_isHistoryEnabled() or torch.cuda.is_current_stream_capturing():
            self._recorder.unwatch_step_ends(self._on_step_end)
            return
        torch.cuda.memory._record_memory_history(
            enabled="all", context="alloc", stacks="python", max_entries=_ENTRIES_LIMIT
        )
        _recording.add(self)  # after the call, which would otherwise count as the user's
        self._boundary, self._before = boundary, self._allocations()
        self._ends = [time.time_ns() // 1000]

    def _allocations(self) -> int:
        stats = sys.modules["torch"].cuda.memory_stats(self._recorder.gpu)
        return int(stats.get("allocation.all.allocated", 0))

    def _finish(self) -> None:
        self._recorder.unwatch_step_ends(self._on_step_end)
        snapshot = sys.modules["torch"].cuda.memory._snapshot()
        self._stop_recording()
        self._reader = threading.Thread(
            target=self._read, args=(snapshot,), name="powertrain-memory", daemon=True
        )
        self._reader.start()

    def _stop_recording(self) -> None:
        if self in _recording:
            _recording.discard(self)
            with contextlib.suppress(Exception):
                sys.modules["torch"].cuda.memory._record_memory_history(enabled=None)

    def _read(self, snapshot: Mapping[str, Any]) -> None:
        with contextlib.suppress(Exception):  # torch's internals have moved
            events = snapshot["device_traces"][self._recorder.gpu or 0]
            self._lines = kept_lines(events, self._ends, FileJudge())


def kept_lines(
    events: Iterable[Mapping[str, Any]], ends: Sequence[int], judge: FileJudge
) -> list[dict[str, Any]]:
    """Return the lines of user code of which every step kept memory, the largest first, with MiB of each step.

    ``events`` are those of torch's allocator, in order; ``ends`` are the ends of steps, the first that of the step
    before. The last step does not count: what it allocated may still be in use.
    """
    alive: dict[int, tuple[int, float, str]] = {}
    for event in events:
        if event["action"] == "alloc":
            step = bisect.bisect_right(ends, event["time_us"]) - 1
            if 0 <= step < len(ends) - 2:
                alive[event["addr"]] = (
                    step,
                    float(event["size"]) / _MIB,
                    _line(event.get("frames") or (), judge),
                )
        elif event["action"] in ("free_requested", "free_completed", "free"):
            alive.pop(event["addr"], None)
    kept: dict[str, list[float]] = {}
    for step, mib, line in alive.values():
        kept.setdefault(line, [0.0] * (len(ends) - 2))[step] += mib
    lasting = {line: mibs for line, mibs in kept.items() if line and mibs and min(mibs) >= _LEAST_MIB_OF_LINE}
    found = [
        {"where": line, "mib_per_step": sum(mibs) / len(mibs), "mib": mibs} for line, mibs in lasting.items()
    ]
    return sorted(found, key=lambda one: -one["mib_per_step"])[:_LINES_LIMIT]  # type: ignore[operator]


def _line(frames: Iterable[Mapping[str, Any]], judge: FileJudge) -> str:
    own = (one for one in frames if judge.is_of_user(one["filename"]))
    return next((f"{one['filename']}:{one['line']} in {one['name']}" for one in own), "")
