"""The progress of a rank: counters that heartbeats carry, and the gate at which a whole run can be held.

A **boundary** is a ``report`` or a ``should_checkpoint`` call: a point between two pieces of work of the user's loop.
To act at the same one on every rank (stop, checkpoint, resize), the controller arms a hold on each rank; each answers
how many boundaries are behind it and will wait at its next. The greatest answer plus one is a boundary that no rank has
passed, so all are sent on to that one and act there. No rank waits for longer than the side threads take to answer, so
a rank inside a collective is never left alone.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from powertrain.storage.boundaries import training_step
from powertrain.wire.from_controller import Goto, Preemption
from powertrain.worker.startup import StartupStamps


class Progress:
    """Counters of one rank. Written by the training thread, read by the service thread."""

    __slots__ = ("awaits", "batches", "moved", "phase", "reports", "startup", "steps")

    def __init__(self) -> None:
        self.reports = 0
        self.steps = 0
        self.batches = 0
        self.phase = "set-up"
        #: When one of the counters grew, by the monotonic clock.
        self.moved = time.monotonic()
        #: The wait of the rank on its wire: see ``wire.Beat``.
        self.awaits = ""
        #: The stamps of the time before the first step.
        self.startup = StartupStamps()

    def report(self) -> None:
        """Count a report."""
        self.reports += 1
        self.moved = time.monotonic()
        if self.reports == 1:
            self.startup.stepped()

    def step(self, *_: object) -> None:
        """Count an optimizer step. Takes and ignores a hook's arguments."""
        self.steps += 1
        self.moved = time.monotonic()
        if self.steps == 1:
            self.startup.stepped()
        training_step("optimizer", self.steps)

    def batch(self) -> None:
        """Count a batch of a loader."""
        training_step("batch", self.batches + 1)
        self.batches += 1
        self.moved = time.monotonic()
        if self.batches == 1:
            self.startup.batch()

    def snapshot(self) -> tuple[int, int, int]:
        return self.reports, self.steps, self.batches

    def collectives(self) -> int:
        """Return the collectives begun on torch's default process group; -1 where there is none. Never imports
        torch."""
        module = sys.modules.get("torch.distributed.distributed_c10d")
        try:
            if module is None or not module.is_initialized():
                return -1
            return int(module._get_default_group()._get_sequence_number_for_group())
        except Exception:  # the group comes or goes at this moment, or its backend does not count
            return -1

    def enter(self, phase: str) -> None:
        """Enter another phase."""
        self.phase = phase

    def reset(self) -> None:
        """Begin a new attempt in the same process."""
        self.reports = self.steps = self.batches = 0
        self.phase, self.awaits = "set-up", ""
        self.moved = time.monotonic()
        self.startup = StartupStamps()


#: This process's counters.
progress = Progress()


@dataclass(frozen=True)
class BoundaryCrossing:
    """The action at a boundary, and the state of the run from there on."""

    #: "go", "stop" or "step": see ``wire.Goto``.
    action: str = "go"
    reason: str = ""
    preemption: Preemption | None = None
    resize_to: int = 0


_GO_ON = BoundaryCrossing()


class Gate:
    """Counts boundaries and holds the training thread at one on request."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passed = 0
        self._hold: int | None = None
        self._target: Goto | None = None
        #: Returns whether the loop can save on request; called when a hold is armed. Any thread.
        self.can_save: Callable[[], bool] = lambda: False
        self._deliver_stop: Callable[[Goto], None] | None = None

    @property
    def passed(self) -> int:
        return self._passed

    def arm(self, hold: int) -> int:
        """Hold the next boundary; return how many were passed. Service thread."""
        with self._changed:
            self._hold, self._target = hold, None
            return self._passed

    def go_to(self, goto: Goto) -> None:
        """Let the rank run up to a boundary and act there. Service thread."""
        with self._changed:
            if goto.hold == self._hold:
                self._target = goto
                self._changed.notify_all()
        self._deliver()

    def deliver_stop(self, deliver: Callable[[Goto], None]) -> None:
        """Call ``deliver`` when the rank is to end, in a program that has reached no boundary by then: it may have
        none. On the service thread, or here where the request came already."""
        with self._changed:
            self._deliver_stop = deliver
        self._deliver()

    def _deliver(self) -> None:
        with self._changed:
            deliver, target = self._deliver_stop, self._target
            if deliver is None or target is None or target.action != "stop" or self._passed:
                return
            self._deliver_stop = None
        deliver(target)

    def open(self) -> None:
        """Release any hold: the run is ending. Service thread."""
        with self._changed:
            self._hold = self._target = None
            self._changed.notify_all()

    def cross(self) -> BoundaryCrossing:
        """Pass one boundary; return the action there. Training thread."""
        with self._changed:
            self._passed += 1
            return self._here() if self._hold is not None else _GO_ON

    def stay(self, arrived: Callable[[int, int], None]) -> BoundaryCrossing:
        """Wait at a boundary that was reached with "step" to be sent on; calls ``arrived`` with it. Training thread."""
        with self._changed:
            if self._hold is None:
                return _GO_ON
            target = self._target
            if target is not None and target.action == "step" and target.boundary <= self._passed:
                self._target = None  # a hold that came while the report was made stays
                arrived(self._hold, self._passed)
            return self._here()

    def _here(self) -> BoundaryCrossing:
        self._changed.wait_for(lambda: self._hold is None or self._target is not None)
        target = self._target
        if self._hold is None or target is None:
            return _GO_ON
        if target.action == "go":
            self._hold = self._target = None
        elif self._passed < target.boundary:
            return _GO_ON
        elif target.action == "stop":
            self._hold = self._target = None
        return BoundaryCrossing(target.action, target.reason, target.preemption, target.resize_to)


class StopRun(BaseException):
    """Raised at the agreed boundary to end the user's function early. Not an ``Exception``: a loop's own
    ``except Exception`` must not keep the run going."""


class StopProcess(StopRun):
    """Raised in a rank that has reached no boundary: its process exits at once, so that ranks waiting for it in a
    collective notice it."""


class Boundaries:
    """The behaviour of a loop at its boundaries: continue, save first, or end. Training thread only.

    A loop whose state is registered ends at the agreed report, which saves it. One that calls ``should_checkpoint`` is
    not ended before that returned True: it saves, and ends at the report that follows. The same holds for one that
    checks for a preemption, where there is one. Any other ends at the agreed report. Every rank crosses the same
    boundaries in the same order, so all come to the same end.
    """

    def __init__(
        self,
        gate: Gate,
        is_registered: Callable[[], bool] = lambda: False,
        arrived: Callable[[int, int], None] = lambda hold, boundary: None,
    ) -> None:
        """``arrived`` is called with hold and boundary where this rank waits to be sent on."""
        self._gate, self._is_registered, self._arrived = gate, is_registered, arrived
        gate.can_save = lambda: self._checks_save or self._is_registered()
        self._stop_reason = ""
        self._checks_save = self._checks_preemption = self._was_notified = self._steps = False
        #: The state since the newest agreed boundary: the same on every rank at the same place of its loop.
        self.preemption: Preemption | None = None
        self.resize_to = 0

    def check_save(self) -> bool:
        """Pass a boundary at which the loop asks what to do; return True when it should save now."""
        self._checks_save = True
        self._take(self._gate.cross())
        self._stay()
        self._was_notified |= bool(self._stop_reason)
        return bool(self._stop_reason)

    def check_preemption(self) -> Preemption | None:
        """Pass a boundary at which the loop checks for a preemption."""
        self._checks_preemption = True
        self._take(self._gate.cross())
        self._stay()
        self._was_notified |= bool(self._stop_reason) and self.preemption is not None
        return self.preemption

    def enter_report(self) -> bool:
        """Pass the boundary of a report; return True when the registered state should be saved with it."""
        self._take(self._gate.cross())
        return bool(self._stop_reason) and not self._was_notified and self._is_registered()

    def leave_report(self) -> None:
        """Leave the boundary of a report. Raises :class:`StopRun` where the run ends here."""
        self._stay()
        should_be_notified = self._checks_save or (self._checks_preemption and self.preemption is not None)
        if self._stop_reason and (self._was_notified or not should_be_notified or self._is_registered()):
            raise StopRun(self._stop_reason)

    def _stay(self) -> None:
        """Wait where "step" has brought the rank. Raises :class:`StopRun` where it ends: its work is saved."""
        while self._steps:
            self._take(self._gate.stay(self._arrived))
            if self._stop_reason:
                raise StopRun(self._stop_reason)

    def _take(self, crossing: BoundaryCrossing) -> None:
        self._steps = crossing.action == "step"
        if crossing.action == "stop":
            self._stop_reason = crossing.reason or "the run is ending"
        if crossing is not _GO_ON:
            self.preemption = crossing.preemption or self.preemption
            self.resize_to = crossing.resize_to
