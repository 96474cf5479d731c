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

#: No thread's number: a recorder without a recording thread.
NOBODY = -1
#: The return value of :meth:`Recorder.enter` for threads that do not record.
IGNORED = -1
#: With these a step begins, where it is found from the optimizer: what comes around them is inside it.
BEGIN_A_STEP = frozenset({H2D, FORWARD, BACKWARD, COLLECTIVE})
#: The cost of a batch that was only evaluated.
OF_A_BATCH = (INPUT, H2D, FORWARD, COLLECTIVE, INSIDE)
NO_TIMES = (0.0,) * COUNT
NO_MEMORY = (0.0, 0.0)
#: A batch took as long to make as it was waited for, because it was made in the same thread.
MADE_HERE = -1.0
#: Nanoseconds after which steps are made of what was noted, and how much may be noted until then: about 22 steps.
#: More at once cost less, because what makes them has to come into the processor's caches first; but the one step that
#: they are made in is longer by all of it.
SETTLE_EVERY = 100_000_000
SETTLE_AT = 2 * 200
#: What is kept of one step that was put on the device's stream: a loop may end no step, as one that only evaluates.
MOST_MARKS = 10_000

# What is noted is a number and a value, which is the moment unless another is named. The first numbers are those of the
# phases: such a one begins.
#: A model is called, with gradients and without: what :meth:`Recorder.enter` may be given for :data:`FORWARD`.
LEARN, LOOK = COUNT, COUNT + 1
#: The outermost phase is over; or one that lies within others, with (depth, moment).
LEAVE, LEAVE_INNER = COUNT + 2, COUNT + 3
#: Waiting for input is over and a batch has come; or it has come since; with how much is in it where that has changed.
FETCHED, BATCH, AMOUNTS = COUNT + 4, COUNT + 5, COUNT + 6
GRADIENTS, PAGEABLE_COPY = COUNT + 7, COUNT + 8
#: Which optimizer those that follow are about, where it has changed.
WHICH, BEGINS, ENDED = COUNT + 9, COUNT + 10, COUNT + 11
BEGIN_MARKED, END_MARKED, FAILED = COUNT + 12, COUNT + 13, COUNT + 14
REPORTED, FLUSH = COUNT + 15, COUNT + 16
#: What was put on the device's stream; and whether anything is, from here on.
MARKS, TIMING = COUNT + 17, COUNT + 18

#: What a loop may do over and over, with nothing but a moment as its value. What is not is looked at each time.
IN_A_CYCLE = frozenset(range(COUNT)) | {LEARN, LEAVE, FETCHED, GRADIENTS, BEGINS, ENDED}
#: As what the device's work is counted in a phase that is entered.
MARKED_AS = {**{phase: phase for phase in ON_DEVICE}, LEARN: FORWARD, LOOK: FORWARD}
