"""The run's facts, in the order in which they happened, kept so that replaying them rebuilds the run.

Each controller appends to a file of its own, ``journal/{lease}-000001.jsonl``, one JSON object a line, one
``write`` a fact: what was appended survives the death of the process at once. Facts with consequences (a commit, a
failure, a loss, the end) also survive the death of the machine when ``append`` returns.

Reading forgives: a line cut short by a crash and facts that only a later version knows are passed over and
counted. A line that is damaged, and a file that lacks its end although its controller wrote one, are warned about.
Facts of a controller never mix with those of the next, because its number is in the file's name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.errors import StorageError
from powertrain.run import events as ev
from powertrain.run.lifecycle import IllegalTransition, RunState, apply
from powertrain.run.record.journal_lines import JournalLines, encode_line
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT
from powertrain.storage.boundaries import crossing
from powertrain.storage.files.descriptors import open_below
from powertrain.storage.local import flush_directory
from powertrain.text.loggers import module_logger

#: Facts that must survive the death of the machine, not only of the process.
_DURABLE = (ev.Committed, ev.Failed, ev.Lost, ev.Ended)
#: Names that a new journal tries before it gives up.
_FILES_PER_LEASE = 100
_logger = module_logger(__name__)


class Journal:
    """The writing end, for the holder of lease ``lease_number``. Any thread may append."""

    def __init__(
        self,
        storage: Storage,
        lease_number: int,
        encode: Callable[[Any], bytes] = encode_line,
        durable: tuple[type, ...] = _DURABLE,
    ) -> None:
        """Begin a new file. ``encode`` makes a line of a fact; facts of the ``durable`` types survive a power cut."""
        self._guard = threading.Lock()
        self._encode, self._durable = encode, durable
        #: True when the file ends in half a line, left by a write that found the disk full.
        self._torn = False
        self._descriptor = _create(storage, lease_number)

    def append(self, event: Any) -> None:
        """Keep one fact. Raises ``OSError`` when storage refuses it; later facts are not harmed by that."""
        line = self._encode(event)
        with self._guard:
            if self._torn:
                line = b"\n" + line
            written = os.write(self._descriptor, line)
            self._torn = written < len(line)
            if self._torn:
                raise OSError(f"only {written} of {len(line)} bytes of a fact were written to the journal")
            if isinstance(event, self._durable):
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Make everything durable and stop. Again is fine."""
        with self._guard:
            if self._descriptor >= 0:
                os.fsync(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = -1


def _create(storage: Storage, lease_number: int) -> int:
    """Return a descriptor of a new file for a new lease. An existing one is of another writer, and is left alone."""
    for number in range(1, _FILES_PER_LEASE + 1):
        path = storage.local_path(f"journal/{lease_number:04d}-{number:06d}.jsonl")
        if path is None:
            raise StorageError(
                f"A journal cannot be appended to at {without_secrets(storage.uri)!r}: it needs real files. Use a "
                "local or mounted path."
            )
        crossing("write", str(path))
        try:
            descriptor = open_below(path, 3, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            continue
        flush_directory(path.parent)
        return descriptor
    raise StorageError(
        f"A journal cannot be begun in {without_secrets(storage.uri)!r}: {_FILES_PER_LEASE} files with names for it "
        "are there already, which this run has not written. Remove them, or choose another name for the run."
    )


@dataclass(frozen=True)
class Reading:
    """The content of a journal, and how many lines could not be used."""

    events: list[ev.Event]
    #: Lines cut short or damaged.
    torn: int = 0
    #: Whole lines with facts that this version does not know.
    unknown: int = 0


def read(storage: Storage) -> list[ev.Event]:
    """Return all facts of all controllers, oldest first."""
    return read_counting(storage).events


def read_counting(storage: Storage) -> Reading:
    """Read as :func:`read` does, and count the lines that were passed over.

    Raises:
        StorageError: A file of the journal cannot be read.
    """
    events: list[ev.Event] = []
    torn = unknown = 0
    for entry in storage.list("journal"):
        if not entry.key.endswith(".jsonl"):
            continue
        lines = JournalLines()
        try:
            lines.feed(storage.get(entry.key, limit=LARGE_RECORD_BYTES_LIMIT))
        except FileNotFoundError:
            continue  # moved or deleted since it was listed
        except OSError as error:
            raise unreadable(storage, entry.key, error) from error
        was_cut = lines.finish()
        warn_of_damage(storage, entry.key, lines.damaged)
        warn_if_cut(storage, entry.key, lines.events, was_cut)
        events += lines.events
        torn, unknown = torn + lines.damaged + was_cut, unknown + lines.unknown
    return Reading(events, torn, unknown)


def unreadable(storage: Storage, key: str, error: OSError) -> StorageError:
    """Return the error for a file of the journal that exists and cannot be read."""
    why = error.strerror or str(error) or type(error).__name__
    return StorageError(
        f"The journal file {key!r} of the run at {without_secrets(storage.uri)!r} cannot be read: {why}. Make it "
        "readable, or move the file away to go on without what it holds."
    )


def warn_of_damage(storage: Storage, key: str, damaged: int) -> None:
    """Warn of lines that were passed over because they are not as they were written."""
    if damaged:
        _logger.warning(
            "The journal file %r of the run at %r is damaged: %d of its lines are not as they were written and were "
            "passed over.",
            key,
            without_secrets(storage.uri),
            damaged,
        )


def warn_if_cut(storage: Storage, key: str, events: Sequence[ev.Event], ends_within_line: bool) -> None:
    """Warn of a file without its last fact whose controller gave its lease back, which it does after that fact.

    A start that failed before its first fact leaves an empty file, but neither metrics nor telemetry.
    """
    if any(isinstance(event, ev.Ended) for event in events):
        return
    lease = key.removeprefix("journal/").partition("-")[0]
    if not any(entry.key == f"lease/{lease}.released" for entry in storage.list("lease")):
        return
    recorded = (entry.key for prefix in ("metrics", "telemetry") for entry in storage.list(prefix))
    if events or ends_within_line or any(own.partition("/")[2].startswith(f"{lease}-") for own in recorded):
        _logger.warning(
            "The journal file %r of the run at %r lacks its end, so how that start of the run went on is not known: "
            "the file was cut short, or storage did not take its last lines.",
            key,
            without_secrets(storage.uri),
        )


def replay(events: Iterable[ev.Event]) -> RunState:
    """Return the state that the facts lead to.

    A fact that cannot have happened in the state before it (its controller was cut off, or a line before it
    was lost) is passed over; ``facts`` of the result counts those that were not.
    """
    run = RunState()
    for event in events:
        try:
            run = apply(run, event)
        except IllegalTransition:
            continue
    return run
