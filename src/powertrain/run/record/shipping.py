"""Appendable files for runs whose storage has no real files.

The journal, the metrics' spool and the logs grow line by line, which object stores cannot do. On such storage they are
real files in a spool directory of this machine, and a thread puts the changed ones to storage every few seconds and
once more at the end. Everything else goes to storage at once, as always.

So after the death of this machine the last seconds of these three are lost, and after the death of the process they
are still in the spool directory: the next start that is given the same directory ships them. Checkpoints, manifests
and leases never take this way.

A file is put whole each time. One that takes long to put is put more rarely, so that shipping takes a small share of
the line however long a log gets.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from powertrain.errors import StorageError
from powertrain.storage import Entry, FileDigest, Storage, check_key
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import StoredPart
from powertrain.storage.local import LocalStorage
from powertrain.text.loggers import module_logger

#: Changed files are put this often (seconds).
SHIP_INTERVAL_S = 3.0
#: After a put that took so long, the file is left alone for this many times as long.
_REST_FACTOR = 10.0
#: Timeout of one put of the shipping thread: a failed one is repeated in the next round anyway.
_PUT_TIMEOUT_S = 20.0
#: How long ``close`` tries by default.
CLOSE_TIMEOUT_S = 60.0

_logger = module_logger(__name__)


class _Version(NamedTuple):
    """The version of a file, to detect changes."""

    inode: int
    size: int
    modified: int


def is_spooled(key: str) -> bool:
    """Return True for keys of files that grow while the run lasts."""
    if key.startswith(("metrics/", "telemetry/")):
        return key.endswith(".open")
    return key.startswith(("journal/", "logs/"))


class Shipped:
    """``storage`` with real files for appendable keys. Close it after its writers are closed.

    ``problem`` is the last error of storage for files of the spool; "" while all is well.
    """

    def __init__(self, storage: Storage, spool_directory: str | Path) -> None:
        self._storage, self._spool = storage, LocalStorage(spool_directory)
        self.problem = ""
        self._guard = threading.Lock()
        #: The version in storage of each file that was in the spool.
        self._shipped: dict[str, _Version] = {}
        self._rests_until: dict[str, float] = {}
        self._stopping = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="powertrain-shipping", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"Shipped({self._storage!r}, {self._spool.uri!r})"

    @property
    def uri(self) -> str:
        return self._storage.uri

    @property
    def lacks(self) -> tuple[str, ...]:
        return self._storage.lacks

    @property
    def filesystem(self) -> Any:
        """Return the file system that the user gave; None for built-in storage."""
        return getattr(self._storage, "filesystem", None)

    def local_path(self, key: str) -> Path | None:
        if not is_spooled(check_key(key)):
            return self._storage.local_path(key)
        path = self._spool.local_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def child(self, prefix: str) -> Storage:
        """Return the storage below ``prefix``, without files that are still in the spool."""
        return self._storage.child(prefix)

    def within(self, timeout: float) -> Storage:
        """Return the storage with a shorter timeout, without files that are still in the spool."""
        return self._storage.within(timeout)

    # -- writing: whole values go to storage at once, and to the spool where the key belongs there

    def put(self, key: str, data: bytes) -> None:
        self._storage.put(key, data)
        if self._is_ours(key):
            self._spool.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self._in_spool(key) or not self._storage.put_if_absent(key, data):
            return False
        if self._is_ours(key):
            self._spool.put(key, data)
        return True

    def put_file(self, key: str, path: str | Path, *, digest: bool = True) -> FileDigest:
        result = self._storage.put_file(key, path, digest=digest)
        if self._is_ours(key):
            self._spool.put_file(key, path, digest=False)
        return result

    def put_file_if_absent(self, key: str, path: str | Path) -> FileDigest | None:
        result = None if self._in_spool(key) else self._storage.put_file_if_absent(key, path)
        if result is not None and self._is_ours(key):
            self._spool.put_file(key, path, digest=False)
        return result

    def move(self, source: str, key: str) -> None:
        if not (self._is_ours(source) or self._is_ours(key)):
            self._storage.move(source, key)
            return
        self.put(key, self.get(source))
        self.delete(source)

    # -- reading: files of the spool are newer than those in storage

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return self._place_of(key).get(key, limit=limit)

    def get_range(self, key: str, start: int, length: int) -> StoredPart:
        return self._place_of(key).get_range(key, start, length)

    def get_file(self, key: str, path: str | Path) -> None:
        self._place_of(key).get_file(key, path)

    def digest(self, key: str) -> FileDigest:
        return self._place_of(key).digest(key)

    def modified(self, key: str) -> float:
        return self._place_of(key).modified(key)

    def list(self, prefix: str = "") -> list[Entry]:
        found = {entry.key: entry for entry in self._storage.list(prefix)}
        if not self._closed:
            for key in self._vanished():
                found.pop(key, None)
            found |= {entry.key: entry for entry in self._spool.list(prefix) if is_spooled(entry.key)}
        return [found[key] for key in sorted(found)]

    def directories(self) -> Sequence[str]:
        mine = self._spool.directories() if not self._closed else ()
        return sorted({*self._storage.directories(), *mine})

    # -- forgetting

    def delete(self, key: str) -> None:
        if self._is_ours(key):
            self._spool.delete(key)
        self._storage.delete(key)

    def delete_tree(self, prefix: str) -> None:
        if not self._closed:
            self._spool.delete_tree(prefix)
        self._storage.delete_tree(prefix)

    def sweep(self) -> int:
        return self._storage.sweep()

    # -- which of the two

    def _is_ours(self, key: str) -> bool:
        return is_spooled(check_key(key)) and not self._closed

    def _in_spool(self, key: str) -> bool:
        return self._is_ours(key) and self._spool.local_path(key).is_file()

    def _place_of(self, key: str) -> Storage:
        if self._in_spool(key):
            return self._spool
        if self._is_ours(key) and key in self._shipped:
            raise FileNotFoundError(errno.ENOENT, "no such key", key)  # deleted here, and soon there
        return self._storage

    def _vanished(self) -> Sequence[str]:
        """Return files that storage has and the spool had."""
        with self._guard:
            return [key for key in self._shipped if not self._spool.local_path(key).is_file()]

    # -- shipping

    def close(self, timeout: float = CLOSE_TIMEOUT_S) -> None:
        """Put the changed files, remove the spool directory and stop. Again is fine.

        Raises :class:`StorageError` naming the files that could not be put within ``timeout`` seconds; they stay in the
        spool.
        """
        if self._closed:
            return
        deadline = time.monotonic() + timeout
        self._stopping.set()
        self._thread.join(timeout)
        left = self._unshipped()
        if left and not self._thread.is_alive():
            left = self._ship(self._storage, everything=True, deadline=deadline)
        if left:
            names = ", ".join(sorted(left)[:5]) + (" and others" if len(left) > 5 else "")
            raise StorageError(
                f"These files of the run could not all be put to {without_secrets(self.uri)!r} within {timeout:g} s: "
                f"{names} ({self.problem or 'storage does not answer'}). They are in {self._spool.uri!r}; a start of "
                "the run on this machine puts them once storage answers again."
            )
        self._closed = True
        _remove_empty(self._spool)

    def _run(self) -> None:
        storage = self._storage
        while not self._stopping.wait(SHIP_INTERVAL_S):
            self._ship(storage, everything=False)

    def _ship(self, storage: Storage, everything: bool, deadline: float = math.inf) -> Sequence[str]:
        """Ship once, until ``deadline``. Return the keys that storage refused or that there was no time for."""
        refused, problem = [], ""
        for key in self._unshipped():
            if self._stopping.is_set() != everything:
                break  # closing: the rest is put with the patience of ``close``
            if not everything and time.monotonic() < self._rests_until.get(key, 0.0):
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                refused.append(key)
                continue
            try:
                self._ship_one(storage.within(min(_PUT_TIMEOUT_S, max(1.0, remaining))), key)
            except (OSError, StorageError) as error:
                refused.append(key)
                problem = str(error)
        if problem and not self.problem:
            _logger.warning("Journal, metrics and logs wait on this machine: %s", problem)
        self.problem = problem
        return refused

    def _ship_one(self, storage: Storage, key: str) -> None:
        path, began = self._spool.local_path(key), time.monotonic()
        version = _version_of(path)
        if version is None:
            storage.delete(key)
            with self._guard:
                self._shipped.pop(key, None)
            return
        try:
            storage.put_file(key, path, digest=False)
        except FileNotFoundError:
            if _version_of(path) is not None:
                raise
            return  # gone in between
        with self._guard:
            self._shipped[key] = version
        self._rests_until[key] = time.monotonic() + _REST_FACTOR * (time.monotonic() - began)

    def _unshipped(self) -> Sequence[str]:
        """Return files that are newer in the spool than in storage, and those that are gone from the spool."""
        here = [entry.key for entry in self._spool.list() if is_spooled(entry.key)]
        with self._guard:
            changed = [
                key for key in here if self._shipped.get(key) != _version_of(self._spool.local_path(key))
            ]
        return [*changed, *self._vanished()]


def _version_of(path: Path) -> _Version | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _Version(found.st_ino, found.st_size, found.st_mtime_ns)


def _remove_empty(spool: LocalStorage) -> None:
    """Remove the files, all of which storage has now, and the directories that are empty then."""
    for entry in spool.list():
        if is_spooled(entry.key):
            spool.local_path(entry.key).unlink(missing_ok=True)
    for directory, _, _ in os.walk(spool.uri, topdown=False):
        try:
            os.rmdir(directory)
        except OSError:
            continue  # another program's file is in it


@contextmanager
def spools_below(root: str) -> Iterator[tuple[str, list[str]]]:
    """Yield a new spool directory of this start below ``root``, and those of dead starts.

    The lock on a directory shows that its start is alive; empty directories are removed afterwards.
    """
    os.makedirs(root, mode=0o700, exist_ok=True)
    abandoned = [entry.path for entry in os.scandir(root) if _is_abandoned(entry)]
    own = tempfile.mkdtemp(dir=root)
    descriptor = os.open(own, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield own, abandoned
    finally:
        os.close(descriptor)
        for place in (*abandoned, own, root):
            with suppress(OSError):  # it could not be shipped, or another start's is in it
                os.rmdir(place)


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    """Return True for a directory of this user that no process has locked. Any other may have been put there."""
    status = entry.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return False
    descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
