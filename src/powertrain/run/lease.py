"""One live controller per run.

A start claims the next ``lease/NNNN`` with put-if-absent: numbers only grow, and of two starts exactly one
gets each number. What a controller writes carries its number, so it is always clear who wrote what.

Where storage is a file system, a live holder also keeps an exclusive lock on ``lease/lock``. The kernel
drops the lock when the holder dies in whatever way, so a rerun after SIGKILL starts at once.

The lock belongs to an open file, and a forked child inherits open files: a child that lived on would keep the
run locked after its parent's death. So the descriptor is close-on-exec, and it is closed in every child that
Python forks (``os.fork``, ``multiprocessing``, the warm server) before any other code of that child runs.
Closing it there does not unlock: the parent's own descriptor still holds the lock.
"""

from __future__ import annotations

import errno
import getpass
import os
import secrets
import socket
import sys
import threading
import time
from datetime import datetime
from types import TracebackType

import msgspec

from powertrain.errors import RunInUseError, StorageError
from powertrain.storage import Storage

if sys.platform != "win32":
    import fcntl

#: What a file system without locks answers.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
#: How long a refused taker looks for the name of a holder that has the lock and is still writing its lease.
_HOLDER_APPEARS_WITHIN = 2.0


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who took a lease, where and when (Unix seconds)."""

    number: int
    host: str
    pid: int
    user: str
    started: float
    token: str
    #: True when the holder gave it back; a holder that was killed never did.
    released: bool = False


class Lease:
    """The right to write to a run. Use :meth:`take`; give it back with :meth:`release` or ``with``."""

    def __init__(self, storage: Storage, holder: Holder, lock: _FileLock | None) -> None:
        self._storage, self._lock = storage, lock
        self.holder = holder
        self._owner = os.getpid()
        self._released = False

    @classmethod
    def take(cls, storage: Storage, *, host: str | None = None, pid: int | None = None) -> Lease:
        """Claim the run, or raise :class:`RunInUseError` naming who holds it.

        ``host`` and ``pid`` say under which name the lease is taken; they are this process's by default.
        """
        lock = _lock(storage)
        try:
            if lock is not None and lock.descriptor is None:
                _refuse_unreleased(storage)
            holder = _claim_next(storage, host or socket.gethostname(), pid or os.getpid())
        except BaseException:
            if lock is not None:
                lock.unlock()
            raise
        return cls(storage, holder, lock)

    @property
    def number(self) -> int:
        """Larger than that of every earlier lease of the run."""
        return self.holder.number

    @property
    def token(self) -> str:
        """A random word that only this lease has."""
        return self.holder.token

    def release(self) -> None:
        """Let others take the run. Again is fine; in a forked child it does nothing."""
        if self._released or os.getpid() != self._owner:
            return
        self._released = True
        try:
            self._storage.put(f"lease/{self.number:04d}.released", b"")
        finally:
            if self._lock is not None:
                self._lock.unlock()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def current_holder(storage: Storage) -> Holder | None:
    """Who took the newest lease of the run, or None when nobody ever did."""
    keys = [entry.key for entry in storage.list("lease")]
    for number in sorted(_numbers(keys), reverse=True):
        try:
            fields = msgspec.json.decode(storage.get(f"lease/{number:04d}"))
            released = f"lease/{number:04d}.released" in keys
            return msgspec.convert({**fields, "number": number, "released": released}, Holder)
        except (msgspec.MsgspecError, FileNotFoundError, TypeError):
            continue  # cut short by a crash of the machine: it never held anything
    return None


# --------------------------------------------------------------------------- claiming


def _numbers(keys: list[str]) -> list[int]:
    names = [key.removeprefix("lease/") for key in keys]
    return [int(name) for name in names if name.isdecimal()]


def _claim_next(storage: Storage, host: str, pid: int) -> Holder:
    number = max(_numbers([entry.key for entry in storage.list("lease")]), default=0)
    while True:
        number += 1
        holder = Holder(
            number=number, host=host, pid=pid, user=_user(), started=time.time(), token=secrets.token_hex(16)
        )
        fields = {name: getattr(holder, name) for name in ("host", "pid", "user", "started", "token")}
        if storage.put_if_absent(f"lease/{number:04d}", msgspec.json.encode(fields)):
            return holder


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # a container's user without a name


# --------------------------------------------------------------------------- the lock of a file system


class _FileLock:
    """An exclusive lock on one file. ``descriptor`` is None where the file system has no locks."""

    def __init__(self, path: str, descriptor: int | None) -> None:
        self.path, self.descriptor = path, descriptor

    def unlock(self) -> None:
        with _held_guard:
            _held.pop(self.path, None)
            if self.descriptor is not None:
                os.close(self.descriptor)
                self.descriptor = None


#: Locks of this process by real path. Some network file systems give a lock to a whole process, so a second
#: taker in the same process must be refused here; and a forked child finds here what to close.
_held: dict[str, _FileLock] = {}
_held_guard = threading.Lock()


def _close_in_child() -> None:
    """Runs first in each forked child."""
    for lock in _held.values():
        if lock.descriptor is not None:
            os.close(lock.descriptor)
            lock.descriptor = None
    _held.clear()
    _held_guard.release()


if hasattr(os, "register_at_fork"):
    # A fork waits for the guard, so no child is born between a lock's opening and its entry in the table.
    os.register_at_fork(
        before=_held_guard.acquire, after_in_parent=_held_guard.release, after_in_child=_close_in_child
    )


def _lock(storage: Storage) -> _FileLock | None:
    """The lock of a run in a file system, None elsewhere; raises :class:`RunInUseError` when it is taken."""
    path = storage.local_path("lease/lock")
    if path is None or sys.platform == "win32":
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    real = os.path.realpath(path)
    with _held_guard:
        taken = real in _held
        if not taken:
            descriptor = os.open(real, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _held[real] = _FileLock(real, descriptor)
                return _held[real]
            except OSError as error:
                os.close(descriptor)
                if error.errno in _NO_LOCKS:
                    _held[real] = _FileLock(real, None)
                    return _held[real]
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise StorageError(
                        f"The lock file {real!r} cannot be locked: {error.strerror}. Check the file system, "
                        "or choose another storage path."
                    ) from error
    raise _in_use(storage, _holder_of_a_taken_lock(storage))


def _holder_of_a_taken_lock(storage: Storage) -> Holder | None:
    """Who has the lock. Between locking and claiming, the newest lease is still that of a dead holder."""
    deadline = time.monotonic() + _HOLDER_APPEARS_WITHIN
    while True:
        holder = current_holder(storage)
        if (holder and not holder.released and _may_live(holder)) or time.monotonic() > deadline:
            return holder
        time.sleep(0.01)


def _refuse_unreleased(storage: Storage) -> None:
    """Without locks: a lease that was not given back may be alive unless its process is seen to be gone."""
    holder = current_holder(storage)
    if holder is None or holder.released or not _may_live(holder):
        return
    path = storage.local_path(f"lease/{holder.number:04d}")
    raise RunInUseError(
        f"{_in_use(storage, holder)} The file system has no file locks, so whether that process still lives "
        f"cannot be seen from here: if it is gone, delete {str(path)!r} and start again."
    )


def _may_live(holder: Holder) -> bool:
    """False when the holder was on this host and no process has its number any more."""
    if holder.host != socket.gethostname():
        return True
    try:
        os.kill(holder.pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _in_use(storage: Storage, holder: Holder | None) -> RunInUseError:
    who = "by another process"
    if holder is not None:
        since = datetime.fromtimestamp(holder.started).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
        who = f"by process {holder.pid} of user {holder.user!r} on host {holder.host!r} since {since}"
    return RunInUseError(
        f"The run at {storage.uri!r} is in use {who}. Wait until it ends, stop it, or choose another name."
    )
