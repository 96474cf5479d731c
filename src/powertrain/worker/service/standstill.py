"""Notice that this process stood still, so that silence is not taken for a hang."""

from __future__ import annotations

from collections import deque


class StoodStill:
    """Times in which the whole process stood still: its side thread was woken later than it had asked to be."""

    #: Seconds late that a busy machine explains.
    _USUAL = 1.0

    def __init__(self) -> None:
        #: (when it ended, seconds), oldest first.
        self._times: deque[tuple[float, float]] = deque(maxlen=100)

    def woke(self, due: float, now: float) -> None:
        """Note that the thread was to be woken at ``due`` and was woken ``now``."""
        if now - due > self._USUAL:
            self._times.append((now, now - due))

    def since(self, moment: float) -> float:
        """Return how many seconds after ``moment`` the process stood still. Forgets earlier ones."""
        while self._times and self._times[0][0] <= moment:
            self._times.popleft()
        return sum(min(seconds, ended - moment) for ended, seconds in self._times)
