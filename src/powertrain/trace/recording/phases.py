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
#: In ``report``, in saving state and files.
REPORT = 7
#: Between two steps: logging, evaluation and other work.
OUTSIDE = 8

NAMES = ("input", "h2d", "forward", "backward", "collective", "optimizer", "inside", "report", "outside")
COUNT = len(NAMES)
#: Phases whose work may go on on a device after the call has returned.
ON_DEVICE = (H2D, FORWARD, BACKWARD, COLLECTIVE, OPTIMIZER)
#: What a device's own time is told of: also of what a step does between them, as its loss.
TIMED_PHASES = (*ON_DEVICE, INSIDE)

#: Bits of ``StepRecord.flags``.
#: Device times are in the record; without it they are not known (yet).
TIMED_ON_DEVICE = 1
#: The step was closed by ``trace_step``, not found from optimizer or report.
MARKED = 2
#: The batch came from memory that is not pinned and was copied to a device.
PAGEABLE = 4
#: Its device times are the usual ones of steps around it: not every step is timed on the device.
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

    #: Steps of this rank in its attempt that came before it.
    step: int
    flags: int
    #: When it began (where the step before it ended), Unix seconds.
    start: float
    #: Of the device, in use when the step ended and at most within it; 0 without one.
    memory: float
    peak_memory: float
    #: How long making the step's batches took, wherever that was done; 0 where it cannot be known.
    fetch: float
    #: By phase, on the rank's own thread: they add up to the step.
    phases: tuple[float, ...]
    #: By phase, on the device; zeros without one.
    device: tuple[float, ...]
    #: How much was in its batches, where that is known.
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
