"""The recorder of one thread."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
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
    NOBODY,
    PAGEABLE_COPY,
    REPORTED,
    SETTLE_AT,
    SETTLE_EVERY,
    TIMING,
    WHICH,
)
from powertrain.trace.recording.phases import COLLECTIVE, INSIDE, OPTIMIZER, OUTSIDE, RECORD_SIZE
from powertrain.trace.recording.ring import Ring, read_ring, ring_size
from powertrain.trace.recording.steps import StepBuilder

if TYPE_CHECKING:
    from powertrain.trace.recording.cuda import DeviceTimer, Mark
    from powertrain.trace.recording.ring import Buffer


class Recorder:
    """Records marks of a loop at the cost of reading a clock, and turns them into steps every few steps.

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
        self._ring = Ring(bytearray(ring_size()) if buffer is None else buffer)
        self.clock = clock
        #: The error that ended recording; "" for none.
        self.trouble = ""
        #: Identifies the thread that records; 0 for none, as in a forked child.
        self.thread = get_ident() if thread is None else thread
        #: Within the step of a gradient scaler, which may or may not call the optimizer's.
        self.is_scaling = False
        began = clock()
        self._steps = StepBuilder(self._ring, began, now() - began * 1e-9)
        #: What was noted: a number, its value, and so on. Both at once, because a signal's handler may note something.
        self.log: list[Any] = []
        self.note = self.log.extend
        self.due = began + SETTLE_EVERY
        self.depth = self._within = 0
        #: The last amounts of batches, and the last optimizer.
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
        recorders.add(self)

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
        if self.timing is not None and not depth and phase in MARKED_AS:
            self._is_marked = True
            try:
                self._mark(MARKED_AS[phase])
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
                self.note((LEAVE_INNER, (depth, now)))
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
        """Enter the phase :data:`FORWARD`, with or without gradients."""
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
        """Mark that the last gradients of a backward pass were computed: from here on it waits for the other ranks.

        When it is called again in the same pass, there was more to compute until then. With gradients on a device it is
        called in a thread of torch's, while the thread that records waits for it: then only the device's time is split.
        """
        if get_ident() == self.thread:
            self.note((GRADIENTS, self.clock()))
            self._settle_if_long()
        timing = self.timing
        if timing is not None and (mark := timing.mark(COLLECTIVE)) is not None:
            self._marks.append(mark)

    def _mark(self, phase: int) -> None:
        """From here on what is put on the device's stream belongs to ``phase``."""
        if self.timing is not None and (mark := self.timing.mark(phase)) is not None:
            self._marks.append(mark)
            self.note((MARKS, self._marks))
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
            self.note((BATCH, 0))
            self._settle_if_long()

    def tell_amounts(self, amounts: tuple[int, int, float]) -> None:
        """What is in the batches from here on, as :meth:`batch` says it."""
        if amounts != self.amounts:
            self.amounts = amounts
            self.note((AMOUNTS, amounts))

    def copies_pageable(self) -> None:
        """Something is copied to a device from memory that is not pinned."""
        if get_ident() == self.thread:
            self.note((PAGEABLE_COPY, 0))
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
            self.note((WHICH, self.which))
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
            self.note((WHICH, self.which))
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
            self.note((BEGIN_MARKED, self.clock()))

    def end_marked_step(self, failed: bool = False) -> None:
        """End a step of ``trace_step``. The time of a failed step is added to the next one."""
        if get_ident() == self.thread and self._within:
            self._within -= 1
            now = self.clock()
            self.note((FAILED if failed else END_MARKED, now))
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
            self.note((TIMING, is_on))

    def reported(self) -> None:
        """``report`` has returned. Ends a step where nothing else does."""
        if get_ident() == self.thread:
            now = self.clock()
            self.note((REPORTED, now))
            if now >= self.due or len(self.log) > SETTLE_AT:
                self.settle()

    def flush(self) -> None:
        """The user's function has ended: the last step is closed."""
        if get_ident() == self.thread:
            self.note((FLUSH, 0))
            self.settle()

    def settle(self) -> None:
        """Turn all marks so far into steps.

        A fault of ours ends recording, and nothing else. An exception of the user's that comes here, as a signal's
        handler raises it, is the user's; what was noted until then is left out.
        """
        if get_ident() != self.thread:
            return
        log = self.log
        try:
            # First, so that a signal's handler that is called meanwhile does not come here too.
            self.due = self.clock() + SETTLE_EVERY
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

    # -- for readers of the steps

    def phase_now(self) -> int:
        """Return the current phase by the marks so far. Any thread; may lag slightly."""
        return self._steps.phase_after(self.log.copy())

    @property
    def gpu(self) -> int | None:
        """The number of the device that is timed, once one is. Any thread: each has a current device of its own, so
        that only the one that trains can say which it trains on."""
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


#: The directory of the code that makes steps.
_HERE = os.path.dirname(__file__)


def _is_of_ours(error: BaseException) -> bool:
    """Return whether an exception in :meth:`Recorder.settle` is a bug of this package.

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


recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
