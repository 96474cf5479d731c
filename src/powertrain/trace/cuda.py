"""What a rank's GPU does in each phase: events put on its stream where phases change, read once they have happened.

Nothing here waits for the device: events are asked whether they have happened, by a side thread. The counters of peak
memory are read and never reset. Loading this module does not load torch.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from powertrain.trace.phases import BACKWARD, COLLECTIVE, COUNT, FIELDS, ON_DEVICE, TIMED_ON_DEVICE

#: Steps that wait for their device at most; those beyond stay without its times.
_WAITING = 4096
_MIB = 2.0**20


class Mark(NamedTuple):
    """From ``event`` on, what the stream does belongs to ``phase``."""

    phase: int
    event: Any


def _offset_of(name: str) -> int:
    """Where a field lies within a record."""
    sizes = {"<u4": 4, "<f4": 4, "<f8": 8}
    offset = 0
    for field, kind, *shape in FIELDS:
        if field == name:
            return offset
        offset += sizes[str(kind)] * (shape[0][0] if shape else 1)
    raise KeyError(name)


_MEMORY_AT, _DEVICE_AT, _FLAGS_AT = _offset_of("memory"), _offset_of("device"), _offset_of("flags")
_MEMORY, _TIMES, _FLAGS = struct.Struct("<2f"), struct.Struct(f"<{COUNT}f"), struct.Struct("<I")


class DeviceTimer:
    """Puts events on the current stream, and adds the device's times to records when they are known.

    ``mark`` and ``closed`` are for the thread that records (and autograd's, while that one waits for it), ``resolve``
    for one other.
    """

    def __init__(
        self,
        make_event: Callable[[], Any],
        record: Callable[[Any], None],
        is_capturing: Callable[[], bool] = lambda: False,
        memory: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
    ) -> None:
        """``make_event`` gives what has ``query()`` and ``elapsed_time(later)`` in milliseconds, ``record`` puts it on
        the current stream; ``memory`` tells the MiB in use and the most there ever were."""
        self._make_event, self._record, self._is_capturing, self._memory = (
            make_event,
            record,
            is_capturing,
            memory,
        )
        self._unused: deque[Any] = deque()
        self._waiting: deque[tuple[int, list[Mark]]] = deque()

    def mark(self, phase: int) -> Mark | None:
        """What is put on the current stream from here on belongs to ``phase``.

        None within a graph that is being captured: an event would be a part of it, and could not be asked anything.
        """
        if self._is_capturing():
            return None
        try:
            event = self._unused.pop()
        except IndexError:
            event = self._make_event()
        self._record(event)
        return Mark(phase, event)

    def closed(self, number: int, marks: list[Mark]) -> None:
        """The record ``number`` was written; ``marks`` were made within its step."""
        if len(marks) > 1 and len(self._waiting) < _WAITING:
            self._waiting.append((number, marks))
        else:
            self._give_back(marks)

    def resolve(self, slot_of: Callable[[int], memoryview | None]) -> int | None:
        """Add times to the records of steps whose work is done; returns the number of the first that is not done, or
        None. ``slot_of`` gives the bytes of a record."""
        memory: tuple[float, float] | None = None
        while self._waiting:
            number, marks = self._waiting[0]
            if not marks[-1].event.query():
                return number
            if memory is None:
                memory = self._memory()
            slot = slot_of(number)
            if slot is not None:
                _MEMORY.pack_into(slot, _MEMORY_AT, *memory)
                _TIMES.pack_into(slot, _DEVICE_AT, *times_on_device(marks))
                # Last, because whoever reads the record meanwhile must not take half of the times for all.
                _FLAGS.pack_into(slot, _FLAGS_AT, _FLAGS.unpack_from(slot, _FLAGS_AT)[0] | TIMED_ON_DEVICE)
            self._waiting.popleft()
            self._give_back(marks)
        return None

    def _give_back(self, marks: Sequence[Mark]) -> None:
        self._unused.extend(mark.event for mark in marks)


def times_on_device(marks: Sequence[Mark]) -> list[float]:
    """Seconds by phase between the first mark and the last, of the phases that a device takes part in."""
    times = [0.0] * COUNT
    for (phase, event), (then, later) in pairwise(marks):
        # Gradients were thought to be complete, and then there were more.
        phase = BACKWARD if phase == then == COLLECTIVE else phase
        if phase in ON_DEVICE:
            times[phase] += max(event.elapsed_time(later), 0.0) * 1e-3
    return times


def timer() -> DeviceTimer:
    """A timer for this process's current GPU, which is in use already."""
    import torch

    # Told by number, because a side thread has a current device of its own.
    device = torch.cuda.current_device()
    event_class: Any = torch.cuda.Event
    raw_record, current_stream = event_class.__base__.record, torch._C._cuda_getCurrentStream
    streams: dict[Any, Any] = {}

    def record(event: Any) -> None:
        # What event.record() does, without making an object for the stream each time.
        key = current_stream(device)
        stream = streams.get(key)
        if stream is None:
            stream = streams[key] = torch.cuda.current_stream(device)
        raw_record(event, stream)

    def memory() -> tuple[float, float]:
        return torch.cuda.memory_allocated(device) / _MIB, torch.cuda.max_memory_allocated(device) / _MIB

    return DeviceTimer(
        lambda: event_class(enable_timing=True), record, torch._C._cuda_isCurrentStreamCapturing, memory
    )
