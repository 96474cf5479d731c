"""The upload of staged shares to storage, by a process of its own on each node, which outlives ranks and attempts.

The process does one thing: the controller sends it the files of a share, and it makes them durable in storage, removes
the share and reports it. It hashes on the way. When storage fails it retries until the deadline, and reports the
storage's error. Where the engine does not start the ranks' processes (inline, torchrun) each rank uploads its own
shares on side threads, with the same :class:`ShareUploader`.

A repeated command is harmless: a file that is stored already is only hashed. So a killed uploader is replaced, and the
new one gets all commands again.
"""

from __future__ import annotations

import errno
import os
import pickle
import queue
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from powertrain.checkpoint.chain import refuse_if_removed
from powertrain.checkpoint.staging import give_back, remove_share, source_of
from powertrain.errors import PowertrainError
from powertrain.storage import Storage, boundaries
from powertrain.storage.base import FileDigest
from powertrain.storage.full_disk import describe_write_error, full_place
from powertrain.storage.local import LocalStorage
from powertrain.wire.envelope import FromController, FromWorker
from powertrain.wire.from_controller import Dismissed, Drop, UploadShare
from powertrain.wire.from_worker import Hello, ShareUploaded, UploadTrouble
from powertrain.wire.keys import ConnectionInfo
from powertrain.wire.link import Link
from powertrain.wire.values import FilePart

#: "package.module:function" for an engine.
ENTRY = "powertrain.checkpoint.uploader:run"
#: Files under way at the same time.
_THREADS = 4
#: Seconds before the second try, and the most between two tries.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 15.0
_LEAVE_TIMEOUT_S = 1.0
#: Below a share that stays: second names of its files, for storage to take.
_LINKS = "links"
#: Seconds for which a lease that was found in storage across a network is not looked for again.
_LEASE_INTERVAL_S = 3.0

#: Permanent errors of a file system.
FINAL = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})

ShareKey = tuple[int, int, int]


class UploaderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an uploader needs, as one payload."""

    connection: ConnectionInfo
    #: The pickled storage of the run.
    storage: bytes
    #: Seconds after which a file that storage keeps refusing is given up.
    timeout: float
    #: The number and the token of the lease under which it uploads; "" where it is not checked.
    lease: int = 0
    token: str = ""


def run(payload: bytes) -> int:
    """Run a node's uploader until dismissed; return the exit code."""
    boundaries.role = "uploader"
    spec = msgspec.msgpack.decode(payload, type=UploaderSpec)
    Uploader(spec).serve()
    return 0


class Uploader:
    """The process's own loop: orders in, results out."""

    def __init__(self, spec: UploaderSpec, watch: int = -1) -> None:
        """``watch`` is a descriptor that ends it when it becomes readable."""
        self._link = Link(spec.connection, -1, 0)
        self._watch = watch
        self._outbox: queue.SimpleQueue[FromWorker] = queue.SimpleQueue()
        self._uploader = ShareUploader(
            lambda: pickle.loads(spec.storage), self._notify, spec.timeout, lease=(spec.lease, spec.token)
        )

    def serve(self) -> None:
        if self._watch >= 0:
            self._link.watch(self._watch)
        self._link.send([Hello(pid=os.getpid(), host=os.uname().nodename)], 0, 0)
        try:
            while True:
                orders, ended = self._link.poll(1.0)
                for order in orders:
                    if isinstance(order, Dismissed):
                        return
                    self._handle_command(order)
                if ended:
                    return
                self._flush()
        finally:
            self._uploader.close()
            self._link.close()

    def _handle_command(self, order: FromController) -> None:
        if isinstance(order, UploadShare):
            self._uploader.upload(order)
        elif isinstance(order, Drop):
            self._uploader.drop(order)

    def _notify(self, message: FromWorker) -> None:
        self._outbox.put(message)
        self._link.wake()

    def _flush(self) -> None:
        while self._link.room > 0 and not self._outbox.empty():
            self._link.send([self._outbox.get()], 0, 0)


class ShareUploader:
    """Uploads shares on a few threads, first come first served. Any thread may call it."""

    def __init__(
        self,
        open_storage: Callable[[], Storage],
        notify: Callable[[FromWorker], None],
        timeout: float,
        pause: Callable[[float], None] = time.sleep,
        lease: tuple[int, str] = (0, ""),
    ) -> None:
        """Create an uploader. Storage is opened when first needed. ``notify`` is called once for each finished share,
        and for each failed try.

        Where ``lease`` has a token, no file is uploaded once that lease is not in the storage any more: the directory
        was removed, and in one that another start has made checkpoints have the same names."""
        self._lease = lease
        self._lease_check = threading.Lock()
        #: When a check that found the lease began (monotonic).
        self._lease_seen_at = float("-inf")
        self._open_storage, self._notify, self._timeout, self._pause = open_storage, notify, timeout, pause
        self._storage: Storage | None = None
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[tuple[_Share, str] | None] = queue.SimpleQueue()
        self._shares: dict[ShareKey, _Share] = {}
        self._threads: list[threading.Thread] = []
        #: Each thread's upload: the share and the name of the file.
        self._current = threading.local()

    def upload(self, order: UploadShare) -> None:
        """Begin to upload a share. A share that is under way already is not begun again."""
        key = (order.attempt, order.row, order.rank)
        with self._lock:
            if key in self._shares:
                return
            share = self._shares[key] = _Share(order)
        self._start_threads()
        for name in order.names:
            self._work.put((share, name))
        if not order.names:
            self._finish(share)

    def drop(self, order: Drop) -> None:
        """Forget a share: it is not reported any more, and its files are removed or given back."""
        with self._lock:
            share = self._shares.pop((order.attempt, order.row, order.rank), None)
        if share is not None:
            share.dropped = True
        if order.back:
            give_back(order.staged, order.back)
        else:
            remove_share(order.staged)

    def close(self) -> None:
        """Stop, without finishing uploads in progress."""
        with self._lock:
            for share in self._shares.values():
                share.dropped = True
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(_LEAVE_TIMEOUT_S)  # a thread that hangs in storage is left: it dies with the process

    def _start_threads(self) -> None:
        with self._lock:
            if self._threads:
                return
            self._storage = self._open_storage().within(self._timeout)
            if hasattr(self._storage, "on_retry"):  # it tries again by itself, and would do so in silence
                self._storage.on_retry = self._storage_refuses
            self._threads = [
                threading.Thread(target=self._run, name=f"powertrain-uploader-{number}", daemon=True)
                for number in range(_THREADS)
            ]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            share, name = item
            if share.dropped:
                continue
            try:
                self._current.file = share, name
                digest = self._upload_file(share, name)
                share.done[name] = FilePart(name=name, size=digest.size, xxh3=digest.xxh3)
            except _Dropped:
                continue
            except (
                BaseException
            ) as error:  # a file system of the user's may raise anything: this thread must live
                if not share.error:
                    place = _place_of(self._storage, share)
                    share.error = f"{name}: {describe_write_error(error, place)}"
                    share.error_place = full_place(error, place)
            with self._lock:
                share.left -= 1
                last = share.left == 0
            if last:
                self._finish(share)

    def _check_lease(self, storage: Storage) -> None:
        """Raise :class:`FencedError` where the lease is not in storage any more, ``OSError`` where that is not known.

        A local directory is checked before each try. Remote storage is not checked more often than every
        :data:`_LEASE_INTERVAL_S`, for all threads together.
        """
        number, token = self._lease
        if not token:
            return
        if isinstance(storage, LocalStorage):
            refuse_if_removed(storage, number, token)
            return
        with self._lease_check:
            began = time.monotonic()
            if began - self._lease_seen_at >= _LEASE_INTERVAL_S:
                refuse_if_removed(storage, number, token)
                self._lease_seen_at = began

    def _upload_file(self, share: _Share, name: str) -> FileDigest:
        """Make one file durable in storage; tries again until the deadline."""
        assert self._storage is not None
        deadline, tries = time.monotonic() + self._timeout, 0
        key = f"checkpoints/{share.order.checkpoint}/{name}"
        while True:
            if share.dropped:
                raise _Dropped
            try:
                self._check_lease(self._storage)
                source = source_of(share.order.staged, name)
                return _put(self._storage, key, source, _link_to(source, share, name))
            except PowertrainError:
                raise  # a permanent failure
            except OSError as error:
                gone = (
                    isinstance(error, FileNotFoundError) and not source_of(share.order.staged, name).exists()
                )
                if gone or error.errno in FINAL:
                    raise  # trying again would change nothing
                pause = pause_before_retry(tries, random.random())
                if time.monotonic() + pause > deadline:
                    raise
                tries += 1
                place = _place_of(self._storage, share)
                reason = f"{name}: {describe_write_error(error, place)}"
                self._report_trouble(share, reason, full_place(error, place))
                self._pause(pause)

    def _storage_refuses(self, reason: str, _: float) -> None:
        """Report a retry of storage on this thread."""
        share, name = getattr(self._current, "file", (None, ""))
        if share is None:
            return  # a thread of the storage's own
        if share.dropped:
            raise _Dropped
        self._report_trouble(share, f"{name}: {reason}")

    def _report_trouble(self, share: _Share, reason: str, place: str = "") -> None:
        attempt, row, rank = share.key
        self._notify(UploadTrouble(attempt=attempt, row=row, rank=rank, reason=reason, place=place))

    def _finish(self, share: _Share) -> None:
        attempt, row, rank = share.key
        files = [share.done[name] for name in share.order.names if name in share.done]
        if not share.error and not share.order.keeps:
            remove_share(share.order.staged)
        with self._lock:
            self._shares.pop(share.key, None)
        if not share.dropped:
            self._notify(
                ShareUploaded(
                    attempt=attempt,
                    row=row,
                    rank=rank,
                    files=files,
                    error=share.error,
                    error_place=share.error_place,
                )
            )


def pause_before_retry(tries: int, chance: float) -> float:
    """Return seconds before the next try: doubling, spread by ``chance`` (0 to 1) so that nodes do not march in
    step."""
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(tries, 20))
    return longest * (0.5 + 0.5 * chance)


def _link_to(source: Path, share: _Share, name: str) -> Path | None:
    """Return the file that storage may take: of a share that stays a second name, or None where it can have none."""
    if not share.order.keeps:
        return source
    if source.is_symlink():
        return None
    link = Path(share.order.staged, _LINKS, name)
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        os.link(source, link)
    except OSError:  # not every file system has links
        return None
    return link


def _put(storage: Storage, key: str, source: Path, given: Path | None) -> FileDigest:
    """Put a file into storage the cheapest way: a rename where it lies on the same file system, else a copy.

    ``given`` is the path that may be renamed: ``source`` or another name of it; None for a copy.
    """
    if isinstance(storage, LocalStorage) and given is not None and not given.is_symlink():
        try:
            return storage.adopt(key, given)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
    if not source.exists():  # an earlier uploader had put it, and was killed before it could report it
        return storage.digest(key)
    return storage.put_file(key, source)


def _place_of(storage: Storage | None, share: _Share) -> str:
    """Return the directory that a share is uploaded to; "" where storage has no real files."""
    key = f"checkpoints/{share.order.checkpoint}"
    return str((storage.local_path(key) if storage is not None else None) or "")


class _Dropped(Exception):
    """The share is no longer wanted."""


class _Share:
    """One share under way."""

    def __init__(self, order: UploadShare) -> None:
        self.order = order
        self.key: ShareKey = (order.attempt, order.row, order.rank)
        self.left = len(order.names)
        self.done: dict[str, FilePart] = {}
        self.error = self.error_place = ""
        self.dropped = False
