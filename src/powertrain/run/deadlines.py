"""The clock of a run, and the points in time at which its controller must act.

Everything that runs on the controller's thread reads the time here, so a test can move a clock instead of waiting.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any, Protocol

#: Seconds by which the loop may be late before it is clear that this process itself was not running.
_STALL_S = 1.0


class Clock(Protocol):
    """A source of time that can also wait."""

    def monotonic(self) -> float:
        """Return seconds that never run backwards."""
        ...

    def time(self) -> float:
        """Return Unix seconds."""
        ...

    def wait(self, inbox: queue.SimpleQueue[Any], until: float | None) -> Any:
        """Return the next item of ``inbox``. Raises ``queue.Empty`` at ``until`` (monotonic; None for never)."""
        ...


class SystemClock:
    """The clock of the operating system."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def wait(self, inbox: queue.SimpleQueue[Any], until: float | None) -> Any:
        return inbox.get(timeout=None if until is None else max(0.0, until - time.monotonic()))


class Deadline(StrEnum):
    """What is due."""

    START = "every forked process has sent its first message"
    CAUSE = "the cause of failures that are only echoes has arrived"
    LATE = "ranks that are behind are shown"
    ABSENT = "ranks that have never reported are declared absent"
    GRACE = "ranks that were asked to stop have reached a boundary"
    LAGGARDS = "ranks without any report have ended after the others"
    HOOKS = "the backend's shutdown hooks have returned"
    EXITS = "dismissed processes have exited"
    KILLED = "killed processes are gone"
    ABANDONED = "processes that survived a kill are given up"
    LAG = "a slow upload is reported"
    QUERIES = "a query for checkpoints is answered"
    SETTLED = "storage has taken all checkpoints"
    VALIDATION = "the running validation has ended"
    CAPACITY = "the engine has reported its capacity"
    SLOTS = "additional slots are granted"
    QUEUE = "requested slots are granted"
    RESERVATION = "one more reserved slot is granted"
    RESIZE = "the number of workers is changed"
    TOGETHER = "all ranks have reached the same boundary"
    WATCH = "the watchdog looks at the ranks"
    TURN = "a debugger shares the terminal"
    INSPECTIONS = "ranks have sent their stacks"
    PROFILES = "ranks have sent their profiles"
    RETRY = "the next attempt starts"


class Deadlines:
    """At most one point in time for each :class:`Deadline`. The controller's thread only."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._due: dict[Deadline, float] = {}
        #: Deadlines that do not run now, and the seconds left of those that were set.
        self._paused: dict[Deadline, float | None] = {}

    def now(self) -> float:
        """Return monotonic seconds."""
        return self.clock.monotonic()

    def set(self, name: Deadline, after: float) -> None:
        """Let ``name`` be due in ``after`` seconds, in place of what was set before."""
        if name in self._paused:
            self._paused[name] = after
        else:
            self._due[name] = self.now() + after

    def set_at(self, name: Deadline, when: float) -> None:
        """Let ``name`` be due at ``when`` (monotonic); never where that is infinite."""
        if when == float("inf"):
            self.cancel(name)
        else:
            self.set(name, when - self.now())

    def set_if_unset(self, name: Deadline, after: float) -> None:
        """Let ``name`` be due in ``after`` seconds unless it is set already."""
        if name not in self:
            self.set(name, after)

    def shorten(self, name: Deadline, after: float) -> None:
        """Let ``name`` be due in at most ``after`` seconds."""
        left = self.seconds_left(name)
        self.set(name, after if left is None else min(left, after))

    def cancel(self, *names: Deadline) -> None:
        for name in names:
            self._due.pop(name, None)
            if name in self._paused:
                self._paused[name] = None

    def seconds_left(self, name: Deadline) -> float | None:
        """Return the seconds until ``name`` is due; None where it is not set."""
        if name in self._paused:
            return self._paused[name]
        return self._due[name] - self.now() if name in self._due else None

    def __contains__(self, name: Deadline) -> bool:
        return name in self._due or self._paused.get(name) is not None

    def pause(self, names: Collection[Deadline]) -> None:
        """Stop the time of these: what is left of each runs on after :meth:`resume`."""
        self._paused = {name: self.seconds_left(name) for name in names}
        for name in names:
            self._due.pop(name, None)

    def resume(self) -> None:
        paused, self._paused = self._paused, {}
        for name, left in paused.items():
            if left is not None:
                self.set(name, left)

    def next(self, inbox: queue.SimpleQueue[Any], on_stall: Callable[[float], None]) -> Any:
        """Return the next item of ``inbox``, or the :class:`Deadline` that passed before one arrived.

        ``on_stall`` gets the seconds for which this process did not run, if it did not.
        """
        due = min(self._due.items(), key=lambda item: item[1], default=None)
        began = self.now()
        try:
            return self.clock.wait(inbox, None if due is None else due[1])
        except queue.Empty:
            assert due is not None
            del self._due[due[0]]
            return due[0]
        finally:
            late = 0.0 if due is None else self.now() - max(began, due[1])
            if late > _STALL_S:  # no rank hangs because of that
                on_stall(late)
