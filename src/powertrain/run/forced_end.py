"""The forced end of a ``fit`` after a second request to end: an exception in the main thread.

The controller ends a run at once when it is asked twice, and bounds each wait on the way. But it may itself be stuck:
in a callback of the user's, or in storage that does not answer. Then :class:`ForcedEnd` raises :class:`EndedAtOnce`
where the main thread is, and again while what unwinds is stuck too. How long it waits is decided by
:func:`next_force`, which is pure.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

#: Seconds for the controller to handle the second request; one that does not is stuck.
ANSWER_TIMEOUT_S = 2.0
#: Seconds for a controller that has handled it to end the run.
END_TIMEOUT_S = 12.0
#: Seconds between two exceptions: unwinding ends processes and removes directories.
FORCE_INTERVAL_S = 3.0
#: Seconds between two checks whether the controller has handled the request.
_LOOK_INTERVAL_S = 0.2


class EndedAtOnce(BaseException):
    """Raised in the main thread: the run must end now, whatever it waits for. Never leaves ``fit``."""


@dataclass(frozen=True)
class ForcedEndRequest:
    """A request to end: its kind ("interrupt" or "notice") and when it came (monotonic seconds)."""

    kind: str
    at: float


def second_request(requests: Sequence[ForcedEndRequest], same_within: float) -> ForcedEndRequest | None:
    """Return the second request to end, or None.

    Notices within ``same_within`` seconds of the one before are the same: a scheduler and a launcher may both send
    one. An interrupt and a notice do not add up, because a notice has a grace period of its own.
    """
    last: dict[str, float] = {}
    for request in requests:
        before = last.get(request.kind)
        if before is None or (request.kind == "notice" and request.at - before <= same_within):
            last.setdefault(request.kind, request.at)
            continue
        return request
    return None


def next_force(second: float, forced: Sequence[float], *, is_noted: bool) -> float:
    """Return when (monotonic seconds) the main thread is to be interrupted next.

    Args:
        second: When the second request came.
        forced: When it was interrupted before.
        is_noted: True when the controller has taken note of the second request.
    """
    if forced:
        return forced[-1] + FORCE_INTERVAL_S
    return second + (END_TIMEOUT_S if is_noted else ANSWER_TIMEOUT_S)


class ForcedEnd:
    """Counts the requests to end one ``fit`` and, after the second, sees to it that it ends.

    :meth:`request` is called from signal handlers, which run in the main thread.
    """

    def __init__(self, is_noted: Callable[[], bool], same_within: float, release: Callable[[], None]) -> None:
        """Args:
        is_noted: Tells whether the controller has taken note of the second request. Any thread.
        same_within: See :func:`second_request`.
        release: Called before the main thread is interrupted, on another thread: lets go of what it waits for.
        """
        self._is_noted, self._same_within, self._release = is_noted, same_within, release
        self._requests: list[ForcedEndRequest] = []
        self._forced: list[float] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._is_due = False
        self._thread: threading.Thread | None = None

    @property
    def kind(self) -> str:
        """The kind of the second request; "" before it came."""
        second = second_request(self._requests, self._same_within)
        return second.kind if second is not None else ""

    def request(self, kind: str) -> None:
        """Take note of a request to end. Raises :class:`EndedAtOnce` when it is due. Main thread only."""
        if self._is_due:
            self._is_due = False
            raise EndedAtOnce
        if self._over.is_set():
            return
        self._requests.append(ForcedEndRequest(kind, time.monotonic()))
        if self._thread is None and self.kind:
            self._thread = threading.Thread(target=self._watch, name="powertrain-forced-end", daemon=True)
            self._thread.start()

    @property
    def has_forced(self) -> bool:
        """Return True once the main thread was interrupted."""
        return bool(self._forced)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Force what runs in the block, and nothing after it. Whatever the forced block raises is
        :class:`EndedAtOnce`."""
        try:
            yield
        except BaseException:
            if self._forced:  # what failed while it was unwound does not matter any more
                raise EndedAtOnce from None
            raise
        finally:
            with self._lock:
                self._over.set()
                self._is_due = False
            if self._thread is not None:
                self._thread.join()

    def _watch(self) -> None:
        second = second_request(self._requests, self._same_within)
        assert second is not None
        while not self._over.wait(_LOOK_INTERVAL_S):
            if time.monotonic() >= next_force(second.at, self._forced, is_noted=self._is_noted()):
                self._force()

    def _force(self) -> None:
        self._forced.append(time.monotonic())
        self._release()
        with self._lock:
            if not self._over.is_set():
                self._is_due = True
                # Its handler runs in the main thread, also where that waits for a lock or in a system call.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
