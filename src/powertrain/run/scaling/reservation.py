"""Slots for more workers, requested while the ranks of the running attempt train.

On a cluster the process of a new node may take a minute to start, so the ranks are stopped only when all slots for the
new size are granted. A cluster can also grant a part of them and never the rest, because another run was faster: after
a while the run grows by what it got, or gives up and tries again later.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from powertrain.engine import base
from powertrain.errors import EngineError, ResourceError
from powertrain.run.deadlines import Deadline, Deadlines

#: Seconds without a new slot after which the missing ones are not waited for any longer.
_PROGRESS_TIMEOUT_S = 120.0
#: Seconds until the next try after none came: at random, so that two runs that stand in each other's way part.
_RETRY_RANGE_S = (30.0, 90.0)


class Reservation:
    """The reserved slots of a run. The controller's thread only."""

    #: Called when all are granted, one is gone, or no more are waited for.
    on_changed: Callable[[], None]

    def __init__(self, engine: base.Engine, shape: base.SlotShape, deadlines: Deadlines) -> None:
        self._engine, self._shape, self._deadlines = engine, shape, deadlines
        self._claim: base.Claim | None = None
        self._count = 0
        self.slots: list[base.Slot] = []

    def ensure(self, count: int) -> bool:
        """Return True when ``count`` slots are reserved; otherwise request the missing ones."""
        missing = count - len(self.slots)
        if missing <= 0:
            return True
        if not self.is_awaiting(count):
            self.withdraw()
            try:
                self._claim = self._engine.request(missing, self._shape)
            except (ResourceError, EngineError):
                self._try_later()
                return False
            self._count = count
            self._deadlines.set(Deadline.RESERVATION, _PROGRESS_TIMEOUT_S)
        return False

    def is_awaiting(self, count: int) -> bool:
        """Return True while some of ``count`` slots are requested and not granted."""
        return self._claim is not None and self._count == count

    def owns_claim(self, claim: str) -> bool:
        """Return True when this claim is the open one."""
        return self._claim is not None and claim == self._claim.id

    def withdraw(self) -> None:
        """Do not wait for more slots; those that were granted stay."""
        self._deadlines.cancel(Deadline.RESERVATION)
        if self._claim is not None:
            self._engine.withdraw(self._claim)
            self._claim = None

    def cancel(self) -> None:
        """Give all back: the run does not grow now."""
        self.withdraw()
        self._engine.release(self.slots)
        self.slots = []

    def take(self, count: int) -> list[base.Slot]:
        """Return up to ``count`` granted slots, which are the caller's from now on."""
        taken, self.slots = self.slots[: max(0, count)], self.slots[max(0, count) :]
        return taken

    # -- events of the engine

    def on_granted(self, event: base.Granted) -> None:
        """Keep the slots."""
        self.slots += event.slots
        self._deadlines.set(Deadline.RESERVATION, _PROGRESS_TIMEOUT_S)
        if len(self.slots) >= self._count:
            self._deadlines.cancel(Deadline.RESERVATION)
            self._claim = None
            self.on_changed()

    def on_refused(self) -> None:
        """Try again later: the claim will never be met, but the next one may."""
        self.cancel()
        self._try_later()

    def on_overdue(self) -> None:
        """Continue with what was granted; where nothing was, try again later."""
        self.withdraw()
        if self.slots:
            self.on_changed()
        else:
            self._try_later()

    def forget(self, slot: base.Slot, *, is_lost: bool) -> bool:
        """Forget a slot that is lost or will be taken away; return False where it is not reserved."""
        if slot not in self.slots:
            return False
        self.slots.remove(slot)
        if not is_lost:
            self._engine.release([slot])
        self.withdraw()
        self.on_changed()
        return True

    def _try_later(self) -> None:
        self._deadlines.set(Deadline.RESIZE, random.uniform(*_RETRY_RANGE_S))
