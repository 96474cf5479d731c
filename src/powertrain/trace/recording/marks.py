"""Marks: events of the recorder, as small numbers."""

from __future__ import annotations

from powertrain.trace.recording.phases import (
    BACKWARD,
    COLLECTIVE,
    COUNT,
    FORWARD,
    H2D,
    INPUT,
    INSIDE,
    ON_DEVICE,
)

#: Thread id of a recorder without a recording thread.
NOBODY = -1
#: The return value of :meth:`Recorder.enter` for threads that do not record.
IGNORED = -1
#: Phases that begin a detected step: time between them belongs to the step.
BEGIN_A_STEP = frozenset({H2D, FORWARD, BACKWARD, COLLECTIVE})
#: Phases of a batch that was only evaluated.
OF_A_BATCH = (INPUT, H2D, FORWARD, COLLECTIVE, INSIDE)
NO_TIMES = (0.0,) * COUNT
NO_MEMORY = (0.0, 0.0)
#: Fetch time of a batch that was made in the recording thread: equal to the time waited for it.
MADE_HERE = -1.0
#: Maximum age in nanoseconds and maximum number of marks before they are turned into steps: about 22 steps. A larger
#: number costs less per step, because the code has to be loaded into the processor's caches each time, but it lengthens
#: the one step in which they are processed.
MARKS_INTERVAL_NS = 100_000_000
MOST_MARKS = 2 * 200
#: Maximum number of stream marks kept for one step: a loop may end no step, for example one that only evaluates.
MOST_STREAM_MARKS = 10_000

# A mark is a number and a value; the value is the time unless stated otherwise. The first numbers are those of the
# phases, and mark their beginning.
#: A call of a model, with and without gradients: accepted by :meth:`Recorder.enter` in place of :data:`FORWARD`.
LEARN, LOOK = COUNT, COUNT + 1
#: End of the outermost phase; or of a nested one, with (depth, time).
LEAVE, LEAVE_INNER = COUNT + 2, COUNT + 3
#: A batch was fetched, with or without the end of the input phase; and the batch's amounts if they changed.
FETCHED, BATCH, AMOUNTS = COUNT + 4, COUNT + 5, COUNT + 6
GRADIENTS, PAGEABLE_COPY = COUNT + 7, COUNT + 8
#: The optimizer of the following marks, if it changed.
WHICH, BEGINS, ENDED = COUNT + 9, COUNT + 10, COUNT + 11
BEGIN_MARKED, END_MARKED, FAILED = COUNT + 12, COUNT + 13, COUNT + 14
REPORTED, FLUSH = COUNT + 15, COUNT + 16
#: Marks recorded on the device's stream; and whether recording them is on from here.
MARKS, TIMING = COUNT + 17, COUNT + 18

#: Marks that may occur in a cycle, with only a time as their value. All others are handled one by one.
IN_A_CYCLE = frozenset(range(COUNT)) | {LEARN, LEAVE, FETCHED, GRADIENTS, BEGINS, ENDED}
#: The phase that device work is attributed to, by the phase entered.
MARKED_AS = {**{phase: phase for phase in ON_DEVICE}, LEARN: FORWARD, LOOK: FORWARD}
