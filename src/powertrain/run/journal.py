"""The run's facts, in the order in which they happened, kept so that replaying them rebuilds the run.

Each controller appends to a file of its own, ``journal/{lease}-000001.jsonl``, one JSON object a line, one
``write`` a fact: what was appended survives the death of the process at once. The facts that others act on
(a commit, a failure, a loss, the end) also survive the death of the machine when ``append`` returns.

Reading forgives: a line cut short by a crash and facts that only a later version knows are passed over and
counted. Facts of a controller never mix with those of the next, because its number is in the file's name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from powertrain.errors import StorageError
from powertrain.run import events as ev
from powertrain.run.lifecycle import IllegalTransition, RunState, apply
from powertrain.storage import Storage

#: Facts that must survive the death of the machine, not only of the process.
_DURABLE = (ev.Committed, ev.Failed, ev.Lost, ev.Ended)


class Journal:
    """The writing end, for the holder of lease ``lease_number``. Any thread may append."""

    def __init__(self, storage: Storage, lease_number: int) -> None:
        path = storage.local_path(f"journal/{lease_number:04d}-000001.jsonl")
        if path is None:
            raise StorageError(
                f"A journal cannot be appended to at {storage.uri!r}: it needs real files. Use a local or "
                "mounted path."
            )
        self._guard = threading.Lock()
        #: True when the file ends in half a line, left by a write that found the disk full.
        self._torn = False
        storage.put_if_absent(f"journal/{lease_number:04d}-000001.jsonl", b"")
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def append(self, event: ev.Event) -> None:
        """Keep one fact. Raises ``OSError`` when storage refuses it; later facts are not harmed by that."""
        line = ev.encode(event) + b"\n"
        with self._guard:
            if self._torn:
                line = b"\n" + line
            written = os.write(self._descriptor, line)
            self._torn = written < len(line)
            if self._torn:
                raise OSError(f"only {written} of {len(line)} bytes of a fact were written to the journal")
            if isinstance(event, _DURABLE):
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Make everything durable and stop. Again is fine."""
        with self._guard:
            if self._descriptor >= 0:
                os.fsync(self._descriptor)
                os.close(self._descriptor)
                self._descriptor = -1


@dataclass(frozen=True)
class Reading:
    """What a journal says, and how many lines could not be used."""

    events: list[ev.Event]
    #: Lines cut short or damaged.
    torn: int = 0
    #: Whole lines with facts that this version does not know.
    unknown: int = 0


def read(storage: Storage) -> list[ev.Event]:
    """All facts of all controllers, oldest first."""
    return read_counting(storage).events


def read_counting(storage: Storage) -> Reading:
    """As :func:`read`, with the number of lines that were passed over."""
    events: list[ev.Event] = []
    torn = unknown = 0
    for entry in storage.list("journal"):
        if not entry.key.endswith(".jsonl"):
            continue
        for line in storage.get(entry.key).split(b"\n"):
            if not line:
                continue
            try:
                events.append(ev.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                if _is_object(line):
                    unknown += 1
                else:
                    torn += 1
    return Reading(events, torn, unknown)


def replay(events: Iterable[ev.Event]) -> RunState:
    """What the facts add up to.

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


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
