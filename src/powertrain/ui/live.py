"""Server-sent events: viewers are notified that a run has changed, and fetch what they show of it.

All viewers of a run share one task that looks for changes. It looks less often where looking, or making what viewers
fetch, takes long: the dashboard of a run takes little of its machine's time.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from starlette.concurrency import run_in_threadpool

from powertrain.errors import PowertrainError
from powertrain.text.loggers import module_logger

_logger = module_logger(__name__)

#: Seconds between two looks, and the most of them; a look takes at most this share of the time.
LOOK_INTERVAL_S = 1.0
_LONGEST_INTERVAL_S = 15.0
_LOAD = 0.05
#: Seconds after which a silent connection gets a comment, so that its end is noticed.
_COMMENT_INTERVAL_S = 10.0


def version_text(version: object) -> str:
    """Return a version as viewers get it: in events, and in the replies that they belong to."""
    return hashlib.sha256(repr(version).encode("utf-8", "backslashreplace")).hexdigest()[:16]


class ChangeFeed:
    """Changes of one run, or of the list of runs, for any number of viewers.

    Args:
        version: Returns a value that changes with the run. Called in a thread.
        interval: Seconds between two looks at least.
        longest: The most seconds between two looks, however long one takes.
    """

    def __init__(
        self,
        version: Callable[[], object],
        interval: float = LOOK_INTERVAL_S,
        longest: float = _LONGEST_INTERVAL_S,
    ) -> None:
        self._version, self._interval, self._longest = version, interval, longest
        self._viewers: set[asyncio.Queue[str]] = set()
        self._task: asyncio.Task[None] | None = None
        self._newest = ""
        #: Seconds that replies about the newest version took.
        self.seconds_spent = 0.0

    @property
    def is_idle(self) -> bool:
        """Whether it has no viewers."""
        return not self._viewers

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield an event for the current version, and for each one after it."""
        queue: asyncio.Queue[str] = asyncio.Queue()
        self._viewers.add(queue)
        if self._newest:
            queue.put_nowait(self._newest)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look())
        try:
            yield b"retry: 2000\n\n"
            while True:
                try:
                    version = await asyncio.wait_for(queue.get(), _COMMENT_INTERVAL_S)
                except (TimeoutError, asyncio.TimeoutError):
                    yield b": still here\n\n"
                    continue
                while not queue.empty():  # a viewer that is slow needs only the newest
                    version = queue.get_nowait()
                yield f"event: changed\ndata: {version}\n\n".encode()
        finally:
            self._viewers.discard(queue)
            if not self._viewers and self._task is not None:
                # Not awaited: a viewer that comes meanwhile would find a task that is about to end.
                task, self._task, self._newest = self._task, None, ""
                task.cancel()

    async def _look(self) -> None:
        while True:
            began = time.monotonic()
            version = await run_in_threadpool(self._version_text)
            if version != self._newest:
                self._newest = version
                for queue in self._viewers:
                    queue.put_nowait(version)
            took = time.monotonic() - began + self.seconds_spent
            self.seconds_spent = 0.0
            await asyncio.sleep(min(max(self._interval, took / _LOAD), self._longest))

    def _version_text(self) -> str:
        try:
            return version_text(self._version())
        except (PowertrainError, OSError):
            return "gone"
        except Exception:  # a bug of ours: the other viewers and later looks must not pay for it
            _logger.exception("The version of a run could not be read.")
            return self._newest


async def events_while(feed: ChangeFeed, is_permitted: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Yield the events of a feed until they are not permitted any more, as for a browser that was signed out."""
    async with aclosing(feed.events()) as events:
        async for event in events:
            if not is_permitted():
                return
            yield event


class ChangeFeeds:
    """The feed of each run that has viewers.

    Args:
        interval: Seconds between two looks at least.
        is_near: Whether looking costs only this machine's time. Requests to remote storage are also paid for, so there
            the time between two looks has no upper bound.
    """

    def __init__(self, interval: float = LOOK_INTERVAL_S, *, is_near: bool = True) -> None:
        self._interval = interval
        self._longest = _LONGEST_INTERVAL_S if is_near else math.inf
        self._feeds: dict[str, ChangeFeed] = {}

    def of(self, name: str, version: Callable[[], object]) -> ChangeFeed:
        """Return the feed of a run, or of the list of runs for ""; those of others without viewers are dropped."""
        self._feeds = {key: feed for key, feed in self._feeds.items() if key == name or not feed.is_idle}
        return self._feeds.setdefault(name, ChangeFeed(version, self._interval, self._longest))

    def note(self, name: str, seconds: float) -> None:
        """Count the time that a reply about a run took."""
        feed = self._feeds.get(name)
        if feed is not None:
            feed.seconds_spent += seconds
