"""Carrying staged shares to storage: a process of its own on each node, which outlives ranks and attempts.

The process does one thing: it is told by the controller which files of which share count, makes them durable in
storage, removes the share and says so. It hashes on the way. When storage refuses it tries again until the deadline,
and tells what storage answers. Where ranks live in processes that are not ours (inline, torchrun) each rank carries
its own shares on side threads, with the same :class:`Carrier`.

Being told twice is harmless: a file that is in its place already is only hashed. So a carrier that was killed is
replaced, and the new one is told everything again.
"""

from __future__ import annotations

import errno
import os
import pickle
import queue
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from powertrain import wire
from powertrain.checkpoint.saver import source_of
from powertrain.errors import PowertrainError
from powertrain.storage import Storage, boundaries
from powertrain.storage.base import FileDigest
from powertrain.storage.local import LocalStorage

#: "package.module:function" for an engine.
ENTRY = "powertrain.checkpoint.uploader:run"
#: Files under way at the same time.
_THREADS = 4
#: Seconds before the second try, and the most between two tries.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 15.0
_LEAVE_WITHIN = 1.0

#: What a file system answers that no later try can change.
FINAL = frozenset({errno.ENAMETOOLONG, errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.ELOOP})

ShareKey = tuple[int, int, int]


class UploaderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an uploader needs, as one payload."""

    door: wire.Door
    #: The pickled storage of the run.
    storage: bytes
    #: Seconds after which a file that storage keeps refusing is given up.
    timeout: float


def run(payload: bytes) -> int:
    """Be a node's uploader until dismissed; returns the exit code."""
    boundaries.role = "uploader"
    spec = msgspec.msgpack.decode(payload, type=UploaderSpec)
    Uploader(spec).serve()
    return 0


class Uploader:
    """The process's own loop: orders in, results out."""

    def __init__(self, spec: UploaderSpec, watch: int = -1) -> None:
        """``watch`` is a descriptor that ends it when it becomes readable."""
        self._link = wire.Link(spec.door, -1, 0)
        self._watch = watch
        self._outbox: queue.SimpleQueue[wire.FromWorker] = queue.SimpleQueue()
        self._carrier = Carrier(lambda: pickle.loads(spec.storage), self._tell, spec.timeout)

    def serve(self) -> None:
        if self._watch >= 0:
            self._link.watch(self._watch)
        self._link.send([wire.Hello(pid=os.getpid(), host=os.uname().nodename)], 0, 0)
        try:
            while True:
                orders, ended = self._link.poll(1.0)
                for order in orders:
                    if isinstance(order, wire.Dismissed):
                        return
                    self._obey(order)
                if ended:
                    return
                self._flush()
        finally:
            self._carrier.close()
            self._link.close()

    def _obey(self, order: wire.FromController) -> None:
        if isinstance(order, wire.Carry):
            self._carrier.carry(order)
        elif isinstance(order, wire.Drop):
            self._carrier.drop(order)

    def _tell(self, message: wire.FromWorker) -> None:
        self._outbox.put(message)
        self._link.wake()

    def _flush(self) -> None:
        while self._link.room > 0 and not self._outbox.empty():
            self._link.send([self._outbox.get()], 0, 0)


class Carrier:
    """Carries shares on a few threads, first come first served. Any thread may call it."""

    def __init__(
        self,
        open_storage: Callable[[], Storage],
        tell: Callable[[wire.FromWorker], None],
        timeout: float,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """``tell`` hears of every share once, and of trouble on the way. Storage is opened when first needed."""
        self._open_storage, self._tell, self._timeout, self._pause = open_storage, tell, timeout, pause
        self._storage: Storage | None = None
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[tuple[_Share, str] | None] = queue.SimpleQueue()
        self._shares: dict[ShareKey, _Share] = {}
        self._threads: list[threading.Thread] = []
        #: What each thread is carrying: the share and the name of the file.
        self._carrying = threading.local()

    def carry(self, order: wire.Carry) -> None:
        """Begin to carry a share. A share that is under way already is not begun again."""
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

    def drop(self, order: wire.Drop) -> None:
        """Forget a share: it is not told of any more, and its files are removed."""
        with self._lock:
            share = self._shares.pop((order.attempt, order.row, order.rank), None)
        if share is not None:
            share.dropped = True
        shutil.rmtree(order.staged, ignore_errors=True)

    def close(self) -> None:
        """Stop. What is under way is left as it is."""
        with self._lock:
            for share in self._shares.values():
                share.dropped = True
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(_LEAVE_WITHIN)  # one that hangs in storage is left: it dies with the process

    def _start_threads(self) -> None:
        with self._lock:
            if self._threads:
                return
            self._storage = self._open_storage().within(self._timeout)
            if hasattr(self._storage, "on_retry"):  # it tries again by itself, and would do so in silence
                self._storage.on_retry = self._storage_refuses
            self._threads = [
                threading.Thread(target=self._run, name=f"powertrain-carrier-{number}", daemon=True)
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
                digest = self._carry_file(share, name)
                share.done[name] = wire.FilePart(name=name, size=digest.size, xxh3=digest.xxh3)
            except _Dropped:
                continue
            except Exception as error:
                share.error = share.error or f"{name}: {error}"
            with self._lock:
                share.left -= 1
                last = share.left == 0
            if last:
                self._finish(share)

    def _carry_file(self, share: _Share, name: str) -> FileDigest:
        """Make one file durable in storage; tries again until the deadline."""
        assert self._storage is not None
        deadline, tries = time.monotonic() + self._timeout, 0
        key = f"checkpoints/{share.order.checkpoint}/{name}"
        self._carrying.file = share, name
        while True:
            if share.dropped:
                raise _Dropped
            try:
                return _put(self._storage, key, source_of(share.order.staged, name))
            except PowertrainError:
                raise  # storage has said that trying again is of no use
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
                self._say_trouble(share, f"{name}: {error}")
                self._pause(pause)

    def _storage_refuses(self, reason: str, _: float) -> None:
        """Storage is about to try again on this thread."""
        share, name = getattr(self._carrying, "file", (None, ""))
        if share is None:
            return  # a thread of the storage's own
        if share.dropped:
            raise _Dropped
        self._say_trouble(share, f"{name}: {reason}")

    def _say_trouble(self, share: _Share, reason: str) -> None:
        attempt, row, rank = share.key
        self._tell(wire.CarryTrouble(attempt=attempt, row=row, rank=rank, reason=reason))

    def _finish(self, share: _Share) -> None:
        attempt, row, rank = share.key
        files = [share.done[name] for name in share.order.names if name in share.done]
        if not share.error:
            shutil.rmtree(share.order.staged, ignore_errors=True)
        with self._lock:
            self._shares.pop(share.key, None)
        if not share.dropped:
            self._tell(wire.Carried(attempt=attempt, row=row, rank=rank, files=files, error=share.error))


def pause_before_retry(tries: int, chance: float) -> float:
    """Seconds before the next try: doubling, spread by ``chance`` (0 to 1) so that nodes do not march in step."""
    longest = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(tries, 20))
    return longest * (0.5 + 0.5 * chance)


def _put(storage: Storage, key: str, source: Path) -> FileDigest:
    """The cheapest way into storage: a rename where the file lies on it already, else a copy."""
    if isinstance(storage, LocalStorage) and not source.is_symlink():
        try:
            return storage.adopt(key, source)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
    if not source.exists():  # a carrier before this one had put it, and was killed before it could say so
        return storage.digest(key)
    return storage.put_file(key, source)


class _Dropped(Exception):
    """The share is no longer wanted."""


class _Share:
    """One share under way."""

    def __init__(self, order: wire.Carry) -> None:
        self.order = order
        self.key: ShareKey = (order.attempt, order.row, order.rank)
        self.left = len(order.names)
        self.done: dict[str, wire.FilePart] = {}
        self.error = ""
        self.dropped = False
