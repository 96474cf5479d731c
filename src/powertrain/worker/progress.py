"""Where a rank stands: counters that beats carry, and the gate at which a whole run can be held.

A **boundary** is a ``report`` or a ``should_checkpoint`` call: a place where the user's loop is between two
pieces of work. To act at the same one on every rank (stop, checkpoint, resize), the controller arms a hold on each
rank; each answers how many boundaries are behind it and will wait at its next. The greatest answer plus one is a
boundary that no rank has passed, so all are sent on to that one and act there. Nobody waits for longer than it
takes the side threads to answer, so a rank inside a collective is never left alone.
"""

from __future__ import annotations

import threading


class Progress:
    """Counters of one rank. Written by the training thread, read by the service thread."""

    __slots__ = ("batches", "phase", "reports", "steps")

    def __init__(self) -> None:
        self.reports = 0
        self.steps = 0
        self.batches = 0
        self.phase = "set-up"

    def step(self, *_: object) -> None:
        """An optimizer step was made. Takes and ignores a hook's arguments."""
        self.steps += 1

    def batch(self) -> None:
        """A loader gave a batch."""
        self.batches += 1

    def snapshot(self) -> tuple[int, int, int]:
        return self.reports, self.steps, self.batches

    def reset(self) -> None:
        """Begin a new attempt in the same process."""
        self.reports = self.steps = self.batches = 0
        self.phase = "set-up"


#: This process's counters.
progress = Progress()


class Gate:
    """Counts boundaries and holds the training thread at one when asked to."""

    GO = "go"

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passed = 0
        self._hold: int | None = None
        self._target: int | None = None
        self._action = self.GO
        self._reason = ""

    @property
    def passed(self) -> int:
        return self._passed

    def arm(self, hold: int) -> int:
        """Hold the next boundary; returns how many are behind. Service thread."""
        with self._changed:
            self._hold, self._target = hold, None
            return self._passed

    def go_to(self, hold: int, boundary: int, action: str, reason: str) -> None:
        """Let the rank run up to ``boundary`` and act there. Service thread."""
        with self._changed:
            if hold == self._hold:
                self._target, self._action, self._reason = boundary, action, reason
                self._changed.notify_all()

    def open(self) -> None:
        """Let go of any hold: the run is ending. Service thread."""
        with self._changed:
            self._hold = self._target = None
            self._changed.notify_all()

    def cross(self) -> tuple[str, str]:
        """Pass one boundary; returns the action to take there and its reason. Training thread."""
        with self._changed:
            self._passed += 1
            if self._hold is None:
                return self.GO, ""
            self._changed.wait_for(lambda: self._hold is None or self._target is not None)
            if self._hold is None or self._target is None or self._passed < self._target:
                return self.GO, ""
            self._hold = self._target = None
            return self._action, self._reason


class StopRun(BaseException):
    """Raised at the agreed boundary to end the user's function early. Not an ``Exception``: a loop's own
    ``except Exception`` must not keep the run going."""


class Boundaries:
    """What a loop does at its boundaries: go on, save first, or end. Training thread only.

    A loop that asks whether to checkpoint is not ended before it was told to: it saves, and ends at the report that
    follows. Every rank crosses the same boundaries in the same order, so all come to the same end.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._stop_reason = ""
        self._asks = self._told = False

    def cross(self, *, can_checkpoint: bool) -> bool:
        """Pass a boundary; True when the run asks for a checkpoint here. Raises :class:`StopRun` to end."""
        action, reason = self._gate.cross()
        if action == "stop":
            self._stop_reason = reason or "the run is ending"
        self._asks |= can_checkpoint
        if not self._stop_reason:
            return False
        if can_checkpoint:
            self._told = True
            return True
        if self._asks and not self._told:
            return False
        raise StopRun(self._stop_reason)
