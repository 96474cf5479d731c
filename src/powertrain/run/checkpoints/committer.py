"""The thread on which a run talks to its storage about checkpoints, so that the controller never waits for it.

Work is done in order; each outcome goes to the controller's inbox. Work that storage refuses is retried until a
deadline.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from powertrain.checkpoint.uploader import FINAL, pause_before_retry
from powertrain.storage.full_disk import describe_write_error, full_place


@dataclass(frozen=True)
class Done:
    """The end of a piece of work: call ``then``, on the controller's thread, with the result or the error."""

    then: Callable[[Any, BaseException | None], None]
    result: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Trouble:
    """A piece of work that storage refuses; it is retried."""

    say: Callable[[str, str], None]
    reason: str
    #: The file system that is full; "" for the storage itself.
    place: str = ""


@dataclass(frozen=True)
class _Work:
    do: Callable[[], Any]
    then: Callable[[Any, BaseException | None], None]
    trouble: Callable[[str, str], None]
    persist: bool
    place: str


class Committer:
    """One thread, started with the first piece of work."""

    def __init__(self, post: Callable[[Done | Trouble], None], timeout: float) -> None:
        """``post`` is the controller's inbox; ``timeout`` the seconds after which storage that refuses is given up."""
        self._post, self._timeout = post, timeout
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def submit(
        self,
        do: Callable[[], Any],
        then: Callable[[Any, BaseException | None], None],
        trouble: Callable[[str, str], None] = lambda _reason, _place: None,
        *,
        persist: bool = True,
        place: str = "",
    ) -> None:
        """Do this after everything submitted before. ``OSError`` is tried again; any other error is final.

        Optional work, such as a deletion, does not ``persist``: others wait behind it. ``trouble``
        is called with the reason and the full file system; ``place`` is the directory that is written to.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="powertrain-committer", daemon=True)
            self._thread.start()
        self._work.put(_Work(do, then, trouble, persist, place))

    def close(self, within: float) -> None:
        """Do the remaining work, for at most so many seconds, and stop."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(within)
            self._closing.set()
            self._thread.join(1.0)

    def _run(self) -> None:
        while (work := self._work.get()) is not None and not self._closing.is_set():
            try:
                done = Done(work.then, result=self._persist(work))
            except BaseException as error:
                done = Done(work.then, error=error)
            self._post(done)

    def _persist(self, work: _Work) -> Any:
        deadline, tries = time.monotonic() + self._timeout, 0
        while True:
            try:
                return work.do()
            except OSError as error:
                pause = pause_before_retry(tries, random.random())
                final = not work.persist or error.errno in FINAL
                if final or self._closing.is_set() or time.monotonic() + pause > deadline:
                    raise
                tries += 1
                reason, place = describe_write_error(error, work.place), full_place(error, work.place)
                self._post(Trouble(work.trouble, reason, place))
                self._closing.wait(pause)
