"""The claims and tickets for resources of this machine, as files that all processes of this user see.

They lie in ``claims`` below the user's runtime directory. A claim records a holding; a ticket records a waiting
request, and its number the place in the queue. Each file is locked by its process while it is valid, so the files of
dead processes are recognised as void, in any container; the next reader removes them. All of this happens under one
lock on the directory, which exists only while it has entries. Files with other names are left alone, and unreadable
files block no process from starting.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from powertrain.engine.local import locks
from powertrain.engine.local.waiting_line import ResourceRequest
from powertrain.engine.resources import Holding
from powertrain.storage.files.private_roots import make_private, unusable

_DIRECTORY = "claims"
#: A process's number alone would not do: in another container a process may have the same.
_CLAIM = re.compile(r"\d+-[0-9a-f]{8}\.json")
_TICKET = re.compile(r"line-(\d{12,})-\d+-[0-9a-f]{8}\.json")
#: The largest file that is read.
_MOST_BYTES = 1 << 20


def directory_of(root: Path) -> Path:
    """Return the directory of claims in a runtime directory."""
    return root / _DIRECTORY


@contextlib.contextmanager
def locked(root: Path) -> Iterator[Path]:
    """Lock the directory of claims, made if absent, and removed afterwards if it is empty."""
    directory = directory_of(root)
    try:
        make_private(root)
        with locks.locked_directory(directory):
            yield directory
            with contextlib.suppress(OSError):
                directory.rmdir()
    except OSError as error:
        raise unusable(directory, error) from error


# --------------------------------------------------------------------------- those of this process


class OwnFile:
    """A claim or a ticket of this process. Made and changed only with the directory's lock held."""

    def __init__(self, path: Path, content: Holding | ResourceRequest) -> None:
        self.path, self.name = path, path.name
        self._descriptor = locks.open_unshared(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            locks.try_lock(self._descriptor)
            self.change(content)
        except OSError:
            self.remove()
            raise

    def change(self, content: Holding | ResourceRequest) -> None:
        """Rewrite the file in place and in one step: after a kill here, other processes may still hold the file."""
        data = msgspec.json.encode(content).ljust(os.fstat(self._descriptor).st_size)
        if os.pwrite(self._descriptor, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def lend(self) -> int:
        """Return another descriptor of the open file, to be closed with :func:`locks.close`. A process that is given it
        holds the lock as well, until it ends or the file is removed here."""
        return locks.unshared(lambda: os.dup(self._descriptor))

    def remove(self) -> None:
        """End the claim or ticket, whether or not its file can be removed."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        locks.let_go(self._descriptor)


def write_claim(directory: Path, holding: Holding) -> OwnFile:
    return OwnFile(directory / _own_name(), holding)


def write_ticket(directory: Path, number: int, request: ResourceRequest) -> OwnFile:
    return OwnFile(directory / f"line-{number:012d}-{_own_name()}", request)


def _own_name() -> str:
    return f"{os.getpid()}-{os.urandom(4).hex()}.json"


# --------------------------------------------------------------------------- those of all


@dataclass
class Found:
    """The contents of the directory, without the excluded names."""

    #: The live files.
    names: set[str] = field(default_factory=set)
    held: list[Holding] = field(default_factory=list)
    #: The waiting requests, with their ticket numbers.
    line: list[tuple[int, ResourceRequest]] = field(default_factory=list)
    #: The highest ticket number; 0 where the queue is empty.
    last: int = 0


def read(directory: Path, leave_out: Collection[str] = ()) -> Found:
    """Return the contents of the live files and remove void ones. The directory's lock must be held."""
    found = Found()
    for name in sorted(set(os.listdir(directory)).difference(leave_out)):
        ticket = _TICKET.fullmatch(name)
        if not (ticket or _CLAIM.fullmatch(name)):
            continue
        data = _live_data(directory / name)
        if data is None:
            continue
        found.names.add(name)
        number = int(ticket[1]) if ticket else 0
        found.last = max(found.last, number)
        # A file of another version, or a half-written one, must not block all processes from starting.
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            if ticket:
                found.line.append((number, msgspec.json.decode(data, type=ResourceRequest)))
            else:
                found.held.append(msgspec.json.decode(data, type=Holding))
    return found


def _live_data(path: Path) -> bytes | None:
    """Return the content of a live file; None for a void one, which is removed."""
    try:
        descriptor = locks.open_unshared(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None  # given back since it was listed
    try:
        if not locks.try_lock(descriptor):
            return os.read(descriptor, _MOST_BYTES)
        path.unlink()
        return None
    except OSError:
        return None
    finally:
        locks.let_go(descriptor)


def sweep(root: Path) -> None:
    """Remove the void files in a runtime directory. Costs one ``stat`` where the directory is absent."""
    if directory_of(root).is_dir():
        with locked(root) as directory:
            read(directory)
