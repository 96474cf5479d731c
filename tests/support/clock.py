"""A manual clock for tests."""

from __future__ import annotations

import queue
import threading
from typing import Any

_MOVED = object()


class ManualClock:
    """Replacement for ``time.monotonic``, ``time.time`` and the clock of a run. Call it for the time."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Condition()
        #: Queues with a waiting thread, to be woken when time advances.
        self._waiting: list[queue.SimpleQueue[Any]] = []

    def __call__(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Advance the clock and return the new time. Time never runs backwards. Any thread."""
        if seconds < 0:
            raise ValueError(f"A clock cannot be moved by {seconds:g} s: time does not run backwards.")
        with self._lock:
            self._now += seconds
            waiting = list(self._waiting)
        for inbox in waiting:
            inbox.put(_MOVED)
        return self._now

    def advance_when_waiting(self, seconds: float, timeout: float = 30.0) -> None:
        """Advance the clock once a thread waits on it with an empty inbox. Any other thread."""
        with self._lock:
            waits = self._lock.wait_for(lambda: any(inbox.empty() for inbox in self._waiting), timeout)
        assert waits, f"no thread waited on the clock within {timeout:g} s"
        self.advance(seconds)

    def wait(self, inbox: queue.SimpleQueue[Any], until: float | None) -> Any:
        """Return the next item of ``inbox``; raise ``queue.Empty`` once the clock has reached ``until``."""
        with self._lock:
            self._waiting.append(inbox)
            self._lock.notify_all()
        try:
            while True:
                is_due = until is not None and self._now >= until
                item = inbox.get_nowait() if is_due else inbox.get()
                if item is not _MOVED:
                    return item
        finally:
            with self._lock:
                self._waiting.remove(inbox)
