"""Locks on files and directories of this user that show liveness: the kernel releases them when a process exits.

A process id shows less: another container has other ids, and ids are reused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from powertrain.storage.files.private_roots import make_private, unusable

#: Descriptors that a forked child closes, so that its parent's locks are released when the parent exits.
_ours_alone: set[int] = set()
_guard = threading.Lock()


def _close_in_child() -> None:
    for descriptor in _ours_alone:
        os.close(descriptor)
    _ours_alone.clear()
    _guard.release()


# A fork waits for the guard, so no child is born between an opening and its entry in the table.
os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_close_in_child)


def open_unshared(path: Path, flags: int, mode: int = 0o600) -> int:
    """Return a descriptor of a file that no forked child keeps. To be closed with :func:`let_go`."""
    return unshared(lambda: os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode))


def unshared(opened: Callable[[], int]) -> int:
    """Return a descriptor from ``opened`` that no forked child keeps. To be closed with :func:`close`."""
    with _guard:
        descriptor = opened()
        _ours_alone.add(descriptor)
    return descriptor


def unshared_pipe() -> tuple[int, int]:
    """Return the ends of a pipe, to read and to write without waiting, which no forked child keeps."""
    with _guard:
        ends = os.pipe()
        _ours_alone.update(ends)
    for end in ends:
        os.set_blocking(end, False)
    return ends


def close(descriptor: int) -> None:
    """Close a descriptor opened here, without releasing the lock for other holders of the same open file."""
    with _guard:
        _ours_alone.discard(descriptor)
        os.close(descriptor)


def let_go(descriptor: int) -> None:
    """Unlock and close. Closing is not enough: another process may have the same open file."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock without waiting; False when another open file has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def locked_directory(directory: Path) -> Iterator[None]:
    """Lock a directory, made if absent; refuse one that is not this user's own. Its holder may remove it."""
    descriptor = _lock_directory(directory)
    try:
        yield
    finally:
        let_go(descriptor)


def _lock_directory(directory: Path) -> int:
    while True:
        make_private(directory)
        try:
            descriptor = open_unshared(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # its last holder has just removed it
        except OSError as error:
            raise unusable(directory, error) from error
        try:
            os.fchmod(descriptor, 0o700)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(directory, descriptor):
                return descriptor
        except OSError as error:
            let_go(descriptor)
            raise unusable(directory, error) from error
        let_go(descriptor)


def _is_at(directory: Path, descriptor: int) -> bool:
    """Return False when the directory was removed while its lock was waited for."""
    try:
        return os.path.samestat(os.stat(directory, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
