"""Directories for a process's own time, swept by the next one where a process was killed before it could.

A directory has an owner: whoever holds the lock of the file in it. One whose lock nobody holds was left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

#: A directory on disk that is rather not kept in memory, by convention.
_ON_DISK = "/var/tmp"
_LOCK = "owner.lock"
#: Begins the name of a directory that is being made.
_UNFINISHED = ".new-"
#: Directories of runs, in which those of their starts are.
_OF_RUNS = "powertrain-"
#: Others may remove an empty parent while a directory is made in it; then it is tried again.
_TRIES = 20


class Scratch:
    """A new directory on disk; removed by :meth:`close`, with the object, or at the end of the process."""

    def __init__(self) -> None:
        root = scratch_root()
        sweep(root)
        self.path = str(root / f"{os.getpid()}-{secrets.token_hex(6)}")
        lock = make_owned(self.path)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the directory and all that is in it."""
        self._finalizer()


@contextlib.contextmanager
def scratch_directory() -> Iterator[str]:
    """A directory that is there inside the ``with``."""
    scratch = Scratch()
    try:
        yield scratch.path
    finally:
        scratch.close()


def scratch_root() -> Path:
    """Where such directories of this user are."""
    place = os.environ.get("TMPDIR") or (_ON_DISK if os.access(_ON_DISK, os.W_OK) else tempfile.gettempdir())
    return Path(place, f"powertrain-{os.getuid()}", "data")


def make_owned(path: str) -> int:
    """Make a directory that this process owns until it closes the descriptor that is returned, or ends."""
    parent, name = os.path.split(path)
    unfinished = os.path.join(parent, f"{_UNFINISHED}{secrets.token_hex(8)}")
    for attempt in range(_TRIES):
        try:
            os.makedirs(parent, mode=0o700, exist_ok=True)
            os.mkdir(unfinished, 0o700)
            break
        except (FileNotFoundError, FileExistsError):
            if attempt == _TRIES - 1:
                raise
    # Locked before it has its name: nobody finds it under that with a lock that is free.
    lock = os.open(os.path.join(unfinished, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(unfinished, os.path.join(parent, name))
    return lock


def sweep(root: Path) -> None:
    """Remove directories in ``root`` whose owners are dead, also those of starts of runs."""
    for directory in _directories(root):
        if directory.name.startswith(_OF_RUNS):
            for start in _directories(directory):
                _remove_if_left(start)
            with contextlib.suppress(OSError):  # one that lives is in it
                directory.rmdir()
        elif not directory.name.startswith(_UNFINISHED):
            _remove_if_left(directory)


def _directories(parent: Path) -> list[Path]:
    try:
        return [entry for entry in parent.iterdir() if entry.is_dir()]
    except OSError:  # it is not there, or was removed at this moment
        return []


def _remove_if_left(directory: Path) -> None:
    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # it is being removed at this moment, or is none of ours
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    except OSError:
        pass  # its owner lives
    finally:
        os.close(lock)


def _remove(path: str, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has a copy of the object, not the directory
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    for parent in Path(path).parents[:2]:
        with contextlib.suppress(OSError):  # somebody else's is in it
            parent.rmdir()
