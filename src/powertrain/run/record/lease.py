"""One live controller per run.

A start claims the next ``lease/NNNN`` with put-if-absent: numbers only grow, and of two starts exactly one
gets each number. Files of a controller carry its number, so their writer is always known.

Where storage is a file system, a live holder also keeps an exclusive lock on ``lease/lock``. The kernel
drops the lock when the holder dies in whatever way, so a rerun after SIGKILL starts at once.

Elsewhere a live holder writes ``lease/NNNN.beat`` every few seconds from a thread of its own. A start that finds a
lease which was not given back takes the run at once if the holder's process is seen to be gone, and otherwise
watches: a beat means that the run is in use, :data:`SILENCE_TIMEOUT_S` seconds without one that it is free. How old the
last beat is goes by the storage's clock, by which two objects are compared. A holder that was taken for dead and was
not finds the newer lease at its next heartbeat, and is notified.

The lock belongs to an open file, and a forked child inherits open files: a child that lived on would keep the
run locked after its parent's death. So the descriptor is close-on-exec, and it is closed in every child that
Python forks (``os.fork``, ``multiprocessing``, the warm server) before any other code of that child runs.
Closing it there does not unlock: the parent's own descriptor still holds the lock.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import secrets
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import TracebackType

import msgspec

from powertrain.errors import RunInUseError, StorageError
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import RECORD_BYTES_LIMIT, is_alive
from powertrain.storage.files.descriptors import open_below
from powertrain.text.loggers import module_logger

if sys.platform != "win32":
    import fcntl

_logger = module_logger(__name__)
#: What a file system without locks answers.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
#: How long a refused start waits for the name of a holder that has the lock and is still writing its lease.
_HOLDER_TIMEOUT_S = 2.0
#: A holder without a lock beats this often, and is taken for dead when it has not for so long (seconds).
BEAT_INTERVAL_S = 5.0
SILENCE_TIMEOUT_S = 15.0
#: How long a release is tried: a lease that could not be released expires.
_RELEASE_SECONDS = 30.0
#: How often a start checks for the next heartbeat of a holder that may be dead.
_POLL_INTERVAL_S = 0.5
#: Names of leases, and the largest number of one. Manifests can hold it, and no run comes near it.
_NUMBER = re.compile(r"[0-9]{4,9}")
_LARGEST = 10**9 - 1


class LeaseHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The process that took a lease, with its host and time (Unix seconds)."""

    number: int
    host: str
    pid: int
    user: str
    started: float
    token: str
    #: Which boot of which machine, and which space of process numbers on it, ``pid`` is of; "" where unknown.
    machine: str = ""
    #: True when the holder gave it back; a holder that was killed never did.
    released: bool = False


class Lease:
    """The right to write to a run. Use :meth:`take`; give it back with :meth:`release` or ``with``."""

    def __init__(
        self,
        storage: Storage,
        holder: LeaseHolder,
        lock: _FileLock | None,
        heart: _Heart | None,
        previous_released: bool,
    ) -> None:
        self._storage, self._lock, self._heart = storage, lock, heart
        self.holder = holder
        #: True when there was no lease before this one, or it was given back: no process of it can still write.
        self.previous_released = previous_released
        self._owner = os.getpid()
        self._released = False
        #: Whether the last look at it, where there is no lock, found that it is not in the storage any more.
        self.was_displaced = False

    @classmethod
    def take(
        cls,
        storage: Storage,
        *,
        host: str | None = None,
        pid: int | None = None,
        shared: bool = False,
        on_lost: Callable[[LeaseHolder], None] | None = None,
    ) -> Lease:
        """Claim the run, or raise :class:`RunInUseError` naming its holder.

        ``host`` and ``pid`` are the name under which the lease is taken; they are this process's by default. With
        ``shared`` other users may take the run later. ``on_lost`` is called once, from another thread, where a beating
        holder finds that another process has taken the run over.
        """
        name = (host or socket.gethostname(), pid or os.getpid())
        if storage.local_path("lease/lock") is None or sys.platform == "win32":
            holder, free = _claim_watching(storage, *name)
            return cls(storage, holder, None, _Heart(storage, holder, on_lost), free)
        lock = _lock(storage, shared)
        try:
            if lock.descriptor is None:
                _refuse_unreleased(storage)
            before = current_holder(storage)
            holder = _claim_next(storage, *name)
        except BaseException:
            lock.unlock()
            raise
        return cls(storage, holder, lock, None, before is None or before.released)

    @property
    def number(self) -> int:
        """Return the number, larger than that of every earlier lease of the run."""
        return self.holder.number

    @property
    def token(self) -> str:
        """Return a random token of this lease."""
        return self.holder.token

    def release(self) -> None:
        """Release the run. Again is fine; in a forked child it does nothing."""
        if self._released or os.getpid() != self._owner:
            return
        self._released = True
        if self._heart is not None:
            self._heart.stop()
        place = self._storage.within(_RELEASE_SECONDS)
        try:
            # Where the directory was removed, the file would make it anew, or give back the lease of another start.
            if is_in_storage(place, self.holder):
                place.put(f"lease/{self.number:04d}.released", b"")
            if self._heart is not None:
                place.delete(_beat_key(self.number))
        except (OSError, StorageError) as error:  # it expires; the end of the run is not undone by this
            _logger.warning(
                "The lease of %s could not be given back (%s); the next start waits until it has expired.",
                without_secrets(self._storage.uri),
                error,
            )
        finally:
            if self._lock is not None:
                self._lock.unlock()

    @property
    def lock(self) -> tuple[str, int] | None:
        """Return the path and the descriptor of the held lock file; None where the storage has no locks."""
        if self._lock is None or self._lock.descriptor is None:
            return None
        return self._lock.path, self._lock.descriptor

    @property
    def storage(self) -> Storage:
        return self._storage

    def superseded(self) -> LeaseHolder | None:
        """Return the holder of a newer lease of the run; None while this is the newest."""
        return _newer(self._storage, self.number)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def is_in_storage(storage: Storage, holder: LeaseHolder) -> bool:
    """True when the lease of this holder lies in the storage, and not another one of the same number."""
    try:
        found = msgspec.json.decode(storage.get(f"lease/{holder.number:04d}", limit=RECORD_BYTES_LIMIT))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except msgspec.DecodeError:
        return True  # damaged: it says nothing
    return not isinstance(found, dict) or found.get("token") == holder.token


def current_holder(storage: Storage) -> LeaseHolder | None:
    """Return the holder of the newest lease of the run; None without any."""
    return _newest_holder(storage, [entry.key for entry in storage.list("lease")])


def last_beat(storage: Storage, number: int) -> float | None:
    """Return the time of the last heartbeat of a lease by the storage's clock; None where holders send none."""
    try:
        return storage.modified(_beat_key(number))
    except FileNotFoundError:
        return None


def _newest_holder(storage: Storage, keys: list[str]) -> LeaseHolder | None:
    for number in sorted(_numbers(keys), reverse=True):
        try:
            fields = msgspec.json.decode(storage.get(f"lease/{number:04d}", limit=RECORD_BYTES_LIMIT))
            released = f"lease/{number:04d}.released" in keys
            return msgspec.convert({**fields, "number": number, "released": released}, LeaseHolder)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, FileNotFoundError, TypeError):
            continue  # cut short by a crash of the machine: it never held anything
    return None


def _newer(storage: Storage, number: int) -> LeaseHolder | None:
    """Return the holder of the newest lease, where it is newer than ``number``."""
    keys = [entry.key for entry in storage.list("lease")]
    newest = _newest_holder(storage, keys) if max(_numbers(keys), default=0) > number else None
    return newest if newest is not None and newest.number > number else None


# --------------------------------------------------------------------------- claiming


def _numbers(keys: list[str]) -> list[int]:
    names = [key.removeprefix("lease/") for key in keys]
    return [int(name) for name in names if _NUMBER.fullmatch(name)]


def _claim_next(storage: Storage, host: str, pid: int) -> LeaseHolder:
    number = max(_numbers([entry.key for entry in storage.list("lease")]), default=0)
    while True:
        number += 1
        if holder := _claim(storage, number, host, pid):
            return holder


def _claim(storage: Storage, number: int, host: str, pid: int) -> LeaseHolder | None:
    """Claim the lease of that number; returns None where it is taken."""
    if number > _LARGEST:
        raise StorageError(
            f"'lease/{number - 1}' in {without_secrets(storage.uri)!r} has a number that no run reaches, so it was not "
            "written by one. Remove that file."
        )
    holder = LeaseHolder(
        number=number,
        host=host,
        pid=pid,
        user=_user(),
        started=time.time(),
        token=secrets.token_hex(16),
        machine=_machine(),
    )
    fields = {name: getattr(holder, name) for name in ("host", "pid", "user", "started", "token", "machine")}
    return holder if storage.put_if_absent(f"lease/{number:04d}", msgspec.json.encode(fields)) else None


def _machine() -> str:
    """Return an id that differs between machines or containers of the same name, and between boots."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # a container's user without a name


# --------------------------------------------------------------------------- the beats of a holder without a lock


def _beat_key(number: int) -> str:
    return f"lease/{number:04d}.beat"


class _Heart:
    """The thread that sends heartbeats of a holder, and detects when it was taken for dead."""

    def __init__(
        self, storage: Storage, holder: LeaseHolder, on_lost: Callable[[LeaseHolder], None] | None
    ) -> None:
        #: A beat that cannot be put soon is overtaken by the next.
        self._storage = storage.within(BEAT_INTERVAL_S)
        self._holder, self._on_lost = holder, on_lost
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="powertrain-lease", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop heartbeats, except one on its way to storage that does not answer."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * BEAT_INTERVAL_S)

    def _run(self) -> None:
        count = 0
        while True:
            count += 1
            try:
                self._storage.put(_beat_key(self._holder.number), f"{self._holder.token} {count}".encode())
                newer = _newer(self._storage, self._holder.number)
            except (OSError, StorageError):
                newer = None  # storage is in trouble; its writers warn of it
            if newer is not None:
                if self._on_lost is not None and not self._stopping.is_set():
                    self._on_lost(newer)
                return
            if self._stopping.wait(BEAT_INTERVAL_S):
                return


def _claim_watching(storage: Storage, host: str, pid: int) -> tuple[LeaseHolder, bool]:
    """Claim the next lease once no live process holds the newest; return it, and whether that one was released (or
    never was)."""
    while True:
        keys = [entry.key for entry in storage.list("lease")]
        before = _newest_holder(storage, keys)
        free = before is None or before.released
        if before is not None and not free and not _falls_silent(storage, before):
            continue  # it was given back just now
        if holder := _claim(storage, max(_numbers(keys), default=0) + 1, host, pid):
            return holder, free
        # Another start was quicker: check that one now.


def _falls_silent(storage: Storage, holder: LeaseHolder) -> bool:
    """Return True when ``holder`` is dead or has sent no heartbeat for :data:`SILENCE_TIMEOUT_S`, False when it gave
    its lease back.

    Raises :class:`RunInUseError` as soon as it beats.
    """
    seen = _beat(storage, holder)
    silent_since = time.monotonic() - _age_of_beat(storage, holder)
    while not _is_gone(holder) and time.monotonic() - silent_since < SILENCE_TIMEOUT_S:
        time.sleep(_POLL_INTERVAL_S)
        if _beat(storage, holder) != seen:
            newest = current_holder(storage)
            if newest is not None and newest.number == holder.number and newest.released:
                return False
            raise _in_use(storage, holder)
    return True


def _beat(storage: Storage, holder: LeaseHolder) -> bytes | None:
    try:
        return storage.get(_beat_key(holder.number), limit=RECORD_BYTES_LIMIT)
    except FileNotFoundError:
        return None


def _age_of_beat(storage: Storage, holder: LeaseHolder) -> float:
    """Return the seconds since the last heartbeat by the storage's clock; 0 where unknown."""
    looking = f"lease/looking-{secrets.token_hex(8)}"
    storage.put(looking, b"")
    try:
        now = storage.modified(looking)
        try:
            last = storage.modified(_beat_key(holder.number))
        except FileNotFoundError:
            last = storage.modified(f"lease/{holder.number:04d}")
    except OSError:
        return 0.0
    finally:
        storage.delete(looking)
    return max(0.0, now - last)


def _is_gone(holder: LeaseHolder) -> bool:
    """Return True when the holder was a process of this very machine and is gone."""
    here = bool(holder.machine) and holder.machine == _machine()
    return here and holder.host == socket.gethostname() and not is_alive(holder.pid)


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
    """Close inherited locks; runs first in each forked child."""
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


def _open_lock(path: Path, shared: bool) -> int:
    """Open the lock file, made if absent. Where storage is not shared no other user can open it, and so none can take
    the lock to keep the owner out."""
    try:
        descriptor = open_below(path, 3, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StorageError(
            f"The lock file {str(path)!r} cannot be opened: {error.strerror}. Check who owns the run's directory, or "
            "choose another name or storage path."
        ) from error
    status = os.fstat(descriptor)
    # Every user who may create files in the shared directory may take its lock, whatever the umask or an earlier mode.
    writers = stat.S_IMODE(os.stat(path.parent).st_mode) & 0o022 if shared else 0
    mode = 0o600 | writers | writers << 1
    if stat.S_IMODE(status.st_mode) != mode and status.st_uid == os.geteuid():
        os.fchmod(descriptor, mode)
    return descriptor


def _lock(storage: Storage, shared: bool) -> _FileLock:
    """Take the lock of a run in a file system; raises :class:`RunInUseError` when it is taken."""
    path = storage.local_path("lease/lock")
    assert path is not None
    real = os.path.realpath(path)
    with _held_guard:
        taken = real in _held
        if not taken:
            descriptor = _open_lock(path, shared)
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


def _holder_of_a_taken_lock(storage: Storage) -> LeaseHolder | None:
    """Return the process that has the lock; None where it has not written its lease within a moment.

    Between locking and claiming, the newest lease is still that of an earlier holder, which is not named: it is over.
    """
    deadline = time.monotonic() + _HOLDER_TIMEOUT_S
    while time.monotonic() <= deadline:
        holder = current_holder(storage)
        if holder and not holder.released and _may_live(holder):
            return holder
        time.sleep(0.01)
    return None


def _refuse_unreleased(storage: Storage) -> None:
    """Refuse an unreleased lease, without locks, unless its process is known to be gone."""
    holder = current_holder(storage)
    if holder is None or holder.released or not _may_live(holder):
        return
    path = storage.local_path(f"lease/{holder.number:04d}")
    raise RunInUseError(
        f"{_in_use(storage, holder)} The file system has no file locks, so whether that process still lives "
        f"cannot be seen from here: if it is gone, delete {str(path)!r} and start again."
    )


def _may_live(holder: LeaseHolder) -> bool:
    """Return False when the holder was on this host and no process has its number any more."""
    return holder.host != socket.gethostname() or is_alive(holder.pid)


def _since(started: float) -> str:
    """Return when a lease was taken, as text; "" for an impossible time."""
    try:
        return f" since {datetime.fromtimestamp(started).astimezone().strftime('%Y-%m-%d %H:%M:%S %z')}"
    except (ValueError, OverflowError, OSError):
        return ""


def _in_use(storage: Storage, holder: LeaseHolder | None) -> RunInUseError:
    who = "by another process"
    if holder is not None:
        who = (
            f"by process {holder.pid} of user {holder.user!r} on host {holder.host!r}{_since(holder.started)}"
        )
    place = without_secrets(storage.uri)
    return RunInUseError(
        f"The run at {place!r} is in use {who}. Wait until it ends, stop it, or choose another name."
    )
