"""Sum marks up into steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from powertrain.trace.recording.marks import (
    AMOUNTS,
    BATCH,
    BEGIN_A_STEP,
    BEGIN_MARKED,
    BEGINS,
    END_MARKED,
    ENDED,
    FAILED,
    FETCHED,
    FLUSH,
    GRADIENTS,
    IN_A_CYCLE,
    LEARN,
    LEAVE,
    LEAVE_INNER,
    LOOK,
    MADE_HERE,
    MARKS,
    MOST_MARKS,
    MOST_STREAM_MARKS,
    NO_MEMORY,
    NO_TIMES,
    OF_A_BATCH,
    PAGEABLE_COPY,
    REPORTED,
    TIMING,
    WHICH,
)
from powertrain.trace.recording.phases import (
    AS_USUAL_ON_DEVICE,
    BACKWARD,
    COLLECTIVE,
    COUNT,
    FORWARD,
    INPUT,
    INSIDE,
    MARKED,
    OPTIMIZER,
    OUTSIDE,
    PAGEABLE,
    REPORT,
    TIMED_ON_DEVICE,
    StepRecord,
)

if TYPE_CHECKING:
    from powertrain.trace.recording.cuda import DeviceTimer, Mark
    from powertrain.trace.recording.ring import Ring


class _Tally:
    """Sums since the last step, or since the last optimizer step."""

    __slots__ = ("fetch", "flags", "is_timed", "marks", "samples", "sums", "tokens")

    def __init__(self, is_timed: bool) -> None:
        #: Nanoseconds by phase.
        self.sums = [0] * COUNT
        self.samples = self.tokens = self.flags = 0
        self.fetch = 0.0
        #: Marks on the device's stream: see :mod:`powertrain.trace.recording.cuda`.
        self.marks: list[Mark] = []
        #: Whether the marks cover all of the time.
        self.is_timed = is_timed

    def add_before(self, earlier: _Tally) -> None:
        """Add the sums of an earlier tally."""
        self.sums = [ours + theirs for ours, theirs in zip(self.sums, earlier.sums, strict=True)]
        self.samples += earlier.samples
        self.tokens += earlier.tokens
        self.flags |= earlier.flags
        self.fetch += earlier.fetch
        self.marks[:0] = earlier.marks
        self.is_timed &= earlier.is_timed


class _Cycle(NamedTuple):
    """The marks from one batch to the next in a repetitive loop, and the phase that the time before each mark belongs
    to."""

    numbers: list[int]
    phases: list[int]


class _Attempt:
    """A candidate cycle: the marks since a batch was requested, and the state at that time."""

    __slots__ = ("cycle", "state")

    def __init__(self, state: tuple[Any, ...]) -> None:
        self.state = state
        self.cycle = _Cycle([], [])


class StepBuilder:
    """Turn marks into steps.

    Marks mostly repeat from step to step. A block of marks is therefore compared with the previous cycle as a whole,
    and if they match only the times are summed up; see :meth:`_repeat`.
    """

    def __init__(self, ring: Ring, began: int, zero: float) -> None:
        self._ring = ring
        self.device: DeviceTimer | None = None
        self._since = self._began = began
        #: Unix seconds when the clock showed 0.
        self._zero = zero
        self._phase = self._rest = OUTSIDE
        #: The phase that each open phase returns to, and the stack positions of entered phases. The others belong to
        #: optimizers.
        self._stack: list[int] = []
        self._entered: list[int] = []
        #: Sums at the end of an optimizer step that may be the last of its step, and its time.
        self._ended: _Tally | None = None
        self._ended_at = 0
        #: Optimizers that have stepped in this step, and optimizers inside a step, with their initial depth.
        self._stepped: set[int] = set()
        self._open_optimizers: dict[int, int] = {}
        #: Whether any phase was entered since the newest optimizer step began, and its number of nested steps.
        self._has_entered, self._inner_steps = False, 0
        #: Whether the loop marks its steps, and the nesting depth of marked steps.
        self._marked, self._within = False, 0
        #: Sums when the newest batch was requested; whether a model was called on it without gradients, and whether
        #: with gradients; and whether any model was ever called with gradients.
        self._asked_at: tuple[list[int], int, int, float] | None = None
        self._looks = self._learns = self._has_learned = False
        #: Whether an optimizer ever stepped: if so, optimizers end steps and reports do not.
        self._has_stepped = False
        #: Times at which the newest batch was requested and received.
        self._input_began = self._input_ended = 0
        #: The last logged amounts of a batch, and the last logged optimizer.
        self._amounts = (0, 0, 0.0)
        self._which = 0
        #: Whether stream marks are recorded, and the number of optimizer steps in this step.
        self._is_timing, self._optimizer_steps = True, 0
        #: The current cycle, whether the loop has just completed it, and the candidate for a new one.
        self._cycle: _Cycle | None = None
        self._may_repeat = False
        self._attempt: _Attempt | None = None
        self._renew()
        self._handlers = self._handlers_by_number()

    def begun_anew(self, now: int, depth: int, within: int, is_timing: bool) -> StepBuilder:
        """Return a builder that continues with ``depth`` open phases and ``within`` marked steps; drops open sums."""
        anew = StepBuilder(self._ring, now, self._zero)
        anew.device, anew._is_timing, anew._tally.is_timed = self.device, is_timing, False
        anew._has_learned, anew._has_stepped = self._has_learned, self._has_stepped
        anew._marked, anew._within = self._marked or within > 0, within
        anew._phase = anew._rest = INSIDE if within else OUTSIDE
        anew._stack, anew._entered = [anew._rest] * depth, list(range(depth))
        return anew

    def take(self, noted: list[Any]) -> None:
        """Turn marks, given as numbers and values, into steps."""
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

    # -- cycles

    def _learn_before(self, number: int) -> None:
        self._may_repeat = False
        if number == INPUT and not self._entered:
            self._attempt = _Attempt(self._state())
        if (attempt := self._attempt) is not None:
            # GRADIENTS counts the time before it as backward, if it counts it at all.
            phase = BACKWARD if number == GRADIENTS and self._phase == COLLECTIVE else self._phase
            attempt.cycle.numbers.append(number)
            attempt.cycle.phases.append(phase)
            if number not in IN_A_CYCLE or len(attempt.cycle.numbers) > MOST_MARKS:
                self._attempt = None

    def _learn_after(self, number: int) -> None:
        if number == ENDED and (attempt := self._attempt) is not None:
            self._attempt = None
            is_one = attempt.state[0] and attempt.state == self._state()
            if is_one and attempt.cycle.numbers.count(FETCHED) == 1 and attempt.cycle.numbers[1] == FETCHED:
                self._cycle, self._may_repeat = attempt.cycle, True

    def _state(self) -> tuple[Any, ...]:
        """Return all state that determines the handling of the next marks.

        Its first item tells whether a step has just ended, which will be closed when a batch is requested. A cycle
        leaves all of it unchanged.
        """
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
        """Process a repetition of the cycle as if each mark had been taken. The state is the cycle's, before and
        after.
        """
        self._close_ended()
        self._input_began, self._input_ended = moments[0], moments[1]
        tally = _Tally(self._is_timing)
        sums, before = tally.sums, self._since
        for phase, moment in zip(cycle.phases, moments, strict=True):
            sums[phase] += moment - before
            before = moment
        self._fill(tally)
        self._ended, self._ended_at, self._since = tally, before, before

    # -- single marks

    def _handlers_by_number(self) -> tuple[Callable[[int, Any], None], ...]:
        """Return the handler of each mark number, which takes the number and its value."""
        by_number: dict[int, Callable[[int, Any], None]] = {
            **dict.fromkeys(range(COUNT), self.enter),
            LEARN: self.learn,
            LOOK: self.look,
            LEAVE: self.leave,
            LEAVE_INNER: self.leave_inner,
            FETCHED: self.fetched,
            BATCH: self.batch,
            AMOUNTS: self.amounts,
            GRADIENTS: self.wait_for_gradients,
            PAGEABLE_COPY: self.copy_pageable,
            WHICH: self.which_optimizer,
            BEGINS: self.optimizer_begins,
            ENDED: self.optimizer_ended,
            BEGIN_MARKED: self.begin_marked,
            END_MARKED: self.end_marked,
            FAILED: self.end_marked,
            REPORTED: self.report,
            FLUSH: self.flush,
            MARKS: self.take_marks,
            TIMING: self.timing,
        }
        return tuple(by_number[number] for number in sorted(by_number))

    def _renew(self) -> None:
        """Start new sums."""
        self._tally = _Tally(self._is_timing)
        self._sums = self._tally.sums
        self._asked_at = None

    def _charge(self, now: int) -> None:
        """Add the time since the last switch to its phase."""
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
        if not entered:  # a signal handler has already left it together with its own phase
            return
        if stack and not entered[0] and not self._open_optimizers:  # the common case
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
        """End the phase at this position of the stack, and all phases within it."""
        if place < len(self._stack):
            self._phase = self._stack[place]
            del self._stack[place:]
        if self._open_optimizers:  # nested optimizer steps that raised
            self._open_optimizers = {key: at for key, at in self._open_optimizers.items() if at < place}

    def _begin(self, phase: int, now: int) -> int:
        """Begin an outermost phase; return the phase that its time counts as."""
        if phase == INPUT:
            self._input_began = now
            self._ask_for_batch()
        elif phase == BACKWARD:
            self._learns = self._has_learned = True
        if phase in (REPORT, INPUT):
            return phase
        if self._marked:
            return phase if self._within else OUTSIDE
        if phase in BEGIN_A_STEP:
            self._rest = INSIDE
        return phase

    def look(self, _: int, now: int) -> None:
        """Note a call of a model without gradients."""
        self._looks = True
        self.enter(FORWARD, now)

    def learn(self, _: int, now: int) -> None:
        """Note a call of a model with gradients."""
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
        if len(tally.marks) > MOST_STREAM_MARKS and self.device is not None:
            self.device.closed(self._ring.written, tally.marks, is_whole=False)
            tally.marks, tally.is_timed = [], False

    def timing(self, _: int, is_on: bool) -> None:
        """Set whether stream marks are recorded; follows directly after new sums were started."""
        self._is_timing = self._tally.is_timed = is_on

    # -- batches

    def _ask_for_batch(self) -> None:
        """Close the previous step, and decide the purpose of the previous batch."""
        if self._looks and not self._learns and self._has_learned and not self._within:
            self._count_as_outside()
        self._looks = self._learns = False
        self._close_found()
        tally = self._tally
        self._asked_at = tally.sums.copy(), tally.samples, tally.tokens, tally.fetch

    def _count_as_outside(self) -> None:
        """Count the newest batch, which was for evaluation, as time between two steps."""
        if self._asked_at is None:
            return
        tally, sums = self._tally, self._sums
        before, tally.samples, tally.tokens, tally.fetch = self._asked_at
        for phase in OF_A_BATCH:
            sums[OUTSIDE] += sums[phase] - before[phase]
            sums[phase] = before[phase]

    def amounts(self, _: int, amounts: tuple[int, int, float]) -> None:
        self._amounts = amounts

    def fetched(self, _: int, now: int) -> None:
        self.leave(_, now)
        self.batch(_, now)

    def _fill(self, tally: _Tally) -> None:
        """Add the newest batch to the step."""
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
        """Count time outside any phase as ``rest``, from the last switch on."""
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
                self._inner_steps += 1  # a subclass's step that calls its base class's step
                return
            self._back_to(
                self._open_optimizers[key]
            )  # the optimizer step raised, and its phases were never left
        self._has_entered, self._inner_steps = False, 0
        if key in self._stepped:
            self._close_found()
        self._open_optimizers[key] = len(self._stack)
        # The enclosing phase continues, or the rest of the step.
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
        """Drop optimizer steps that began and never ended: they raised."""
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
        if number != FAILED:
            self._learns = self._has_learned = True
            self._close(self._tally, now, MARKED)
            self._renew()

    def report(self, _: int, now: int) -> None:
        if self._marked or self._has_stepped:
            return
        self._charge(now)
        self._rest_is(OUTSIDE)
        # Such a loop has no step boundaries other than reports, so no time lies between two steps.
        self._sums[INSIDE] += self._sums[OUTSIDE]
        self._sums[OUTSIDE] = 0
        self._close(self._tally, now, 0)
        self._renew()

    def flush(self, _: int, now: int) -> None:
        self._close_found()

    def phase_after(self, log: list[Any]) -> int:
        """Return the current phase once all marks in ``log`` are processed; changes nothing. Any thread."""
        opened, rest, optimizes = [self._phase] * len(self._entered), self._rest, bool(self._open_optimizers)
        for number, value in zip(log[::2], log[1::2], strict=True):
            if number < COUNT:
                opened.append(number)
                rest = INSIDE if number in BEGIN_A_STEP else rest
            elif number in (LEARN, LOOK):
                opened.append(FORWARD)
                rest = INSIDE
            elif number == LEAVE_INNER:
                del opened[value[0] :]
            elif number in (LEAVE, FETCHED):
                opened.clear()
                rest = INSIDE if number == FETCHED else rest
            elif number in (BATCH, BEGIN_MARKED):
                rest = INSIDE
            elif number == BEGINS:
                optimizes = True
            elif number in (ENDED, END_MARKED, FAILED):
                optimizes, rest = False, OUTSIDE
            elif number == GRADIENTS and opened:
                opened[-1] = COLLECTIVE
        return opened[-1] if opened else OPTIMIZER if optimizes else rest

    def _close_found(self) -> None:
        """Close the step that ended with the newest optimizer step."""
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
        memory, on_device = NO_MEMORY, NO_TIMES
        if device is not None and not tally.is_timed and device.usual is not None:
            memory, on_device = device.usual
            flags |= TIMED_ON_DEVICE | AS_USUAL_ON_DEVICE
        record = StepRecord(
            number, flags, start, *memory, tally.fetch, times, on_device, tally.samples, tally.tokens
        )
        self._ring.append(record)
        if device is not None:
            device.closed(number, tally.marks, tally.is_timed)
