"""GPU times of each phase: CUDA events recorded where phases change, read once they are complete.

When steps are short, only every second, fourth, … step is timed, so that timing costs at most a quarter of a percent;
the records of the steps in between carry the typical times of the timed ones. Nothing here waits for the device: a side
thread polls the events, except while the loop captures a graph. The peak memory counters are read and never reset.
Loading this module does not load torch.
"""

from __future__ import annotations

import math
import statistics
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from powertrain.trace.recording.phases import (
    BACKWARD,
    COLLECTIVE,
    COUNT,
    FIELDS,
    TIMED_ON_DEVICE,
    TIMED_PHASES,
)

#: Maximum number of steps that wait for device times; steps beyond it have none.
_WAITING = 4096
_MIB = 2.0**20
#: Number of timed steps from which the typical times are computed.
_USUAL_OF = 9
#: Maximum share of a step that timing may take.
_COST = 0.001
#: Recording an event costs the device about as much as it costs the thread.
_AND_ON_DEVICE = 2.0
#: Maximum number of steps between two timed steps.
_MOST_BETWEEN = 64


class Mark(NamedTuple):
    """Work on the stream after ``event`` belongs to ``phase``."""

    phase: int
    event: Any


def _offset_of(name: str) -> int:
    """Return the offset of a field within a record."""
    sizes = {"<u4": 4, "<f4": 4, "<f8": 8}
    offset = 0
    for field, kind, *shape in FIELDS:
        if field == name:
            return offset
        offset += sizes[str(kind)] * (shape[0][0] if shape else 1)
    raise KeyError(name)


_MEMORY_AT, _DEVICE_AT, _FLAGS_AT = _offset_of("memory"), _offset_of("device"), _offset_of("flags")
_MEMORY, _TIMES, _FLAGS = struct.Struct("<2f"), struct.Struct(f"<{COUNT}f"), struct.Struct("<I")


class Captures:
    """CUDA graphs that are being captured.

    In torch's capture mode, a device query by any thread, such as whether an event has completed, makes the capture
    fail.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Weak, because a deleted graph is not captured any more, even if its capture was never ended.
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()

    def begins(self, graph: Any) -> None:
        """Register a graph before its capture. Waits for a device query in progress, which takes microseconds."""
        with self._lock:
            self._graphs.add(graph)

    def ended(self, graph: Any) -> None:
        """Unregister a graph after its capture, successful or not."""
        self._graphs.discard(graph)

    def forget(self) -> None:
        """Drop all graphs: the ends of their captures are no longer reported."""
        self._graphs.clear()

    @contextmanager
    def kept_out(self) -> Iterator[bool]:
        """Yield whether the device may be queried within the block; no capture begins meanwhile. Never waits."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            yield not self._graphs
        finally:
            self._lock.release()


#: The captures of this process.
captures = Captures()


class DeviceTimer:
    """Record events on the current stream, and add device times to step records when they are known.

    ``mark`` and ``closed`` are for the recording thread (and autograd's thread, while the recording thread waits for
    it), ``resolve`` for one other thread.
    """

    def __init__(
        self,
        make_event: Callable[[], Any],
        record: Callable[[Any], None],
        is_capturing: Callable[[], bool] = lambda: False,
        memory: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        clock: Callable[[], int] = time.perf_counter_ns,
        captures: Captures = captures,
        index: int | None = None,
    ) -> None:
        """Create a timer. ``make_event`` returns an object with ``query()`` and ``elapsed_time(later)`` in
        milliseconds; ``record`` records it on the current stream; ``memory`` returns the MiB in use and the peak;
        ``clock`` returns nanoseconds; ``index`` is the device's index, if it has one."""
        self.index = index
        self._make_event, self._record, self._is_capturing = make_event, record, is_capturing
        self._memory, self._clock, self._captures = memory, clock, captures
        self._unused: deque[Any] = deque()
        self._waiting: deque[tuple[int, list[Mark]]] = deque()
        self._newest: deque[list[float]] = deque(maxlen=_USUAL_OF)
        #: (MiB in use and peak, seconds by phase), once steps were timed.
        self.usual: tuple[tuple[float, float], tuple[float, ...]] | None = None
        #: Number of calls of :meth:`is_due` per step: several with several optimizers.
        self.calls_of_step = 1
        self._rhythm = Rhythm()
        self._is_timing = True

    def is_due(self, ended: int, now: int) -> bool:
        """Return whether the step that begins at ``now`` (nanoseconds) is timed, after ``ended`` earlier ones.

        Ranks with similar step times get the same result, because ranks are compared step by step.
        """
        self._rhythm.ended(now, self._is_timing)
        calls = self.calls_of_step if self.calls_of_step == 1 else 2 * self.calls_of_step
        self._is_timing = self.usual is None or ended // calls % self._rhythm.every == 0
        return self._is_timing

    def mark(self, phase: int) -> Mark | None:
        """Attribute work on the current stream from now on to ``phase``.

        Returns None while a graph is being captured: the event would become part of the graph and could not be queried.
        """
        began = self._clock()
        if self._is_capturing():
            return None
        try:
            event = self._unused.pop()
        except IndexError:
            event = self._make_event()
        self._record(event)
        self._rhythm.spent += self._clock() - began
        return Mark(phase, event)

    def closed(self, number: int, marks: list[Mark], is_whole: bool = True) -> None:
        """Note that record ``number`` was written; ``marks`` are all or some of the marks of its step."""
        if is_whole and len(marks) > 1 and len(self._waiting) < _WAITING:
            self._waiting.append((number, marks))
        else:
            self._give_back(marks)

    def resolve(self, slot_of: Callable[[int], memoryview | None]) -> int | None:
        """Add times to the records of completed steps; return the number of the first incomplete one, or None.

        While a graph is being captured, no step is known to be complete. ``slot_of`` returns the bytes of a record.
        """
        memory: tuple[float, float] | None = None
        unresolved = None
        while self._waiting:
            number, marks = self._waiting[0]
            if (times := self._times_once_done(marks)) is None:
                unresolved = number
                break
            if memory is None:
                memory = self._memory()
            self._newest.append(times)
            if (slot := slot_of(number)) is not None:
                _write(slot, memory, times)
            self._waiting.popleft()
            self._give_back(marks)
        if memory is not None:
            usual = (statistics.median(of_phase) for of_phase in zip(*self._newest, strict=True))
            self.usual = memory, tuple(usual)
        return unresolved

    def _times_once_done(self, marks: list[Mark]) -> list[float] | None:
        """Return the times; None if the work is not complete, or the device must not be queried now."""
        with self._captures.kept_out() as may_ask:
            return times_on_device(marks) if may_ask and marks[-1].event.query() else None

    def _give_back(self, marks: Sequence[Mark]) -> None:
        self._unused.extend(mark.event for mark in marks)


def _write(slot: memoryview, memory: tuple[float, float], times: list[float]) -> None:
    """Write the times to a record."""
    _MEMORY.pack_into(slot, _MEMORY_AT, *memory)
    _TIMES.pack_into(slot, _DEVICE_AT, *times)
    # Last, so that a concurrent reader does not take half of the times for all.
    _FLAGS.pack_into(slot, _FLAGS_AT, _FLAGS.unpack_from(slot, _FLAGS_AT)[0] | TIMED_ON_DEVICE)


class Rhythm:
    """The interval between timed steps, chosen to bound the cost of timing. Counts in nanoseconds."""

    __slots__ = ("_before", "_cost", "_step", "every", "spent")

    def __init__(self) -> None:
        #: Interval in steps: a power of two, so that ranks with different intervals have many timed steps in common.
        self.every = 1
        #: Time spent recording events since the last step ended.
        self.spent = 0
        self._before = 0
        #: Duration of a step and of timing it, as moving averages; 0 if not known.
        self._step = self._cost = 0.0

    def ended(self, now: int, was_timed: bool) -> None:
        """Note the end of a step or of an optimizer step; both count alike."""
        took, self._before = now - self._before, now
        if took < now:  # not the first step
            # A long step, for example one with an evaluation before it, says little about the others.
            self._step += (min(took, 2 * self._step) - self._step) / 8 if self._step else took
        if not was_timed:
            return
        spent, self.spent = self.spent, 0
        self._cost += (min(spent, 2 * self._cost) - self._cost) / 8 if self._cost else spent
        if self._step:
            allowed = max(self._cost * _AND_ON_DEVICE / (_COST * self._step), 1.0)
            self.every = min(1 << math.ceil(math.log2(allowed)), _MOST_BETWEEN)


def times_on_device(marks: Sequence[Mark]) -> list[float]:
    """Return the seconds by phase between the first and the last mark, for phases with device work."""
    times = [0.0] * COUNT
    for (phase, event), (then, later) in pairwise(marks):
        # The gradients seemed complete, and more followed.
        phase = BACKWARD if phase == then == COLLECTIVE else phase
        if phase in TIMED_PHASES:
            times[phase] += max(event.elapsed_time(later), 0.0) * 1e-3
    return times


def timer() -> DeviceTimer:
    """Return a timer for this process's current GPU, which must be initialized already."""
    import torch

    # Passed by index, because a side thread has its own current device.
    device = torch.cuda.current_device()
    event_class: Any = torch.cuda.Event
    raw_record, current_stream = event_class.__base__.record, torch._C._cuda_getCurrentStream
    streams: dict[Any, Any] = {}

    def record(event: Any) -> None:
        # Equivalent to event.record(), without creating a stream object on each call.
        key = current_stream(device)
        stream = streams.get(key)
        if stream is None:
            stream = streams[key] = torch.cuda.current_stream(device)
        raw_record(event, stream)

    def memory() -> tuple[float, float]:
        return torch.cuda.memory_allocated(device) / _MIB, torch.cuda.max_memory_allocated(device) / _MIB

    is_capturing = torch._C._cuda_isCurrentStreamCapturing
    return DeviceTimer(lambda: event_class(enable_timing=True), record, is_capturing, memory, index=device)
