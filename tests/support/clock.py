"""A clock that stands still until a test moves it."""

from __future__ import annotations


class ManualClock:
    """Call it for the time. Stands in for ``time.monotonic`` or ``time.time`` where a function takes its clock."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move on and return the new time. Time does not run backwards."""
        if seconds < 0:
            raise ValueError(f"A clock cannot be moved by {seconds:g} s: time does not run backwards.")
        self._now += seconds
        return self._now
