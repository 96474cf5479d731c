"""Directories for a process's own time, swept by the next one where a process was killed before it could."""

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


class Scratch:
    """A new directory on disk; removed by :meth:`close`, with the object, or at the end of the process."""

    def __init__(self) -> None:
        root = _root()
        _sweep(root)
        self.path = str(root / f"{os.getpid()}-{secrets.token_hex(6)}")
        os.makedirs(self.path, mode=0o700)
        # Whoever sweeps takes a directory whose lock nobody holds for one whose owner is dead.
        lock = os.open(os.path.join(self.path, _LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
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


def _root() -> Path:
    place = os.environ.get("TMPDIR") or (_ON_DISK if os.access(_ON_DISK, os.W_OK) else tempfile.gettempdir())
    root = Path(place, f"powertrain-{os.getuid()}", "data")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return root


def _sweep(root: Path) -> None:
    """Remove directories whose owners are dead."""
    for directory in root.iterdir():
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # it is being made or removed at this moment
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
