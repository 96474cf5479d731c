"""The recorder of one thread."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

from powertrain.trace.recording.marks import (
    AMOUNTS,
    BATCH,
    BEGIN_MARKED,
    BEGINS,
    END_MARKED,
    ENDED,
    FAILED,
    FETCHED,
    FLUSH,
    GRADIENTS,
    IGNORED,
    LEARN,
    LEAVE,
    LEAVE_INNER,
    LOOK,
    MARKED_AS,
    MARKS,
    MARKS_INTERVAL_NS,
    MOST_MARKS,
    NOBODY,
    PAGEABLE_COPY,
    REPORTED,
    TIMING,
    WHICH,
)
from powertrain.trace.recording.phases import COLLECTIVE, INSIDE, OPTIMIZER, OUTSIDE, RECORD_SIZE
from powertrain.trace.recording.ring import Ring, read_ring, ring_size
from powertrain.trace.recording.steps import StepBuilder

if TYPE_CHECKING:
    from powertrain.trace.recording.cuda import DeviceTimer, Mark
    from powertrain.trace.recording.ring import Buffer


#: Arguments of :attr:`Recorder.at_step_end`'s functions where no optimizer ended the step.
BY_MARK, BY_REPORT = -1, -2
#: Held while functions are added to or removed from :attr:`Recorder.at_step_end`.
_watching = Lock()


class Recorder:
    """Record marks of a loop at the cost of reading a clock, and turn them into steps in batches.

    Code that runs once per millisecond costs mostly its reload into the processor's caches. It is therefore short here,
    and the remaining work is done for many steps at once. A killed process loses the marks since the last such batch:
    at most some 22 steps, or a tenth of a second if steps are longer.

    All methods but :meth:`drain` and :attr:`steps` are for the creating thread (or ``thread``); calls from any other
    thread do nothing.
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
        "at_step_end",
        "clock",
        "copied_marks",
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
        """Create a recorder. ``buffer`` has :func:`ring_size` bytes of any content; ``clock`` returns nanoseconds,
        ``now`` Unix seconds."""
        self._ring = Ring(bytearray(ring_size()) if buffer is None else buffer)
        self.clock = clock
        #: The error that ended recording; "" for none.
        self.trouble = ""
        #: Id of the recording thread; 0 for none, as in a forked child.
        self.thread = get_ident() if thread is None else thread
        #: Called on the recording thread when a step ends, with a number for what ended it: an optimizer's id,
        #: :data:`BY_MARK` or :data:`BY_REPORT`. Empty most of the time.
        self.at_step_end: tuple[Callable[[int], None], ...] = ()
        #: A list that gets a copy of the marks while a window of steps is looked at closely.
        self.copied_marks: list[Any] | None = None
        #: Inside a gradient scaler's step, which may or may not call the optimizer's step.
        self.is_scaling = False
        began = clock()
        self._steps = StepBuilder(self._ring, began, now() - began * 1e-9)
        #: Pending marks: alternating numbers and values. Appended in pairs, because a signal handler may add marks.
        self.log: list[Any] = []
        self.note = self.log.extend
        self.due = began + MARKS_INTERVAL_NS
        self.depth = self._within = 0
        #: The amounts of the last batch, and the last optimizer.
        self.amounts = (0, 0, 0.0)
        self.which = 0
        #: The device timer, once a device is timed; and the same timer while the current step is timed.
        self.device: DeviceTimer | None = None
        self.timing: DeviceTimer | None = None
        #: Stream marks that are not logged yet, and whether the open phase has one.
        self._marks: list[Mark] = []
        self._is_marked = False
        #: Inside an optimizer's step, while the device is timed.
        self._is_optimizing = False
        #: Whether the loop marks its steps, and the number of ended steps or optimizer steps.
        self._marks_steps, self._ended = False, 0
        recorders.add(self)

    # -- phases

    def enter(self, phase: int) -> int:
        """Attribute time from now on to ``phase``; return the nesting depth, for :meth:`leave`.

        Returns :data:`IGNORED` in a thread that does not record.
        """
        if get_ident() != self.thread:
            return IGNORED
        depth = self.depth
        if depth and len(self.log) > MOST_MARKS:
            self.process_marks()
        # Log the mark first: a user exception may occur in between. A mark that is never left is left with the next
        # one; a count that is never decremented would remain.
        self.note((phase, self.clock()))
        self.depth = depth + 1
        if self.timing is not None and not depth and phase in MARKED_AS:
            self._is_marked = True
            try:
                self._mark(MARKED_AS[phase])
            except (
                BaseException
            ):  # raised by a user's signal handler: the phase was not entered and will not be left
                self.leave(depth)
                raise
        return depth

    def leave(self, depth: int) -> None:
        """Restore the phase before the :meth:`enter` that returned ``depth``, also leaving nested phases that were
        never left."""
        if depth or not self.depth:
            if 0 < depth < self.depth:
                self.depth = depth
                now = self.clock()
                self.note((LEAVE_INNER, (depth, now)))
                if now >= self.due or len(self.log) > MOST_MARKS:
                    self.process_marks()
            return
        self.depth = 0
        now = self.clock()
        self.note((LEAVE, now))
        if self._is_marked:
            self._is_marked = False
            # Return to a closure's optimizer, or to the rest of the step, where the loss is computed.
            self._mark(OPTIMIZER if self._is_optimizing else INSIDE)
        if now >= self.due or len(self.log) > MOST_MARKS:
            self.process_marks()

    def enter_forward(self, with_gradients: bool) -> int:
        """Enter the phase :data:`FORWARD`, with or without gradients."""
        return self.enter(LEARN if with_gradients else LOOK)

    @contextmanager
    def phase(self, phase: int) -> Iterator[None]:
        """Attribute the time within the block to ``phase``. Slower than :meth:`enter` and :meth:`leave`."""
        depth = self.enter(phase)
        try:
            yield
        finally:
            self.leave(depth)

    def gradients_are_there(self, *_: object) -> None:
        """Mark that all gradients of a backward pass are computed: the rest of the pass waits for other ranks.

        A second call in the same pass means that the computation continued until then. With gradients on a device, a
        torch thread calls it while the recording thread waits: then only the device time is split.
        """
        if get_ident() == self.thread:
            self.note((GRADIENTS, self.clock()))
            self._process_if_long()
        timing = self.timing
        if timing is not None and (mark := timing.mark(COLLECTIVE)) is not None:
            self._marks.append(mark)

    def _mark(self, phase: int) -> None:
        """Attribute work on the device's stream from now on to ``phase``."""
        if self.timing is not None and (mark := self.timing.mark(phase)) is not None:
            self._marks.append(mark)
            self.note((MARKS, self._marks))
            self._marks = []

    # -- batches

    def fetched(self, depth: int, samples: int = 0, tokens: int = 0, fetch: float = 0.0) -> None:
        """Leave the phase :data:`INPUT` with a batch; :meth:`batch` documents the other arguments."""
        if depth or self.depth != 1:
            self.leave(depth)
            if not depth:
                self.batch(samples, tokens, fetch)
            return
        self.set_amounts((samples, tokens, fetch))
        self.depth = 0
        now = self.clock()
        self.note((FETCHED, now))
        if now >= self.due or len(self.log) > MOST_MARKS:
            self.process_marks()

    def batch(self, samples: int = 0, tokens: int = 0, fetch: float = 0.0) -> None:
        """Note a batch for the loop: its amounts, and the seconds it took to make.

        The seconds are 0 if not known, and :data:`MADE_HERE` if they equal the time waited. Called after the phase
        :data:`INPUT` was left.
        """
        if get_ident() == self.thread:
            self.set_amounts((samples, tokens, fetch))
            self.note((BATCH, 0))
            self._process_if_long()

    def set_amounts(self, amounts: tuple[int, int, float]) -> None:
        """Set the amounts of the following batches, as for :meth:`batch`."""
        if amounts != self.amounts:
            self.amounts = amounts
            self.note((AMOUNTS, amounts))

    def copies_pageable(self) -> None:
        """Note a copy to a device from memory that is not pinned."""
        if get_ident() == self.thread:
            self.note((PAGEABLE_COPY, 0))
            self._process_if_long()

    # -- steps

    def optimizer_begins(self, optimizer: object, *_: object) -> None:
        """Note the start of an optimizer step. Accepts and ignores a hook's arguments."""
        if get_ident() != self.thread or self.is_scaling:
            return
        if len(self.log) > MOST_MARKS:
            self.process_marks()
        if id(optimizer) != self.which:
            self.which = id(optimizer)
            self.note((WHICH, self.which))
        self.note((BEGINS, self.clock()))
        self._is_optimizing = True
        if self.timing is not None and not self.depth:
            self._mark(OPTIMIZER)

    def optimizer_ended(self, optimizer: object, *_: object) -> None:
        """Note the end of an optimizer step, which may end the step. Accepts and ignores a hook's arguments."""
        if get_ident() != self.thread or self.is_scaling:
            return
        if id(optimizer) != self.which:
            self.which = id(optimizer)
            self.note((WHICH, self.which))
        self._is_optimizing = False
        if self.timing is not None and not self.depth:
            self._mark(OUTSIDE)
        now = self.clock()
        self.note((ENDED, now))
        if self.device is not None and not self.depth and not self._marks_steps:
            self._choose_timing(self.device, now)
        if now >= self.due or len(self.log) > MOST_MARKS:
            self.process_marks()
        if self.at_step_end and not self.depth and not self._marks_steps:
            self._call_at_step_end(self.which)

    def begin_marked_step(self) -> None:
        """Begin a step of ``trace_step``. From the first call on, only ``trace_step`` defines steps."""
        if get_ident() == self.thread:
            self._process_if_long()
            self._within += 1
            self._marks_steps = True
            self.note((BEGIN_MARKED, self.clock()))

    def end_marked_step(self, failed: bool = False) -> None:
        """End a step of ``trace_step``. The time of a failed step is added to the next one."""
        if get_ident() == self.thread and self._within:
            self._within -= 1
            now = self.clock()
            self.note((FAILED if failed else END_MARKED, now))
            if self.device is not None and not failed and not self._within:
                self._choose_timing(self.device, now)
            if now >= self.due or len(self.log) > MOST_MARKS:
                self.process_marks()
            if self.at_step_end and not failed and not self._within:
                self._call_at_step_end(BY_MARK)

    def _choose_timing(self, device: DeviceTimer, now: int) -> None:
        """Decide after a step or an optimizer step whether the next one is timed on the device."""
        self._ended += 1
        is_on = device.is_due(self._ended, now)
        if is_on != (self.timing is not None):
            self.timing = device if is_on else None
            self.note((TIMING, is_on))

    def reported(self) -> None:
        """Note that ``report`` has returned. Ends a step in a loop without other step boundaries."""
        if get_ident() == self.thread:
            now = self.clock()
            self.note((REPORTED, now))
            if now >= self.due or len(self.log) > MOST_MARKS:
                self.process_marks()
            if self.at_step_end and not self.which and not self._marks_steps:
                self._call_at_step_end(BY_REPORT)

    # -- ends of steps

    def watch_step_ends(self, function: Callable[[int], None]) -> None:
        """Call ``function`` at the end of each step, on the recording thread; see :attr:`at_step_end`. Any thread."""
        with _watching:
            self.at_step_end = (*self.at_step_end, function)

    def unwatch_step_ends(self, function: Callable[[int], None]) -> None:
        """Do not call ``function`` any more. Again is fine. Any thread."""
        with _watching:
            self.at_step_end = tuple(one for one in self.at_step_end if one != function)

    def _call_at_step_end(self, boundary: int) -> None:
        for function in self.at_step_end:
            function(boundary)

    def flush(self) -> None:
        """Close the last step, after the user's function has ended."""
        if get_ident() == self.thread:
            self.note((FLUSH, 0))
            self.process_marks()

    def process_marks(self) -> None:
        """Turn all marks so far into steps.

        A bug in this package ends recording, and nothing else. A user exception raised here by a signal handler
        propagates; the marks logged until then are dropped.
        """
        if get_ident() != self.thread:
            return
        log = self.log
        try:
            # Done first, so that a signal handler called meanwhile does not enter here too.
            self.due = self.clock() + MARKS_INTERVAL_NS
            noted = log[:]
            del log[: len(noted)]  # excluding marks that a signal handler has added meanwhile
            if self.copied_marks is not None:
                self.copied_marks += noted
            self._steps.take(noted)
        except BaseException as error:
            if not _is_of_ours(error):
                self._begin_anew()
                raise
            self.trouble, self.thread = f"{type(error).__name__}: {error}", NOBODY

    def _process_if_long(self) -> None:
        if len(self.log) > MOST_MARKS:
            self.process_marks()

    def _begin_anew(self) -> None:
        """Restart the step builder after an interruption, from the recorder's own state."""
        self.log.clear()
        # The next call logs these again.
        self.amounts, self.which = (0, 0, 0.0), 0
        is_timing = self.timing is not None
        self._steps = self._steps.begun_anew(self.clock(), self.depth, self._within, is_timing)

    # -- for readers of the steps

    @property
    def is_optimizing(self) -> bool:
        """Whether the loop is inside an optimizer's step."""
        return self._is_optimizing

    def phase_now(self) -> int:
        """Return the current phase by the marks so far. Any thread; may lag slightly."""
        return self._steps.phase_after(self.log.copy())

    @property
    def gpu(self) -> int | None:
        """The index of the timed device, once there is one.

        Any thread: each thread has its own current device, so only the training thread can determine it.
        """
        return self.device.index if self.device is not None else None

    @property
    def steps(self) -> int:
        """Number of steps so far. Any thread."""
        return self._ring.written

    def time_on(self, make: Callable[[], DeviceTimer]) -> None:
        """Start timing a device, with a new timer. May be called again."""
        if get_ident() == self.thread and self.device is None:
            self.device = self.timing = self._steps.device = make()

    def drain(self, after: int, final: bool = False) -> tuple[int, bytes]:
        """Return the steps from number ``after`` on, in the format of :func:`read_ring`. One thread at a time.

        Steps with pending device work are held back, unless ``final`` is set: then they are returned without device
        times. The device is polled, never waited for.
        """
        device = self.device
        end = self._ring.written
        if device is not None:
            unresolved = device.resolve(self._ring.slot)
            if unresolved is not None and not final:
                end = min(end, unresolved)
        first, records = read_ring(self._ring.buffer, after)
        return first, records[: max(end - first, 0) * RECORD_SIZE]


#: The directory of the step-building code.
_HERE = os.path.dirname(__file__)


def _is_of_ours(error: BaseException) -> bool:
    """Return whether an exception in :meth:`Recorder.process_marks` is a bug of this package.

    A signal handler runs foreign code, however deep within this package's frames. Exceptions that other threads raise
    in this one come from no call; they are recognized by class, because this package's bugs raise Python's built-in
    exceptions.
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


recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
