"""Where a rank's time goes, recorded as it passes: switches between phases, steps, and the ring they are kept in.

One thread records, the one that runs the user's function; whatever calls come from others are ignored. A step is
closed by ``trace_step``, or found: it ends with its last optimizer step, and which one was the last is known when the
next batch is asked for or an optimizer of it steps again. So what was summed up at an optimizer's end is set aside, and
either becomes the record of a step or is added to what came after it. A loop without optimizers has a step for each
report.

Loads neither torch nor numpy.
"""

from __future__ import annotations

import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from powertrain.trace.recording.phases import (
    AS_USUAL_ON_DEVICE,
    BACKWARD,
    COLLECTIVE,
    COUNT,
    FORWARD,
    H2D,
    INPUT,
    INSIDE,
    MARKED,
    ON_DEVICE,
    OPTIMIZER,
    OUTSIDE,
    PAGEABLE,
    RECORD_SIZE,
    REPORT,
    TIMED_ON_DEVICE,
    StepRecord,
    pack_into,
)

if TYPE_CHECKING:
    from powertrain.trace.recording.cuda import DeviceTimer, Mark

#: Where records are kept: memory, or a mapped file that outlives the process.
Buffer = Union[bytearray, mmap, memoryview]

# --------------------------------------------------------------------------- the ring

_MAGIC = b"PTSTEPS1"
_HEADER = struct.Struct("<8sIIQ")
HEADER_SIZE = _HEADER.size
_COUNT_AT = 16
#: Steps that a ring holds unless somebody says otherwise: 1.6 MB, and more than a side thread may fall behind.
RECORDS = 16_384


def ring_size(records: int = RECORDS) -> int:
    """Bytes of a buffer for the newest ``records`` steps."""
    return HEADER_SIZE + records * RECORD_SIZE


def read_ring(buffer: Buffer | bytes, after: int = 0) -> tuple[int, bytes]:
    """The records from number ``after`` on that are whole: the number of the first, and their bytes.

    The first is later than ``after`` where older ones were written over. May be called at any moment, in any process
    and after the writer was killed: the count is written after its record, and the one slot that may be half written is
    left out. Raises ``ValueError`` for a buffer that is no ring.
    """
    view = memoryview(buffer)
    magic, size, capacity, _ = _HEADER.unpack_from(view)
    if magic != _MAGIC or size != RECORD_SIZE or len(view) < ring_size(capacity) or capacity < 2:
        raise ValueError(
            f"These {len(view)} bytes are no ring of steps with records of {RECORD_SIZE} bytes: they begin with "
            f"{magic!r} and speak of {capacity} records of {size} bytes. They were written by another version, or "
            "are something else."
        )
    count = view[_COUNT_AT:HEADER_SIZE].cast("Q")
    written = count[0]
    first = max(after, written - capacity + 1, 0)
    records = b"".join(_slots(view, capacity, first, written))
    # While they were copied, the writer may have come round to the oldest of them.
    whole_from = max(first, count[0] - capacity + 1)
    return min(whole_from, max(first, written)), records[(whole_from - first) * RECORD_SIZE :]


def _slots(view: memoryview, capacity: int, first: int, end: int) -> Iterator[bytes]:
    """The bytes of records ``first`` to ``end``, in at most two pieces."""
    while first < end:
        slot = first % capacity
        length = min(end - first, capacity - slot)
        begin = HEADER_SIZE + slot * RECORD_SIZE
        yield bytes(view[begin : begin + length * RECORD_SIZE])
        first += length


class _Ring:
    """The writer's side. One thread writes."""

    __slots__ = ("_count", "buffer", "capacity", "written")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = memoryview(buffer)
        self.capacity = (len(self.buffer) - HEADER_SIZE) // RECORD_SIZE
        if self.capacity < 2:
            raise ValueError(
                f"A ring of {len(self.buffer)} bytes cannot hold two steps, which take {ring_size(2)}. Make the "
                "buffer with ring_size(records)."
            )
        self.written = 0
        _HEADER.pack_into(self.buffer, 0, _MAGIC, RECORD_SIZE, self.capacity, 0)
        # Through a cast view eight bytes are stored at once, which struct does byte by byte: a reader in another
        # process must not see half of a number.
        self._count = self.buffer[_COUNT_AT:HEADER_SIZE].cast("Q")

    def append(self, record: StepRecord) -> None:
        pack_into(self.buffer, HEADER_SIZE + (self.written % self.capacity) * RECORD_SIZE, record)
        self.written += 1
        self._count[0] = self.written

    def slot(self, number: int) -> memoryview | None:
        """The bytes of a record that will not be written over soon; None for any other."""
        if not self.written - self.capacity // 2 <= number < self.written:
            return None
        begin = HEADER_SIZE + (number % self.capacity) * RECORD_SIZE
        return self.buffer[begin : begin + RECORD_SIZE]


# --------------------------------------------------------------------------- one step, being made

#: No thread's number: a recorder that nobody records with.
NOBODY = -1
#: What :meth:`Recorder.enter` gives to threads that do not record.
IGNORED = -1
#: With these a step begins, where it is found from the optimizer: what comes around them is inside it.
_BEGIN_A_STEP = frozenset({H2D, FORWARD, BACKWARD, COLLECTIVE})
#: What a batch costs that was only looked at, in an evaluation.
_OF_A_BATCH = (INPUT, H2D, FORWARD, COLLECTIVE, INSIDE)
_NO_TIMES = (0.0,) * COUNT
_NO_MEMORY = (0.0, 0.0)
#: A batch took as long to make as it was waited for, because it was made in the same thread.
MADE_HERE = -1.0
#: Nanoseconds after which steps are made of what was noted, and how much may be noted until then: about 22 steps.
#: More at once cost less, because what makes them has to come into the processor's caches first; but the one step that
#: they are made in is longer by all of it.
_SETTLE_EVERY = 100_000_000
SETTLE_AT = 2 * 200
#: What is kept of one step that was put on the device's stream: a loop may end no step, as one that only evaluates.
_MOST_MARKS = 10_000

# What is noted is a number and a value, which is the moment unless another is named. The first numbers are those of the
# phases: such a one begins.
#: A model is called, with gradients and without: what :meth:`Recorder.enter` may be given for :data:`FORWARD`.
LEARN, LOOK = COUNT, COUNT + 1
#: The outermost phase is over; or one that lies within others, with (depth, moment).
LEAVE, _LEAVE_INNER = COUNT + 2, COUNT + 3
#: Waiting for input is over and a batch has come; or it has come since; with how much is in it where that has changed.
FETCHED, _BATCH, _AMOUNTS = COUNT + 4, COUNT + 5, COUNT + 6
_GRADIENTS, _PAGEABLE = COUNT + 7, COUNT + 8
#: Which optimizer those that follow are about, where it has changed.
_WHICH, BEGINS, ENDED = COUNT + 9, COUNT + 10, COUNT + 11
_BEGIN_MARKED, _END_MARKED, _FAILED = COUNT + 12, COUNT + 13, COUNT + 14
_REPORT, _FLUSH = COUNT + 15, COUNT + 16
#: What was put on the device's stream; and whether anything is, from here on.
_MARKS, _TIMING = COUNT + 17, COUNT + 18


#: What a loop may do over and over, with nothing but a moment as its value. What is not is looked at each time.
_IN_A_CYCLE = frozenset(range(COUNT)) | {LEARN, LEAVE, FETCHED, _GRADIENTS, BEGINS, ENDED}
#: As what the device's work is counted in a phase that is entered.
_MARKED_AS = {**{phase: phase for phase in ON_DEVICE}, LEARN: FORWARD, LOOK: FORWARD}


class _Tally:
    """What was summed up since the last step ended, or since the last optimizer step."""

    __slots__ = ("fetch", "flags", "is_timed", "marks", "samples", "sums", "tokens")

    def __init__(self, is_timed: bool) -> None:
        #: Nanoseconds by phase.
        self.sums = [0] * COUNT
        self.samples = self.tokens = self.flags = 0
        self.fetch = 0.0
        #: What was put on the device's stream: see :mod:`powertrain.trace.recording.cuda`.
        self.marks: list[Mark] = []
        #: Whether all of it was put there.
        self.is_timed = is_timed

    def add_before(self, earlier: _Tally) -> None:
        """Take up what was summed up earlier."""
        self.sums = [ours + theirs for ours, theirs in zip(self.sums, earlier.sums, strict=True)]
        self.samples += earlier.samples
        self.tokens += earlier.tokens
        self.flags |= earlier.flags
        self.fetch += earlier.fetch
        self.marks[:0] = earlier.marks
        self.is_timed &= earlier.is_timed


class _Cycle(NamedTuple):
    """What is noted from one batch to the next in a loop that does the same over and over; and as what the time before
    each of it counts."""

    numbers: list[int]
    phases: list[int]


class _Attempt:
    """A cycle that may be one: what was noted since a batch was asked for, where that began."""

    __slots__ = ("cycle", "state")

    def __init__(self, state: tuple[Any, ...]) -> None:
        self.state = state
        self.cycle = _Cycle([], [])


class _Steps:
    """Makes steps of what was noted.

    Mostly that is the same from step to step. So it is compared with what came before as a whole, and then only the
    times are summed up; see :meth:`_repeat`.
    """

    def __init__(self, ring: _Ring, began: int, zero: float) -> None:
        self._ring = ring
        self.device: DeviceTimer | None = None
        self._since = self._began = began
        #: Unix seconds when the clock showed 0.
        self._zero = zero
        self._phase = self._rest = OUTSIDE
        #: What each open phase goes back to when it is left; and where in it each began that was entered. The others
        #: are optimizers'.
        self._stack: list[int] = []
        self._entered: list[int] = []
        #: What was summed up at the end of an optimizer step that may be the last of its step, and when that was.
        self._ended: _Tally | None = None
        self._ended_at = 0
        #: Optimizers that have stepped in this step, and those within a step, with the depth they began at.
        self._stepped: set[int] = set()
        self._open_optimizers: dict[int, int] = {}
        #: Whether any phase was entered since the newest of them began, and how many steps within its own it has begun.
        self._has_entered, self._inner_steps = False, 0
        #: Whether the loop marks its steps, and how deep in marked steps it is.
        self._marked, self._within = False, 0
        #: What was summed up when the newest batch was asked for; whether it was given to a model without gradients,
        #: and whether anything was learned from it. And whether anything ever was.
        self._asked_at: tuple[list[int], int, int, float] | None = None
        self._looks = self._learns = self._has_learned = False
        #: Whether an optimizer ever stepped: then that ends steps, and reports do not.
        self._has_stepped = False
        #: When the newest batch was asked for and when it came.
        self._input_began = self._input_ended = 0
        #: How much is in a batch, and which optimizer it is about, as was said last.
        self._amounts = (0, 0, 0.0)
        self._which = 0
        #: Whether what is put on the device's stream is noted, and how many optimizer steps this step has had.
        self._is_timing, self._optimizer_steps = True, 0
        #: What the loop does over and over, whether it has just done it, and what may become that.
        self._cycle: _Cycle | None = None
        self._may_repeat = False
        self._attempt: _Attempt | None = None
        self._renew()
        self._handlers = self._handlers_by_number()

    def begun_anew(self, now: int, depth: int, within: int, is_timing: bool) -> _Steps:
        """Goes on from here where making steps was broken off: ``depth`` phases are open, which is all that is known of
        them, and ``within`` marked steps. What was summed up and not yet made a step is left out."""
        anew = _Steps(self._ring, now, self._zero)
        anew.device, anew._is_timing, anew._tally.is_timed = self.device, is_timing, False
        anew._has_learned, anew._has_stepped = self._has_learned, self._has_stepped
        anew._marked, anew._within = self._marked or within > 0, within
        anew._phase = anew._rest = INSIDE if within else OUTSIDE
        anew._stack, anew._entered = [anew._rest] * depth, list(range(depth))
        return anew

    def take(self, noted: list[Any]) -> None:
        """Make steps of numbers and values, one after the other."""
        numbers, values, handlers = noted[::2], noted[1::2], self._handlers
        at, end = 0, len(numbers)
        while at < end:
            number = numbers[at]
            if number == INPUT and self._may_repeat and (cycle := self._cycle) is not None:
                after = at + len(cycle.numbers)
                if numbers[at:after] == cycle.numbers:
                    self._repeat(cycle, values[at:after])
                    at = after
                    continue
            self._learn_before(number)
            handlers[number](number, values[at])
            self._learn_after(number)
            at += 1

    # -- what is done over and over

    def _learn_before(self, number: int) -> None:
        self._may_repeat = False
        if number == INPUT and not self._entered:
            self._attempt = _Attempt(self._state())
        if (attempt := self._attempt) is not None:
            # Waiting for gradients counts the time before it as backward, if it counts it at all.
            phase = BACKWARD if number == _GRADIENTS and self._phase == COLLECTIVE else self._phase
            attempt.cycle.numbers.append(number)
            attempt.cycle.phases.append(phase)
            if number not in _IN_A_CYCLE or len(attempt.cycle.numbers) > SETTLE_AT:
                self._attempt = None

    def _learn_after(self, number: int) -> None:
        if number == ENDED and (attempt := self._attempt) is not None:
            self._attempt = None
            is_one = attempt.state[0] and attempt.state == self._state()
            if is_one and attempt.cycle.numbers.count(FETCHED) == 1 and attempt.cycle.numbers[1] == FETCHED:
                self._cycle, self._may_repeat = attempt.cycle, True

    def _state(self) -> tuple[Any, ...]:
        """Whatever decides what is made of what is noted next: first, whether a step has just ended, which will be
        closed when a batch is asked for. A cycle is what leaves all of it as it was."""
        return (
            self._ended is not None and not any(self._sums),
            (self._phase, self._rest, tuple(self._stack), tuple(self._entered)),
            (
                frozenset(self._stepped),
                tuple(self._open_optimizers.items()),
                self._which,
                self._optimizer_steps,
            ),
            (self._has_entered, self._inner_steps, self._marked, self._within),
            (self._looks, self._learns, self._has_learned, self._is_timing, self._amounts),
        )

    def _repeat(self, cycle: _Cycle, moments: list[int]) -> None:
        """As if each of it had been taken. Before and after: the state of the cycle."""
        self._close_ended()
        self._input_began, self._input_ended = moments[0], moments[1]
        tally = _Tally(self._is_timing)
        sums, before = tally.sums, self._since
        for phase, moment in zip(cycle.phases, moments, strict=True):
            sums[phase] += moment - before
            before = moment
        self._fill(tally)
        self._ended, self._ended_at, self._since = tally, before, before

    # -- one by one

    def _handlers_by_number(self) -> tuple[Callable[[int, Any], None], ...]:
        """A call for each number that is noted, which takes it and its value."""
        by_number: dict[int, Callable[[int, Any], None]] = {
            **dict.fromkeys(range(COUNT), self.enter),
            LEARN: self.learn,
            LOOK: self.look,
            LEAVE: self.leave,
            _LEAVE_INNER: self.leave_inner,
            FETCHED: self.fetched,
            _BATCH: self.batch,
            _AMOUNTS: self.amounts,
            _GRADIENTS: self.wait_for_gradients,
            _PAGEABLE: self.copy_pageable,
            _WHICH: self.which_optimizer,
            BEGINS: self.optimizer_begins,
            ENDED: self.optimizer_ended,
            _BEGIN_MARKED: self.begin_marked,
            _END_MARKED: self.end_marked,
            _FAILED: self.end_marked,
            _REPORT: self.report,
            _FLUSH: self.flush,
            _MARKS: self.take_marks,
            _TIMING: self.timing,
        }
        return tuple(by_number[number] for number in sorted(by_number))

    def _renew(self) -> None:
        """Begin to sum up anew."""
        self._tally = _Tally(self._is_timing)
        self._sums = self._tally.sums
        self._asked_at = None

    def _charge(self, now: int) -> None:
        """Add the time since the last switch to the phase that it belongs to."""
        self._sums[self._phase] += now - self._since
        self._since = now

    # -- phases

    def enter(self, phase: int, now: int) -> None:
        self._has_entered = True
        self._sums[self._phase] += now - self._since
        self._since = now
        stack = self._stack
        if phase == INPUT and stack and self._open_optimizers:
            self._give_up_optimizers()
        self._entered.append(len(stack))
        if stack:
            stack.append(self._phase)
            self._phase = phase
        else:
            self._phase = self._begin(phase, now)
            stack.append(self._rest)

    def leave(self, _: int, now: int) -> None:
        phase, stack, entered = self._phase, self._stack, self._entered
        self._sums[phase] += now - self._since
        self._since = now
        if phase == INPUT:
            self._input_ended = now
        if not entered:  # it was noted, and before it was counted a signal's handler has left it with its own
            return
        if stack and not entered[0] and not self._open_optimizers:  # which is nearly always so
            self._phase = stack[0]
            stack.clear()
        else:
            self._back_to(entered[0])
        entered.clear()

    def leave_inner(self, _: int, which: tuple[int, int]) -> None:
        depth, now = which
        self._charge(now)
        if depth < len(self._entered):
            self._back_to(self._entered[depth])
            del self._entered[depth:]

    def _back_to(self, place: int) -> None:
        """What began at this place of the stack is over, and what began within it."""
        if place < len(self._stack):
            self._phase = self._stack[place]
            del self._stack[place:]
        if self._open_optimizers:  # of which those within raised
            self._open_optimizers = {key: at for key, at in self._open_optimizers.items() if at < place}

    def _begin(self, phase: int, now: int) -> int:
        """A phase begins that lies within no other; returns what its time counts as."""
        if phase == INPUT:
            self._input_began = now
            self._ask_for_batch()
        elif phase == BACKWARD:
            self._learns = self._has_learned = True
        if phase in (REPORT, INPUT):
            return phase
        if self._marked:
            return phase if self._within else OUTSIDE
        if phase in _BEGIN_A_STEP:
            self._rest = INSIDE
        return phase

    def look(self, _: int, now: int) -> None:
        """A model is called without gradients."""
        self._looks = True
        self.enter(FORWARD, now)

    def learn(self, _: int, now: int) -> None:
        """A model is called so that something can be learned: with gradients."""
        self._learns = True
        self.enter(FORWARD, now)

    def wait_for_gradients(self, _: int, now: int) -> None:
        if self._phase == BACKWARD or self._phase == COLLECTIVE:
            self._sums[BACKWARD] += now - self._since
            self._since, self._phase = now, COLLECTIVE

    # -- the device

    def take_marks(self, _: int, marks: list[Mark]) -> None:
        tally = self._tally
        tally.marks += marks
        if len(tally.marks) > _MOST_MARKS and self.device is not None:
            self.device.closed(self._ring.written, tally.marks, is_whole=False)
            tally.marks, tally.is_timed = [], False

    def timing(self, _: int, is_on: bool) -> None:
        """Comes right after what begins to sum up anew."""
        self._is_timing = self._tally.is_timed = is_on

    # -- batches

    def _ask_for_batch(self) -> None:
        """Closes the step before it, and says what the batch before it was for."""
        if self._looks and not self._learns and self._has_learned and not self._within:
            self._count_as_outside()
        self._looks = self._learns = False
        self._close_found()
        tally = self._tally
        self._asked_at = tally.sums.copy(), tally.samples, tally.tokens, tally.fetch

    def _count_as_outside(self) -> None:
        """The newest batch was for an evaluation, so what it took lies between two steps."""
        if self._asked_at is None:
            return
        tally, sums = self._tally, self._sums
        before, tally.samples, tally.tokens, tally.fetch = self._asked_at
        for phase in _OF_A_BATCH:
            sums[OUTSIDE] += sums[phase] - before[phase]
            sums[phase] = before[phase]

    def amounts(self, _: int, amounts: tuple[int, int, float]) -> None:
        self._amounts = amounts

    def fetched(self, _: int, now: int) -> None:
        self.leave(_, now)
        self.batch(_, now)

    def _fill(self, tally: _Tally) -> None:
        """The newest batch is one of the step's."""
        samples, tokens, fetch = self._amounts
        tally.samples += samples
        tally.tokens += tokens
        tally.fetch += (self._input_ended - self._input_began) * 1e-9 if fetch == MADE_HERE else fetch

    def batch(self, _: int, now: int) -> None:
        self._fill(self._tally)
        if not self._marked and not self._stack:
            self._phase = self._rest = INSIDE

    def copy_pageable(self, _: int, now: int) -> None:
        self._tally.flags |= PAGEABLE

    # -- steps

    def _rest_is(self, rest: int) -> None:
        """From the last switch on, what belongs to no phase counts as ``rest``."""
        self._rest = rest
        if self._stack:
            self._stack[0] = rest
        else:
            self._phase = rest

    def which_optimizer(self, _: int, key: int) -> None:
        self._which = key

    def optimizer_begins(self, _: int, now: int) -> None:
        self._charge(now)
        key = self._which
        if key in self._open_optimizers:
            if not self._has_entered:
                self._inner_steps += 1  # a step of a subclass, which calls that of its base
                return
            self._back_to(self._open_optimizers[key])  # it raised, and what it began was never ended
        self._has_entered, self._inner_steps = False, 0
        if key in self._stepped:
            self._close_found()
        self._open_optimizers[key] = len(self._stack)
        # Around it is what there was, or the rest of the step.
        self._stack.append(self._phase if self._stack else self._rest)
        self._phase = OPTIMIZER if len(self._stack) > 1 else self._begin(OPTIMIZER, now)

    def optimizer_ended(self, _: int, now: int) -> None:
        self._charge(now)
        if self._inner_steps:
            self._inner_steps -= 1
            return
        key = self._which
        place = self._open_optimizers.pop(key, None)
        if place is not None and place < len(self._stack):
            self._back_to(place)
        self._learns = self._has_learned = self._has_stepped = True
        if self._marked:
            return
        self._rest_is(OUTSIDE)
        self._stepped.add(key)
        self._optimizer_steps += 1
        if self._ended is not None:
            self._tally.add_before(self._ended)
        self._ended, self._ended_at = self._tally, now
        self._renew()

    def _give_up_optimizers(self) -> None:
        """Those that began and never ended have raised."""
        self._back_to(min(self._open_optimizers.values()))

    def begin_marked(self, _: int, now: int) -> None:
        self._within += 1
        if self._within == 1:
            self._close_found()
            self._marked = True
            self._charge(now)
            self._rest_is(INSIDE)

    def end_marked(self, number: int, now: int) -> None:
        self._within = max(self._within - 1, 0)
        if self._within or not self._marked:
            return
        self._charge(now)
        if self._open_optimizers:
            self._give_up_optimizers()
        self._rest_is(OUTSIDE)
        if number != _FAILED:
            self._learns = self._has_learned = True
            self._close(self._tally, now, MARKED)
            self._renew()

    def report(self, _: int, now: int) -> None:
        if self._marked or self._has_stepped:
            return
        self._charge(now)
        self._rest_is(OUTSIDE)
        # Nobody says what is a step in such a loop, so nothing lies between two of them.
        self._sums[INSIDE] += self._sums[OUTSIDE]
        self._sums[OUTSIDE] = 0
        self._close(self._tally, now, 0)
        self._renew()

    def flush(self, _: int, now: int) -> None:
        self._close_found()

    def phase_after(self, log: list[Any]) -> int:
        """What time belongs to once everything in ``log`` has been made steps of; changes nothing. Any thread."""
        opened, rest, optimizes = [self._phase] * len(self._entered), self._rest, bool(self._open_optimizers)
        for number, value in zip(log[::2], log[1::2], strict=True):
            if number < COUNT:
                opened.append(number)
                rest = INSIDE if number in _BEGIN_A_STEP else rest
            elif number in (LEARN, LOOK):
                opened.append(FORWARD)
                rest = INSIDE
            elif number == _LEAVE_INNER:
                del opened[value[0] :]
            elif number in (LEAVE, FETCHED):
                opened.clear()
                rest = INSIDE if number == FETCHED else rest
            elif number in (_BATCH, _BEGIN_MARKED):
                rest = INSIDE
            elif number == BEGINS:
                optimizes = True
            elif number in (ENDED, _END_MARKED, _FAILED):
                optimizes, rest = False, OUTSIDE
            elif number == _GRADIENTS and opened:
                opened[-1] = COLLECTIVE
        return opened[-1] if opened else OPTIMIZER if optimizes else rest

    def _close_found(self) -> None:
        """The step that ended with the newest optimizer step is whole."""
        if self._ended is not None:
            self._close_ended()
            self._optimizer_steps = 0
            self._ended = None
            self._stepped.clear()

    def _close_ended(self) -> None:
        assert self._ended is not None
        if self.device is not None:
            self.device.calls_of_step = self._optimizer_steps
        self._close(self._ended, self._ended_at, 0)

    def _close(self, tally: _Tally, ended_at: int, flags: int) -> None:
        number, device = self._ring.written, self.device
        start, self._began = self._zero + self._began * 1e-9, ended_at
        times = tuple([nanoseconds * 1e-9 for nanoseconds in tally.sums])
        flags |= tally.flags
        memory, on_device = _NO_MEMORY, _NO_TIMES
        if device is not None and not tally.is_timed and device.usual is not None:
            memory, on_device = device.usual
            flags |= TIMED_ON_DEVICE | AS_USUAL_ON_DEVICE
        record = StepRecord(
            number, flags, start, *memory, tally.fetch, times, on_device, tally.samples, tally.tokens
        )
        self._ring.append(record)
        if device is not None:
            device.closed(number, tally.marks, tally.is_timed)


class Recorder:
    """Notes what a loop does, at the price of reading a clock, and makes steps of it every few steps.

    What code costs that runs once in a millisecond is mostly finding its way back into the processor's caches; so it is
    short here, and the rest is done for many steps at once. A process that is killed loses what it has noted since
    then: at most some 22 steps, or a tenth of a second where steps are longer.

    Everything but :meth:`drain` and :attr:`steps` is for the thread that made it (or ``thread``); calls from any other
    do nothing.
    """

    __slots__ = (
        "__weakref__",
        "_ended",
        "_is_marked",
        "_is_optimizing",
        "_marks",
        "_marks_steps",
        "_ring",
        "_steps",
        "_within",
        "amounts",
        "clock",
        "depth",
        "device",
        "due",
        "is_scaling",
        "log",
        "note",
        "thread",
        "timing",
        "trouble",
        "which",
    )

    def __init__(
        self,
        buffer: Buffer | None = None,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
        now: Callable[[], float] = time.time,
        thread: int | None = None,
    ) -> None:
        """``buffer`` has :func:`ring_size` bytes, of any content; ``clock`` gives nanoseconds, ``now`` Unix seconds."""
        self._ring = _Ring(bytearray(ring_size()) if buffer is None else buffer)
        self.clock = clock
        #: What went wrong here, where something did: nothing is recorded from then on.
        self.trouble = ""
        #: Identifies the thread that records; 0 for none, as in a forked child.
        self.thread = get_ident() if thread is None else thread
        #: Within the step of a gradient scaler, which may or may not call the optimizer's.
        self.is_scaling = False
        began = clock()
        self._steps = _Steps(self._ring, began, now() - began * 1e-9)
        #: What was noted: a number, its value, and so on. Both at once, because a signal's handler may note something.
        self.log: list[Any] = []
        self.note = self.log.extend
        self.due = began + _SETTLE_EVERY
        self.depth = self._within = 0
        #: What was said last of batches and of the optimizer.
        self.amounts = (0, 0, 0.0)
        self.which = 0
        #: Once the device is timed at all, its timer; and the same where this step's work on it is.
        self.device: DeviceTimer | None = None
        self.timing: DeviceTimer | None = None
        #: What was put on its stream and is not noted yet, and whether the open phase was.
        self._marks: list[Mark] = []
        self._is_marked = False
        #: Within an optimizer's step, where the device is timed.
        self._is_optimizing = False
        #: Whether the loop marks its steps, and how many steps or optimizer steps have ended.
        self._marks_steps, self._ended = False, 0
        _recorders.add(self)

    # -- phases

    def enter(self, phase: int) -> int:
        """From here on time belongs to ``phase``; the answer, which is how many phases it lies within, is for
        :meth:`leave`. :data:`IGNORED` for a thread that does not record."""
        if get_ident() != self.thread:
            return IGNORED
        depth = self.depth
        if depth and len(self.log) > SETTLE_AT:
            self.settle()
        # Noted first: an exception of the user's may come in between, and what is noted and never left is left with
        # the next one. What is counted and never left would stay.
        self.note((phase, self.clock()))
        self.depth = depth + 1
        if self.timing is not None and not depth and phase in _MARKED_AS:
            self._is_marked = True
            try:
                self._mark(_MARKED_AS[phase])
            except BaseException:  # of the user's, by a signal: nobody will leave what was not entered
                self.leave(depth)
                raise
        return depth

    def leave(self, depth: int) -> None:
        """Time belongs to what it belonged to before the :meth:`enter` that gave ``depth``, and so do phases within it
        that were never left."""
        if depth or not self.depth:
            if 0 < depth < self.depth:
                self.depth = depth
                now = self.clock()
                self.note((_LEAVE_INNER, (depth, now)))
                if now >= self.due or len(self.log) > SETTLE_AT:
                    self.settle()
            return
        self.depth = 0
        now = self.clock()
        self.note((LEAVE, now))
        if self._is_marked:
            self._is_marked = False
            # Back to a closure's optimizer, or to the rest of the step: the loss is computed there.
            self._mark(OPTIMIZER if self._is_optimizing else INSIDE)
        if now >= self.due or len(self.log) > SETTLE_AT:
            self.settle()

    def enter_forward(self, with_gradients: bool) -> int:
        """As ``enter(FORWARD)``; says whether anything can be learned from it."""
        return self.enter(LEARN if with_gradients else LOOK)

    @contextmanager
    def phase(self, phase: int) -> Iterator[None]:
        """Everything within belongs to ``phase``. Slower than :meth:`enter` and :meth:`leave`."""
        depth = self.enter(phase)
        try:
            yield
        finally:
            self.leave(depth)

    def gradients_are_there(self, *_: object) -> None:
        """In a backward pass the last gradients were computed: from here on it waits for the other ranks.

        When it is called again in the same pass, there was more to compute until then. With gradients on a device it is
        called in a thread of torch's, while the thread that records waits for it: then only the device's time is split.
        """
        if get_ident() == self.thread:
            self.note((_GRADIENTS, self.clock()))
            self._settle_if_long()
        timing = self.timing
        if timing is not None and (mark := timing.mark(COLLECTIVE)) is not None:
            self._marks.append(mark)

    def _mark(self, phase: int) -> None:
        """From here on what is put on the device's stream belongs to ``phase``."""
        if self.timing is not None and (mark := self.timing.mark(phase)) is not None:
            self._marks.append(mark)
            self.note((_MARKS, self._marks))
            self._marks = []

    # -- batches

    def fetched(self, depth: int, samples: int = 0, tokens: int = 0, fetch: float = 0.0) -> None:
        """As :meth:`leave` of the phase :data:`INPUT`, which is left with a batch: :meth:`batch` says what the others
        are."""
        if depth or self.depth != 1:
            self.leave(depth)
            if not depth:
                self.batch(samples, tokens, fetch)
            return
        self.tell_amounts((samples, tokens, fetch))
        self.depth = 0
        now = self.clock()
        self.note((FETCHED, now))
        if now >= self.due or len(self.log) > SETTLE_AT:
            self.settle()

    def batch(self, samples: int = 0, tokens: int = 0, fetch: float = 0.0) -> None:
        """A batch was given to the loop: how much is in it, and for how many seconds it was made; 0 where that is not
        known, :data:`MADE_HERE` for as long as it was waited for. Called when the phase :data:`INPUT` has been left."""
        if get_ident() == self.thread:
            self.tell_amounts((samples, tokens, fetch))
            self.note((_BATCH, 0))
            self._settle_if_long()

    def tell_amounts(self, amounts: tuple[int, int, float]) -> None:
        """What is in the batches from here on, as :meth:`batch` says it."""
        if amounts != self.amounts:
            self.amounts = amounts
            self.note((_AMOUNTS, amounts))

    def copies_pageable(self) -> None:
        """Something is copied to a device from memory that is not pinned."""
        if get_ident() == self.thread:
            self.note((_PAGEABLE, 0))
            self._settle_if_long()

    # -- steps

    def optimizer_begins(self, optimizer: object, *_: object) -> None:
        """It begins to step. Takes and ignores a hook's arguments."""
        if get_ident() != self.thread or self.is_scaling:
            return
        if len(self.log) > SETTLE_AT:
            self.settle()
        if id(optimizer) != self.which:
            self.which = id(optimizer)
            self.note((_WHICH, self.which))
        self.note((BEGINS, self.clock()))
        self._is_optimizing = True
        if self.timing is not None and not self.depth:
            self._mark(OPTIMIZER)

    def optimizer_ended(self, optimizer: object, *_: object) -> None:
        """It has stepped, and the step may be over with it. Takes and ignores a hook's arguments."""
        if get_ident() != self.thread or self.is_scaling:
            return
        if id(optimizer) != self.which:
            self.which = id(optimizer)
            self.note((_WHICH, self.which))
        self._is_optimizing = False
        if self.timing is not None and not self.depth:
            self._mark(OUTSIDE)
        now = self.clock()
        self.note((ENDED, now))
        if self.device is not None and not self.depth and not self._marks_steps:
            self._choose_timing(self.device, now)
        if now >= self.due or len(self.log) > SETTLE_AT:
            self.settle()

    def begin_marked_step(self) -> None:
        """``trace_step`` is entered. From the first time on, only this makes steps."""
        if get_ident() == self.thread:
            self._settle_if_long()
            self._within += 1
            self._marks_steps = True
            self.note((_BEGIN_MARKED, self.clock()))

    def end_marked_step(self, failed: bool = False) -> None:
        """``trace_step`` is left. What a failed step took goes to the next one."""
        if get_ident() == self.thread and self._within:
            self._within -= 1
            now = self.clock()
            self.note((_FAILED if failed else _END_MARKED, now))
            if self.device is not None and not failed and not self._within:
                self._choose_timing(self.device, now)
            if now >= self.due or len(self.log) > SETTLE_AT:
                self.settle()

    def _choose_timing(self, device: DeviceTimer, now: int) -> None:
        """A step has ended, or an optimizer step: whether the next one's work on the device is timed."""
        self._ended += 1
        is_on = device.is_due(self._ended, now)
        if is_on != (self.timing is not None):
            self.timing = device if is_on else None
            self.note((_TIMING, is_on))

    def reported(self) -> None:
        """``report`` has returned. Ends a step where nothing else does."""
        if get_ident() == self.thread:
            now = self.clock()
            self.note((_REPORT, now))
            if now >= self.due or len(self.log) > SETTLE_AT:
                self.settle()

    def flush(self) -> None:
        """The user's function has ended: the last step is closed."""
        if get_ident() == self.thread:
            self.note((_FLUSH, 0))
            self.settle()

    def settle(self) -> None:
        """Make steps of what was noted until here.

        A fault of ours ends recording, and nothing else. An exception of the user's that comes here, as a signal's
        handler raises it, is the user's; what was noted until then is left out.
        """
        if get_ident() != self.thread:
            return
        log = self.log
        try:
            # First, so that a signal's handler that is called meanwhile does not come here too.
            self.due = self.clock() + _SETTLE_EVERY
            noted = log[:]
            del log[: len(noted)]  # and not what a signal's handler has noted meanwhile
            self._steps.take(noted)
        except BaseException as error:
            if not _is_of_ours(error):
                self._begin_anew()
                raise
            self.trouble, self.thread = f"{type(error).__name__}: {error}", NOBODY

    def _settle_if_long(self) -> None:
        if len(self.log) > SETTLE_AT:
            self.settle()

    def _begin_anew(self) -> None:
        """Making steps was broken off somewhere, so nothing is sure but what is known here."""
        self.log.clear()
        # Of these the next call says again what they are.
        self.amounts, self.which = (0, 0, 0.0), 0
        is_timing = self.timing is not None
        self._steps = self._steps.begun_anew(self.clock(), self.depth, self._within, is_timing)

    # -- for whoever keeps the steps

    def phase_now(self) -> int:
        """What time belongs to at this moment, as far as was noted. Any thread; it may be late by a moment."""
        return self._steps.phase_after(self.log.copy())

    @property
    def gpu(self) -> int | None:
        """The number of the device that is timed, once one is. Any thread: each has a current device of its own, so
        that only the one that trains can say which it trains on."""
        return self.device.index if self.device is not None else None

    @property
    def steps(self) -> int:
        """How many steps were made of what was noted. Any thread."""
        return self._ring.written

    def time_on(self, make: Callable[[], DeviceTimer]) -> None:
        """From here on also time what a device does, with a timer that is made now. Again is fine."""
        if get_ident() == self.thread and self.device is None:
            self.device = self.timing = self._steps.device = make()

    def drain(self, after: int, final: bool = False) -> tuple[int, bytes]:
        """The steps from number ``after`` on, as :func:`read_ring` gives them. One thread, whichever.

        Steps whose work on a device is not done are kept back, unless this is the ``final`` time: then they are given
        without the device's times. The device is asked, never waited for.
        """
        device = self.device
        end = self._ring.written
        if device is not None:
            unresolved = device.resolve(self._ring.slot)
            if unresolved is not None and not final:
                end = min(end, unresolved)
        first, records = read_ring(self._ring.buffer, after)
        return first, records[: max(end - first, 0) * RECORD_SIZE]


#: Where the code lies that makes steps.
_HERE = os.path.dirname(__file__)


def _is_of_ours(error: BaseException) -> bool:
    """Whether an exception that came up in :meth:`Recorder.settle` is a fault of what is called there.

    A signal's handler is a call of somebody else's code, however deep within ours. What other threads can raise in this
    one comes from no call; it is told by its class, because what is ours is one of Python's own.
    """
    if not isinstance(error, Exception) or isinstance(error, OSError):
        return False
    if type(error).__module__ not in ("builtins", "struct"):
        return False
    traceback = error.__traceback__
    while traceback is not None:
        if os.path.dirname(traceback.tb_frame.f_code.co_filename) != _HERE:
            return False
        traceback = traceback.tb_next
    return True


# --------------------------------------------------------------------------- of this process

_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
_current: Recorder | None = None
_is_kept = False


def current() -> Recorder:
    """This process's recorder: its rank's, or one that is made now for the thread that asks."""
    global _current, _is_kept
    if _current is None:
        _current, _is_kept = Recorder(), False
    return _current


def recording() -> Recorder | None:
    """This process's recorder, where there is one: for code that notes what it does only if anybody records."""
    return _current


def is_kept() -> bool:
    """Whether somebody keeps what this process records: not where there is a recorder only because it was asked for."""
    return _current is not None and _is_kept


@contextmanager
def phase(number: int) -> Iterator[None]:
    """What is within belongs to a phase, where this process records at all."""
    recorder = _current
    if recorder is None:
        yield
        return
    depth = recorder.enter(number)
    try:
        yield
    finally:
        recorder.leave(depth)


def use(recorder: Recorder | None) -> None:
    """Let ``recorder`` be this process's, which somebody keeps; None for none yet."""
    global _current, _is_kept
    _current, _is_kept = recorder, True


def _record_nothing_in_child() -> None:
    """A forked child, such as a loader's process, has its parent's thread and would write in its parent's ring."""
    global _current
    for recorder in _recorders:
        recorder.thread = 0
    _current = None


os.register_at_fork(after_in_child=_record_nothing_in_child)
