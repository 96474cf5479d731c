"""Directories for the lifetime of one process, removed by the next one if a process was killed before it could.

A directory belongs to the process that holds the lock of the file in it. One whose lock is free was left behind.
Sweeping touches only directories of this user, and never follows a symbolic link.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path

from powertrain.storage.files.descriptors import open_directory, open_file, remove_quietly, remove_tree_at
from powertrain.storage.files.private_roots import (
    lasting_root,
    log_notices,
    make_private,
    remove_empty_parents,
)

_LOCK = "owner.lock"
#: Prefix of the name of a directory that is being made.
_UNFINISHED = ".new-"
#: Names of directories of single processes, of runs, and of the starts of a run in those. A directory chosen by the
#: user may contain others, which must not be removed.
_OF_PROCESS = re.compile(r"[0-9]{1,10}-[0-9a-f]{12}")
_OF_RUN = re.compile(r"powertrain-[0-9a-f]{24}")
_OF_START = re.compile(r"[0-9a-f]{24}")
#: Attempts to make a directory whose empty parent other processes remove meanwhile.
_TRIES = 20


class Scratch:
    """A new directory on disk; removed by :meth:`close`, with the object, or at the end of the process."""

    def __init__(self) -> None:
        root = scratch_root()
        log_notices()
        make_private(root.parent)
        sweep(root)
        self.path = str(root / f"{os.getpid()}-{secrets.token_hex(6)}")
        lock = make_owned(self.path)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the directory with its contents."""
        self._finalizer()


@contextlib.contextmanager
def scratch_directory() -> Iterator[str]:
    """Make a directory for the duration of the ``with``."""
    scratch = Scratch()
    try:
        yield scratch.path
    finally:
        scratch.close()


def scratch_root() -> Path:
    """Return the parent of this user's scratch directories."""
    return lasting_root() / "data"


def make_owned(path: str) -> int:
    """Make a directory that this process owns until it closes the returned descriptor, or exits."""
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
    # Locked before it gets its name, so that no sweep finds it there with a free lock.
    lock = os.open(os.path.join(unfinished, _LOCK), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(unfinished, os.path.join(parent, name))
    return lock


def sweep(root: Path) -> None:
    """Remove this user's directories in ``root`` whose owners are dead, also those of starts of runs."""
    with contextlib.suppress(OSError), open_directory(root.parent, [root.name]) as descriptor:
        for name in _own_directories(descriptor):
            if _OF_RUN.fullmatch(name):
                _sweep_run(descriptor, name)
            elif _OF_PROCESS.fullmatch(name):
                _remove_if_left(descriptor, name)


def sweep_beside(directory: str) -> None:
    """Remove this user's other directories beside ``directory`` that are not in use, also those without a lock."""
    parent, own = os.path.split(directory)
    above, name = os.path.split(parent)
    with contextlib.suppress(OSError), open_directory(above, [name]) as beside:
        for other in _own_directories(beside):
            if other != own and _OF_START.fullmatch(other):
                _remove_if_left(beside, other, needs_lock=False)


def _sweep_run(root: int, name: str) -> None:
    with contextlib.suppress(OSError):
        run = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root)
        try:
            for start in filter(_OF_START.fullmatch, _own_directories(run)):
                _remove_if_left(run, start)
        finally:
            os.close(run)
        os.rmdir(name, dir_fd=root)  # fails while a live start is in it


def _own_directories(parent: int) -> list[str]:
    """Return the names of directories in ``parent`` that belong to this user and are not links."""
    found = []
    with os.scandir(parent) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        with contextlib.suppress(OSError):
            status = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                found.append(name)
    return found


def _remove_if_left(parent: int, name: str, *, needs_lock: bool = True) -> None:
    """Remove a directory whose lock is free. One without a lock file may be in the making, and stays by default."""
    try:
        directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError:
        return
    try:
        lock = open_file(directory, _LOCK, _LOCK, os.O_RDWR)
    except OSError:
        if not needs_lock:
            with contextlib.suppress(OSError):
                remove_tree_at(parent, name, owner=os.geteuid())
        return
    finally:
        os.close(directory)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.geteuid():
            remove_tree_at(parent, name, owner=os.geteuid())
    except OSError:
        pass  # its owner lives
    finally:
        os.close(lock)


def _remove(path: str, lock: int, owner: int) -> None:
    if os.getpid() != owner:  # a forked child has a copy of the object, but does not own the directory
        return
    remove_quietly(path)
    os.close(lock)
    remove_empty_parents(path)
