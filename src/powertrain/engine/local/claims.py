"""What is held of this machine and who waits for it, as files that all processes of this user see.

They lie in ``claims`` below the user's runtime directory. A claim says what is held; a ticket says what somebody waits
for, and its number where he stands. Each is locked by its process for as long as it is meant, so what the dead have
left is seen to be void, in whichever container the process was; the next who looks removes it. All of it happens under
one lock of the directory, which is there only while there is something in it. Files of other names are nobody's
business here, and those that cannot be understood keep nobody from starting.
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
from powertrain.engine.local.waiting_line import Wish
from powertrain.engine.resources import Holding
from powertrain.storage.files.private_roots import make_private, unusable

_DIRECTORY = "claims"
#: A process's number alone would not do: in another container a process may have the same.
_CLAIM = re.compile(r"\d+-[0-9a-f]{8}\.json")
_TICKET = re.compile(r"line-(\d{12,})-\d+-[0-9a-f]{8}\.json")
#: The largest file that is read.
_MOST_BYTES = 1 << 20


def directory_of(root: Path) -> Path:
    """Where claims lie in a runtime directory."""
    return root / _DIRECTORY


@contextlib.contextmanager
def locked(root: Path) -> Iterator[Path]:
    """Hold the directory of claims, made if absent, and removed afterwards if there is nothing in it."""
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
    """A claim or a ticket of this process. Made and changed only by who holds the lock of the directory."""

    def __init__(self, path: Path, content: Holding | Wish) -> None:
        self.path, self.name = path, path.name
        self._descriptor = locks.open_unshared(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            locks.try_lock(self._descriptor)
            self.change(content)
        except OSError:
            self.remove()
            raise

    def change(self, content: Holding | Wish) -> None:
        """In place and in one step: who is killed here may leave processes that hold the file on."""
        data = msgspec.json.encode(content).ljust(os.fstat(self._descriptor).st_size)
        if os.pwrite(self._descriptor, data, 0) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def lend(self) -> int:
        """Another descriptor of the open file, to be closed with :func:`locks.close`. A process that is given it holds
        the lock as well, until it ends or the file is removed here."""
        return locks.unshared(lambda: os.dup(self._descriptor))

    def remove(self) -> None:
        """It is over, whether or not its file can be removed."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        locks.let_go(self._descriptor)


def write_claim(directory: Path, holding: Holding) -> OwnFile:
    return OwnFile(directory / _own_name(), holding)


def write_ticket(directory: Path, number: int, wish: Wish) -> OwnFile:
    return OwnFile(directory / f"line-{number:012d}-{_own_name()}", wish)


def _own_name() -> str:
    return f"{os.getpid()}-{os.urandom(4).hex()}.json"


# --------------------------------------------------------------------------- those of all


@dataclass
class Found:
    """What lies in the directory, but for what was left out."""

    #: The live files.
    names: set[str] = field(default_factory=set)
    held: list[Holding] = field(default_factory=list)
    #: Those who wait, with the numbers of their tickets.
    line: list[tuple[int, Wish]] = field(default_factory=list)
    #: The highest number that a ticket has; 0 where nobody waits.
    last: int = 0


def read(directory: Path, leave_out: Collection[str] = ()) -> Found:
    """What the live files say; removes void ones. The directory's lock must be held."""
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
        # What another version wrote, or what is half-written, must not keep everybody from starting.
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            if ticket:
                found.line.append((number, msgspec.json.decode(data, type=Wish)))
            else:
                found.held.append(msgspec.json.decode(data, type=Holding))
    return found


def _live_data(path: Path) -> bytes | None:
    """What is in a live file; None for a void one, which is removed."""
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
    """Remove the void files in a runtime directory. Where there is none this costs one look."""
    if directory_of(root).is_dir():
        with locked(root) as directory:
            read(directory)
