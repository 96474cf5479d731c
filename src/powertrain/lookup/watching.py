"""Follow a run by its journal: new facts, and its end.

Facts are read as they are appended. If the run is live on this machine and its storage has no real files, they
are read where they grow, and once it has ended from storage.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from powertrain.lookup.finding import FoundRun
from powertrain.lookup.summaries import was_running
from powertrain.run import events as ev
from powertrain.run import lifecycle
from powertrain.run.record import journal
from powertrain.run.record.journal_lines import JournalLines
from powertrain.storage import Storage
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT, join_within, too_large
from powertrain.storage.files.descriptors import open_below
from powertrain.terminal.text import duration

#: Endings of a run as text.
_ENDED = {
    lifecycle.FINISHED: "has finished",
    lifecycle.STOPPED: "was stopped",
    lifecycle.FAILED: "has failed",
    lifecycle.PREEMPTED: "was preempted",
}


class JournalTail:
    """The facts of a run or a sweep as they are appended to its journal.

    Args:
        found: The run or sweep.
        decode: Turns a line into a fact.
    """

    def __init__(self, found: FoundRun, decode: Callable[[bytes], Any] = ev.decode) -> None:
        self._found, self._decode = found, decode
        self._places = found.places
        #: Bytes of each journal file that have been read.
        self._read: dict[str, int] = {}

    def new_facts(self) -> list[Any]:
        """Return the facts that were appended since the last call."""
        facts: list[Any] = []
        for key, (size, place) in sorted(self._files().items()):
            if size > self._read.get(key, 0):
                facts += self._facts_of(place, key)
        return facts

    def _files(self) -> dict[str, tuple[int, Storage]]:
        """Return the journal's files with their sizes, each where it is largest.

        After the first call, remote storage is listed again only once no file grows on this machine any more.
        """
        found: dict[str, tuple[int, Storage]] = {}
        for place in self._places:
            if found and self._read:
                break
            for key, size in place.list("journal"):
                if key.endswith(".jsonl") and (key not in found or found[key][0] < size):
                    found[key] = size, place
        return found

    def _facts_of(self, place: Storage, key: str) -> list[Any]:
        """Return the facts of new complete lines of a file."""
        before = self._read.get(key, 0)
        try:
            new = _content_from(place, key, before)
        except FileNotFoundError:  # it has just been moved from where it grew
            return []
        except OSError as error:
            raise journal.unreadable(place, key, error) from error
        whole = new[: new.rfind(b"\n") + 1]
        self._read[key] = before + len(whole)
        lines = JournalLines(decode=self._decode)
        lines.feed(whole)
        journal.warn_of_damage(place, key, lines.damaged)
        if before == 0 and self._found.live is None and not self._found.is_sweep:
            journal.warn_if_cut(place, key, lines.events, len(whole) < len(new))
        return lines.events


class RunWatch:
    """Follows one run by its journal. ``run`` is its state so far."""

    def __init__(self, found: FoundRun) -> None:
        self._found = found
        self._tail = JournalTail(found)
        self.run = lifecycle.RunState()
        self._start: ev.RunStarted | None = None
        self._end: ev.Ended | None = None
        #: True once the process that ran it is known to be gone.
        self._is_gone = False

    def look(self) -> list[ev.Event]:
        """Return the facts since the last call."""
        facts = self._new_facts()
        if self._is_behind or self.is_over or not self._process_is_gone():
            return facts
        facts += self._new_facts()  # facts that it wrote before it exited
        self._is_gone = not self.has_ended
        return facts

    @property
    def has_ended(self) -> bool:
        """Whether its journal records its end."""
        return self.run.state in lifecycle.ENDED and not self._is_behind

    @property
    def _is_behind(self) -> bool:
        """Whether the journal has only facts of earlier starts than the live one of this machine."""
        return self._found.live is not None and self.run.lease < self._found.live.card.lease

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or its process is gone."""
        return self.has_ended or self._is_gone

    @property
    def has_stopped(self) -> bool:
        """Whether it ended by a stop request."""
        return self.run.state == lifecycle.STOPPED

    def continuing(self) -> str:
        """Return how to resume it; "" if it has no checkpoint."""
        if not self.run.committed:
            return ""
        row, checkpoint = self.run.committed[-1]
        return f"Start the same script again to resume from {checkpoint} (row {row})."

    @property
    def engine(self) -> str:
        return self._start.engine if self._start is not None else ""

    def ending(self) -> str:
        """Return one sentence about its end, or that its process is gone."""
        name = self._found.name
        if self._end is None or not self.has_ended:
            pid = self._start.pid if self._start is not None else 0
            return (
                f"The run {name!r} is no longer running: its process ({pid}) is gone, and left it "
                f"{self.run.state}. Start the same script again to resume it."
            )
        reason = f": {self._end.reason.rstrip('.')}" if self._end.reason else ""
        return f"The run {name!r} {_ENDED[self._end.state]} after {duration(self._end.seconds)}{reason}."

    def _new_facts(self) -> list[ev.Event]:
        facts = self._tail.new_facts()
        for fact in facts:
            self._take(fact)
        return facts

    def _take(self, fact: ev.Event) -> None:
        try:
            self.run = lifecycle.apply(self.run, fact)
        except lifecycle.IllegalTransition:
            return
        if isinstance(fact, ev.RunStarted):
            self._start, self._end, self._is_gone = fact, None, False
        elif isinstance(fact, ev.Ended):
            self._end = fact

    def _process_is_gone(self) -> bool:
        """Return whether its process on this machine is gone; False for another machine."""
        start = self._start
        return (
            start is not None
            and start.host == socket.gethostname()
            and not was_running(start.pid, start.time)
        )


def _content_from(place: Storage, key: str, start: int) -> bytes:
    path = place.local_path(key)
    if path is None:
        return place.get(key, limit=LARGE_RECORD_BYTES_LIMIT)[start:]
    with open(open_below(path, len(key.split("/"))), "rb") as file:
        if os.fstat(file.fileno()).st_size > LARGE_RECORD_BYTES_LIMIT:
            raise too_large(key, LARGE_RECORD_BYTES_LIMIT)
        file.seek(start)
        return join_within(iter(lambda: file.read(1 << 20), b""), key, LARGE_RECORD_BYTES_LIMIT)
