"""The agreement of all ranks of an attempt on one boundary.

Each rank is asked to hold its next boundary and answers how many are behind it; all are sent on to the first that none
has passed, and act there together. A run whose loop cannot save on request can still be stopped so that nothing is
redone: its ranks are sent from one boundary to the next (``step``), and stopped at one whose checkpoint was committed.
They wait at each for no longer than a message takes.
"""

from __future__ import annotations

from collections.abc import Callable

from powertrain.run.workers.attempt import Attempt, BoundaryHold, Member
from powertrain.wire import from_controller
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import Goto, Preemption
from powertrain.wire.from_worker import Held, Reached


class Holds:
    """The agreements of a run, one at a time."""

    def __init__(self, send: Callable[[Member, FromController], None]) -> None:
        self._send = send
        self._count = 0

    def begin(
        self,
        attempt: Attempt,
        reason: str,
        *,
        needs_commit: bool = False,
        preemption: Preemption | None = None,
        resize_to: int = 0,
    ) -> None:
        """Ask the running ranks to hold. Replaces an earlier agreement."""
        self._count += 1
        attempt.hold = BoundaryHold(
            self._count,
            reason,
            {member.rank for member in attempt.running()},
            needs_commit=needs_commit,
            preemption=preemption,
            resize_to=resize_to,
        )
        for member in attempt.running():
            self._send(member, from_controller.Hold(hold=self._count))

    def on_held(self, member: Member, message: Held) -> bool:
        """Note a rank's answer; return True when all have answered and none has been sent on yet."""
        hold = member.attempt.hold
        if hold is None or hold.number != message.hold:
            return False
        hold.answers[member.rank] = message
        return self.is_ready(member.attempt)

    def is_ready(self, attempt: Attempt) -> bool:
        """Return True when all running ranks have answered and none has been sent on yet. Call again when a rank has
        ended."""
        if attempt.hold is None:
            return False
        attempt.hold.asked &= {member.rank for member in attempt.running()}
        return attempt.hold.agreed() is not None

    def send_on(self, attempt: Attempt, action: str) -> None:
        """Send all to the boundary that was agreed on, to ``stop`` or to wait (``step``) there."""
        hold = attempt.hold
        assert hold is not None
        hold.boundary = hold.agreed() or hold.boundary
        hold.stops = action == "stop"
        self._send_goto(attempt, hold.goto(action))

    def on_reached(self, member: Member, message: Reached) -> bool:
        """Note that a rank waits at the boundary; return True when it is the first."""
        hold = member.attempt.hold
        if hold is None or hold.number != message.hold or hold.boundary != message.boundary:
            return False
        hold.reached[member.rank] = message.row
        return len(hold.reached) == 1

    def row_of_all(self, attempt: Attempt) -> int | None:
        """Return the row at which all running ranks wait to be sent on; ``None`` while some have not arrived."""
        hold = attempt.hold
        if hold is None or not hold.reached:
            return None
        if not {member.rank for member in attempt.running()} <= hold.reached.keys():
            return None
        return max(hold.reached.values())

    def step(self, attempt: Attempt) -> None:
        """Send the waiting ranks one boundary further."""
        hold = attempt.hold
        assert hold is not None
        hold.boundary += 1
        hold.reached.clear()
        self._send_goto(attempt, hold.goto("step"))

    def stop_here(self, attempt: Attempt) -> None:
        """End the functions of the waiting ranks."""
        hold = attempt.hold
        assert hold is not None
        hold.reached.clear()
        hold.stops = True
        self._send_goto(attempt, hold.goto("stop"))

    def let_go(self, attempt: Attempt) -> None:
        """Cancel the agreement: all ranks continue."""
        if attempt.hold is not None:
            self._send_goto(attempt, attempt.hold.goto("go"))
            attempt.hold = None

    def _send_goto(self, attempt: Attempt, goto: Goto) -> None:
        for member in attempt.running():
            self._send(member, goto)
