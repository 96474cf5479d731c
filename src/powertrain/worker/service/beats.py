"""Timing of heartbeats: with a report, if reports are about as frequent, and alone otherwise.

A rank that reports once a second thus sends one message a second, and not two. One that reports more often sends many
anyway, and its heartbeats keep their own times: a heartbeat that rides with a report shows the main thread only inside
the report.

Of thousands of ranks each sends less often than that. Then it is the other way round: reports wait for the next
heartbeat and ride with it, unless another rank waits for them. Pure: times in, decisions out.
"""

from __future__ import annotations

from powertrain.wire.envelope import FromWorker
from powertrain.wire.values import Point

#: Parts of the usual time between two beats. Reports whose distance is between the first two are worth waiting for.
_OFTEN, _SELDOM = 0.5, 1.25
#: From this part on a beat rides; and it waits for a report that is late by this part, but not beyond the last.
_FROM, _LATE, _UNTIL = 0.8, 0.25, 1.5
#: Reports that may wait for a beat. The controller keeps open rows of all ranks in memory: none may fall far behind.
MOST_GATHERED = 16
#: Multiples of it, less their whole part, lie evenly over the interval, however many there are.
_GOLDEN = 0.6180339887498949


class BeatTimes:
    """The times of one rank's beats, which come ``every`` so many seconds."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._last = self._other = float("-inf")
        #: Seconds between the last two reports.
        self._distance = 0.0

    def on_other_sent(self, now: float) -> None:
        """Note that reports are sent now."""
        self._distance, self._other = now - self._other, now

    @property
    def alone_at(self) -> float:
        """Return when the next heartbeat is sent alone, if nothing is sent before."""
        usual, expected = self._last + self._every, self._other + self._distance
        if not self._is_worth_waiting() or expected < self._last:
            return usual
        return max(usual, min(expected + _LATE * self._every, self._last + _UNTIL * self._every))

    def is_due(self, now: float, *, rides: bool) -> bool:
        """Return True when a heartbeat is due; ``rides`` where reports are sent now."""
        if rides and self._is_worth_waiting():
            return now >= self._last + _FROM * self._every
        return now >= self.alone_at

    def sent(self, now: float) -> None:
        """Note that a heartbeat was sent."""
        self._last = now

    def _is_worth_waiting(self) -> bool:
        return _OFTEN * self._every <= self._distance <= _SELDOM * self._every


class SharedTimes:
    """The times of one rank's beats among thousands: ``every`` so many seconds, at a moment of the rank's own.

    Only the newest state of a rank is of use, so skipped heartbeats lose nothing. Other messages do not move the times:
    after a barrier of all ranks, heartbeats are as spread as before.
    """

    def __init__(self, every: float, rank: int, now: float) -> None:
        self._every = every
        #: When the next heartbeat is sent, with all gathered reports.
        self.alone_at = now + every * (rank * _GOLDEN % 1.0)

    def on_other_sent(self, now: float) -> None:
        """Do nothing: other messages do not move the times."""

    def is_due(self, now: float, *, rides: bool) -> bool:
        """Return True when a heartbeat is due, whether or not it ``rides``."""
        return now >= self.alone_at

    def sent(self, now: float) -> None:
        """Note that a heartbeat was sent. Times that have passed meanwhile are skipped."""
        missed = max(0.0, now - self.alone_at) // self._every
        self.alone_at += (missed + 1) * self._every


def can_gather(message: FromWorker) -> bool:
    """Return True when no rank waits for ``message``: a report without barrier or share of a checkpoint."""
    return isinstance(message, Point) and message.part is None and not message.barrier
