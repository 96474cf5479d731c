"""Phases of a training loop, and one step as a record.

Every moment of a rank belongs to exactly one phase, so the phases of a step add up to the time from the end of the step
before it to its own end. Pure: numbers, names and the layout of a record; loads neither torch nor numpy.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

#: Waiting for the next batch.
INPUT = 0
#: Copying it to the device.
H2D = 1
FORWARD = 2
BACKWARD = 3
#: Waiting for other ranks where gradients or parameters are exchanged.
COLLECTIVE = 4
OPTIMIZER = 5
#: The rest of a step: loss, metrics, gradient clipping.
INSIDE = 6
#: In ``report``, and in saving state and files.
REPORT = 7
#: Between two steps: logging, evaluation and other work.
OUTSIDE = 8

NAMES = ("input", "h2d", "forward", "backward", "collective", "optimizer", "inside", "report", "outside")
COUNT = len(NAMES)
#: Phases whose work may continue on a device after the call has returned.
ON_DEVICE = (H2D, FORWARD, BACKWARD, COLLECTIVE, OPTIMIZER)
#: Phases with device times: also the rest of a step, such as the loss.
TIMED_PHASES = (*ON_DEVICE, INSIDE)

#: Bits of ``StepRecord.flags``.
#: Device times are in the record; without it they are not known (yet).
TIMED_ON_DEVICE = 1
#: The step was closed by ``trace_step``, not detected from an optimizer or a report.
MARKED = 2
#: The batch came from memory that is not pinned and was copied to a device.
PAGEABLE = 4
#: The device times are the typical ones of neighbouring steps: not every step is timed on the device.
AS_USUAL_ON_DEVICE = 8

_LAYOUT = struct.Struct(f"<IIdfff{COUNT}f{COUNT}fII")
#: Bytes of one record.
RECORD_SIZE = _LAYOUT.size
#: Names and numpy types of a record's fields, in order, for readers of many records at once.
FIELDS: tuple[tuple[str, str] | tuple[str, str, tuple[int]], ...] = (
    ("step", "<u4"),
    ("flags", "<u4"),
    ("start", "<f8"),
    ("memory", "<f4"),
    ("peak_memory", "<f4"),
    ("fetch", "<f4"),
    ("phases", "<f4", (COUNT,)),
    ("device", "<f4", (COUNT,)),
    ("samples", "<u4"),
    ("tokens", "<u4"),
)


class StepRecord(NamedTuple):
    """One step of one rank. Durations are seconds, amounts of memory MiB."""

    #: Index of the step within this rank's attempt.
    step: int
    flags: int
    #: Start time (the end of the previous step), Unix seconds.
    start: float
    #: Device memory in use at the end of the step and its peak within the step; 0 without a device.
    memory: float
    peak_memory: float
    #: Seconds spent making the step's batches, in any process; 0 if not known.
    fetch: float
    #: Seconds by phase on the rank's own thread; they add up to the step.
    phases: tuple[float, ...]
    #: Seconds by phase on the device; zeros without one.
    device: tuple[float, ...]
    #: Amounts in the step's batches, if known.
    samples: int = 0
    tokens: int = 0


def pack_into(buffer: bytearray | memoryview, offset: int, record: StepRecord) -> None:
    """Write a record at ``offset``, in :data:`RECORD_SIZE` bytes."""
    step, flags, start, memory, peak, fetch, phases, device, samples, tokens = record
    _LAYOUT.pack_into(
        buffer, offset, step, flags, start, memory, peak, fetch, *phases, *device, samples, tokens
    )


def unpack_from(buffer: bytes | bytearray | memoryview, offset: int = 0) -> StepRecord:
    values = _LAYOUT.unpack_from(buffer, offset)
    step, flags, start, memory, peak, fetch = values[:6]
    on_thread, on_device = values[6 : 6 + COUNT], values[6 + COUNT : 6 + 2 * COUNT]
    samples, tokens = values[6 + 2 * COUNT :]
    return StepRecord(step, flags, start, memory, peak, fetch, on_thread, on_device, samples, tokens)
