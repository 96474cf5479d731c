"""The process that sends a run's points to its trackers: a fresh interpreter beside the driver.

A process and not a thread: the packages of trackers take seconds to import, and hold Python's lock while they encode
and send, which the controller would wait for. It runs at a low priority, reads the run's directory like any other
reader, and exits with the driver. It receives one message, the end of the run, and sends sentences to show.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import BinaryIO, NoReturn

import msgspec

from powertrain.run.workers.child import end_with_parent
from powertrain.storage import Storage
from powertrain.storage.files.descriptors import open_for_append
from powertrain.trackers.base import RunEnding, TrackedRun, Tracker
from powertrain.trackers.sending import Sender, Unsent

#: Added to the priority number of the process: training goes first where processors are short.
_NICENESS = 10
#: Seconds beyond the end of its time for a tracker's own call to return.
_STUCK_TIMEOUT_S = 2.0
#: Header of an assignment: its length.
HEAD = struct.Struct("<Q")


class EndRequest(msgspec.Struct, frozen=True):
    """The run is over: send the rest within so many seconds."""

    state: str
    reason: str
    findings: tuple[str, ...]
    within: float


class TrackerMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the process: a sentence to show, or at its end the unsent points."""

    text: str = ""
    unsent: tuple[Unsent, ...] | None = None


class Assignment(msgspec.Struct, frozen=True):
    """The assignment of the process."""

    storage: Storage
    trackers: list[Tracker]
    run: TrackedRun


def live(parent: int) -> NoReturn:
    """Run the process: read the assignment from standard input, send until the end is requested there."""
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # packages print to where their output is kept, not between our messages
    threading.Thread(target=end_with_parent, args=(parent,), name="powertrain-parent", daemon=True).start()
    os.nice(_NICENESS)
    stdin = sys.stdin.buffer
    (length,) = HEAD.unpack(stdin.read(HEAD.size))
    assignment: Assignment = pickle.loads(stdin.read(length))
    with sending_alone(assignment.storage):
        _serve(assignment, stdin, _MessageWriter(output))
    output.close()
    sys.stderr.flush()
    os._exit(0)  # threads that are stuck in a tracker's call, and hooks of packages, are not waited for


class _MessageWriter:
    """Writes messages, one a line. Any thread."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._guard = file, threading.Lock()

    def write(self, message: TrackerMessage) -> None:
        with self._guard, contextlib.suppress(OSError):  # the driver may be gone
            self._file.write(msgspec.json.encode(message) + b"\n")

    def write_text(self, text: str) -> None:
        self.write(TrackerMessage(text=text))


def _serve(assignment: Assignment, stdin: BinaryIO, writer: _MessageWriter) -> None:
    senders = [
        Sender(tracker, assignment.storage, assignment.run, writer.write_text)
        for tracker in assignment.trackers
    ]
    results: dict[str, Unsent | None] = {}

    def follow(sender: Sender) -> None:
        results[sender.name] = sender.follow()

    # A thread for each: one that is stuck in a tracker's call does not hold up the others.
    threads = [
        threading.Thread(target=follow, args=(one,), name=f"tracker-{one.name}", daemon=True)
        for one in senders
    ]
    for thread in threads:
        thread.start()
    line = stdin.readline()
    if not line:
        return  # the driver has given up
    request = msgspec.json.decode(line, type=EndRequest)
    deadline = time.monotonic() + request.within
    for sender in senders:
        sender.end(RunEnding(request.state, request.reason, request.findings), request.within)
    for thread in threads:
        thread.join(max(0.0, deadline + _STUCK_TIMEOUT_S - time.monotonic()))
    writer.write(TrackerMessage(unsent=_left(senders, results)))


def _left(senders: Sequence[Sender], results: dict[str, Unsent | None]) -> tuple[Unsent, ...]:
    left = [results[one.name] if one.name in results else one.describe_unsent() for one in senders]
    return tuple(unsent for unsent in left if unsent is not None)


@contextlib.contextmanager
def sending_alone(storage: Storage, *, wait: bool = True) -> Iterator[bool]:
    """Hold the run's trackers, so that no second process sends the same points; yields False where another holds them.

    Storage without real files has no lock; there only the run's own process and ``powertrain track`` could meet, which
    refuses a run that is under way.
    """
    path = storage.local_path("trackers/lock")
    if path is None:
        yield True
        return
    descriptor = open_for_append(path, 3, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
