"""Decoded blocks as files, shared by the processes of a node within a budget of bytes.

::

    {directory}/
      total              bytes that all files here have claimed; locked while they change
      3f…9a-17.arrow     block 17 of one source, whole: an Arrow IPC stream that ends with its end mark
      3f…9a-18.part      being decoded by the process that holds its lock; its size is its claim
      3f…9a-d0….pixels   decoded images of one column, see pixels.py; each user holds a shared lock of it

The first process to lock the ``.part`` of a block decodes it; the others wait for that lock. The kernel
releases the locks of a dead process, so the next one takes over. Nothing is flushed to the disk; the file names
contain the boot of the machine in which they were written, so files left by a power failure are never read.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

Batches = tuple[pa.RecordBatch, ...]

_WHOLE, _UNFINISHED, _PIXELS, _TOTAL = ".arrow", ".part", ".pixels", "total"
#: An Arrow IPC stream ends with this; a file without it was cut short.
_END_MARK = b"\xff\xff\xff\xff\x00\x00\x00\x00"
#: Bytes of a stream besides its batches: the schema, generously, and the end mark.
_BESIDES_BATCHES = 4096
#: A full cache frees a hundredth of itself at a time, so that not every new block has to list all files.
_FREED_AT_ONCE = 100
#: Mode of a released file: its owner may not write to it any more.
_IN_USE, _RELEASED = 0o600, 0o400
#: Seconds between two attempts to take a lock that another process holds.
_FIRST_RETRY_DELAY_S, _LAST_RETRY_DELAY_S = 0.001, 0.01


class NoRoom(Exception):
    """Raised where data cannot be kept on disk; the message is a clause with the reason."""


class GivenUp(Exception):
    """Raised when the caller stopped waiting for a block that another process decodes."""


@dataclass(frozen=True)
class KeptFile:
    """A file that may be removed: a whole block, or pixels that are not in use."""

    name: str
    nbytes: int
    #: Time of its last opening or release, in nanoseconds.
    used: int
    is_released: bool
    suffix: str = _WHOLE

    @property
    def source(self) -> str:
        return self.name.partition("-")[0]


def eviction_order(files: Iterable[KeptFile]) -> list[KeptFile]:
    """Return files in the order in which they are removed when room is needed.

    Released files come first. An epoch reads each block once, in a new order: a block that has just been released is
    not needed before the next epoch, while one that was released in the last epoch is needed in this one. So within
    one source the latest goes first. (With the earliest first, a cache that holds half of the data would have only 15
    % of the blocks when they are needed, instead of 50 %.) Sources unused for longest go before others. Files in use
    come last: their users keep their mappings.
    """
    files = list(files)
    newest: dict[str, int] = {}
    for file in files:
        newest[file.source] = max(file.used, newest.get(file.source, 0))
    return sorted(files, key=lambda file: _eviction_key(file, newest[file.source]))


def _eviction_key(file: KeptFile, source_used: int) -> tuple[bool, int, int, str]:
    if file.is_released:
        return False, source_used, -file.used, file.name
    return True, 0, file.used, file.name


def this_boot() -> str:
    """Return a text that differs after each boot of the machine where the system provides one; else a constant."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def sweep(directory: str) -> None:
    """Remove the cache. Blocks that a process has open stay readable for it."""
    shutil.rmtree(directory, ignore_errors=True)


class CacheDirectory:
    """The cached blocks of a node. Any number of processes and threads use one directory at once."""

    def __init__(self, directory: str, disk_bytes: int) -> None:
        """Files are made with the first block. Together they take at most ``disk_bytes``, not counting removed files
        that are still mapped."""
        self._directory = Path(directory)
        self.disk_bytes = disk_bytes

    def find_or_begin(self, name: str, rows: int, stopped: Callable[[], bool]) -> Batches | Making:
        """Return the block ``name`` of ``rows`` rows, or the exclusive right to make it.

        Waits for a process that makes it; raises :class:`GivenUp` when ``stopped()`` meanwhile. Raises :class:`NoRoom`
        where the directory cannot be used.
        """
        with _no_room_if_refused(self._directory):
            while True:
                result = self.find(name, rows) or self._begin(name, rows, stopped)
                if result is not None:
                    return result

    def find(self, name: str, rows: int) -> Batches | None:
        """Return the batches of a whole block, mapped into memory; None where it is absent. A broken one is removed."""
        path = self._path(name, _WHOLE)
        try:
            batches = _mapped(path)
        except FileNotFoundError:
            return None
        except pa.ArrowInvalid:
            batches = None
        if batches is None or sum(batch.num_rows for batch in batches) != rows:
            path.unlink(missing_ok=True)
            return None
        self._mark(name, _IN_USE)
        return batches

    def release(self, name: str) -> None:
        """Mark the block as not needed any more in this epoch by this process."""
        self._mark(name, _RELEASED)

    def _mark(self, name: str, mode: int) -> None:
        path = self._path(name, _WHOLE)
        with suppress(OSError):  # removed meanwhile; the mark only helps to choose files to remove
            os.utime(path)
            os.chmod(path, mode)

    def _path(self, name: str, suffix: str) -> Path:
        return self._directory / f"{name}{suffix}"

    def _begin(self, name: str, rows: int, stopped: Callable[[], bool]) -> Making | None:
        """Return the right to make a block; None where it was or may have been made while its lock was awaited."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._path(name, _UNFINISHED)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _wait_for_lock(descriptor, stopped)
            claimed = os.fstat(descriptor).st_size
            is_mine = _is_at(path, descriptor)
            if is_mine and not claimed and not self._path(name, _WHOLE).exists():
                return Making(self, name, path, descriptor, rows)
            if is_mine:  # left by a dead process, or made just after another had finished the block
                self.remove_unfinished(path, claimed)
        except BaseException:
            _unlock(descriptor)
            raise
        _unlock(descriptor)
        return None

    # -- accounting: file sizes and the total change only with the total locked, and the total never falls behind the
    # files, wherever a process is killed

    def claim(self, descriptor: int, claimed: int, size: int) -> None:
        """Grow an unfinished file to ``size`` bytes, removing other files for it. Raises :class:`NoRoom`."""
        with self._books() as books:
            extra = size - claimed
            if books.total + extra > self.disk_bytes and size <= self.disk_bytes:
                books.write(self._make_room(extra))
            if books.total + extra > self.disk_bytes:
                raise NoRoom(
                    f"a block needs {_megabytes(size)}, {_megabytes(books.total)} are taken, and the cache may have "
                    f"{_megabytes(self.disk_bytes)}"
                )
            disk = os.fstatvfs(descriptor)
            if disk.f_bavail * disk.f_frsize < extra:
                raise NoRoom(f"the disk has no {_megabytes(extra)} left for a block")
            books.write(books.total + extra)
            os.ftruncate(descriptor, size)

    def open_pixels(self, name: str) -> int | None:
        """Return a descriptor to read and write the pixels ``name``, or None where they are absent. While it is open,
        the file is not removed to make room. Raises :class:`NoRoom` where the directory cannot be used."""
        path = self._path(name, _PIXELS)
        with _no_room_if_refused(self._directory):
            if not path.exists():
                return None
            with self._books():  # so that it is not removed before its lock is held
                return _opened_for_use(path)

    def make_pixels(self, name: str, header: bytes, filled: int, size: int) -> int:
        """As :meth:`open_pixels`, if need be of a new file of ``size`` bytes: ``header``, zeros up to ``filled``, and a
        hole. Zeros may be read through a mapping; reading a hole takes disk on some file systems, and is fatal where
        the disk is full.

        Raises :class:`NoRoom` unless it fits into half of the budget together with all pixels in use, and into the
        budget left by blocks: no block is removed for pixels.
        """
        path, unfinished = self._path(name, _PIXELS), self._path(name, _UNFINISHED)
        with _no_room_if_refused(self._directory):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._books() as books:
                descriptor = _opened_for_use(path)
                if descriptor is not None:
                    return descriptor
                self._check_room_for_pixels(size, books)
                books.write(books.total + size)
                descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    _write_all(descriptor, header.ljust(filled, b"\0"))
                    os.ftruncate(descriptor, size)
                    fcntl.flock(descriptor, fcntl.LOCK_SH)
                    os.rename(unfinished, path)
                except BaseException:
                    os.close(descriptor)
                    unfinished.unlink(missing_ok=True)
                    books.write(books.total - size)
                    raise
                return descriptor

    def _check_room_for_pixels(self, size: int, books: _Books) -> None:
        """Raise :class:`NoRoom` unless ``size`` more fit, after removing unused pixels if needed."""
        there = self._inspect_data()
        total, pixels = there.total, there.pixels
        for file in eviction_order(file for file in there.removable if file.suffix == _PIXELS):
            if self._fits(total, pixels, size):
                break
            self._path(file.name, file.suffix).unlink(missing_ok=True)
            total, pixels = total - file.nbytes, pixels - file.nbytes
        books.write(total)
        if not self._fits(total, pixels, size):
            raise NoRoom(
                f"pixels need {_megabytes(size)}, {_megabytes(total)} are taken ({_megabytes(pixels)} by pixels), and "
                f"the cache may have {_megabytes(self.disk_bytes)}, half of it for pixels"
            )
        disk = os.statvfs(self._directory)
        if disk.f_bavail * disk.f_frsize < size:
            raise NoRoom(f"the disk has no {_megabytes(size)} left for pixels")

    def _fits(self, total: int, pixels: int, size: int) -> bool:
        return total + size <= self.disk_bytes and pixels + size <= self.disk_bytes // 2

    def finish(self, name: str, descriptor: int, claimed: int, size: int) -> Batches:
        """Turn an unfinished file of ``size`` bytes into a whole block, mapped into memory."""
        path = self._path(name, _UNFINISHED)
        with self._books() as books:
            os.ftruncate(descriptor, size)
            batches = _mapped(path)  # before another process could remove it again
            os.rename(path, self._path(name, _WHOLE))
            books.write(books.total - claimed + size)
        return batches

    def remove_unfinished(self, path: Path, claimed: int) -> None:
        """Remove an unfinished file whose lock is held, and release its claim."""
        with self._books() as books:
            path.unlink(missing_ok=True)
            books.write(books.total - claimed)

    def _make_room(self, extra: int) -> int:
        """Remove files until ``extra`` bytes fit. Return the bytes of the remaining files, counted anew."""
        there = self._inspect_data()
        total = there.total
        goal = self.disk_bytes - extra - self.disk_bytes // _FREED_AT_ONCE
        for file in eviction_order(there.removable):
            if total <= goal:
                break
            self._path(file.name, file.suffix).unlink(missing_ok=True)
            total -= file.nbytes
        return total

    def _inspect_data(self) -> _Contents:
        """Return the contents of the directory, after removing files of dead processes."""
        removable, total, pixels = [], 0, 0
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    facts = entry.stat()
                    name, suffix = os.path.splitext(entry.name)
                    if suffix == _WHOLE:
                        is_released = not facts.st_mode & stat.S_IWUSR
                        removable.append(KeptFile(name, facts.st_size, facts.st_mtime_ns, is_released))
                    elif suffix == _PIXELS:
                        pixels += facts.st_size
                        if not _is_used(entry.path):
                            unused = KeptFile(name, facts.st_size, facts.st_mtime_ns, True, _PIXELS)
                            removable.append(unused)
                    elif suffix != _UNFINISHED or _remove_if_abandoned(entry.path):
                        continue
                    total += facts.st_size
        return _Contents(removable, total, pixels)

    @contextmanager
    def _books(self) -> Iterator[_Books]:
        descriptor = os.open(self._directory / _TOTAL, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # held briefly
            books = _Books(descriptor)
            if not books.known:
                books.write(self._inspect_data().total)
            yield books
        finally:
            _unlock(descriptor)


@dataclass(frozen=True)
class _Contents:
    """The contents of the directory."""

    removable: list[KeptFile]
    #: Bytes of all files, and of the pixel files.
    total: int
    pixels: int


class _Books:
    """The total as stored on disk. Valid while the file is locked."""

    def __init__(self, descriptor: int) -> None:
        text = os.pread(descriptor, 32, 0)
        self._descriptor = descriptor
        self.known = len(text) == 20 and text.isdigit()
        self.total = int(text) if self.known else 0

    def write(self, total: int) -> None:
        self.total = max(0, total)
        os.pwrite(self._descriptor, b"%020d" % self.total, 0)


class Making:
    """A block that this process alone may write. Used in a ``with``: an unfinished block is removed at its end."""

    def __init__(self, cache: CacheDirectory, name: str, path: Path, descriptor: int, rows: int) -> None:
        self._cache, self._name, self._path, self._descriptor = cache, name, path, descriptor
        self._rows = rows
        self._claimed = 0
        self._sink: pa.OSFile | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        #: Number of written batches.
        self.batches = 0

    def __enter__(self) -> Making:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()

    def abandon(self) -> None:
        """Remove an unfinished block, and let other processes retry."""
        if self._descriptor < 0:
            return
        try:
            with suppress(
                OSError, pa.ArrowException
            ):  # a full disk: the unwritten rest does not matter any more
                self._close_stream()
            with suppress(OSError):  # the directory was removed, and the file with it
                self._cache.remove_unfinished(self._path, self._claimed)
        finally:
            self._close()

    def append(self, batch: pa.RecordBatch) -> None:
        """Write a batch. Raises :class:`NoRoom`."""
        with _no_room_if_refused(self._path.parent):
            if self._sink is None or self._writer is None:
                self._sink = pa.OSFile(str(self._path), "wb")
                # Estimated from one batch: better no room now than after half of the work.
                self._claim(_size(batch) * max(1, self._rows) // max(1, batch.num_rows) + _BESIDES_BATCHES)
                self._writer = pa.ipc.new_stream(self._sink, batch.schema)
            self._claim(self._sink.tell() + _size(batch) + _BESIDES_BATCHES)
            self._writer.write_batch(batch)
        self.batches += 1

    def finish(self) -> Batches:
        """Turn it into a whole block, mapped into memory. Raises :class:`NoRoom`. At least one batch is written."""
        with _no_room_if_refused(self._path.parent):
            size = self._close_stream()
            self._claim(size)  # if Arrow wrote more than estimated
            batches = self._cache.finish(self._name, self._descriptor, self._claimed, size)
        self._close()
        return batches

    def _claim(self, size: int) -> None:
        if size > self._claimed:
            self._cache.claim(self._descriptor, self._claimed, size)
            self._claimed = size

    def _close_stream(self) -> int:
        """Close the stream and return the number of written bytes."""
        if self._sink is None or self._writer is None:
            return 0
        sink, writer = self._sink, self._writer
        self._sink = self._writer = None
        writer.close()
        size = sink.tell()
        sink.close()
        return size

    def _close(self) -> None:
        _unlock(self._descriptor)
        self._descriptor = -1


def _mapped(path: Path) -> Batches:
    """Return the batches of a file, none of them read yet. Raises ``ArrowInvalid`` where it is not whole."""
    mapped = pa.memory_map(str(path))
    try:
        size = mapped.size()
        mapped.seek(max(0, size - len(_END_MARK)))
        if mapped.read(len(_END_MARK)) != _END_MARK:
            raise pa.ArrowInvalid(f"{path} does not end as an Arrow stream does.")
        mapped.seek(0)
        return tuple(pa.ipc.open_stream(mapped))
    finally:
        mapped.close()  # closes the descriptor; the memory stays mapped as long as a batch needs it


def _size(batch: pa.RecordBatch) -> int:
    """Return the bytes of a batch in a file, with the dictionaries that precede it."""
    columns: list[Any] = [column for column in batch.columns if pa.types.is_dictionary(column.type)]
    dictionaries: int = sum(column.dictionary.nbytes + 1024 for column in columns)
    return pa.ipc.get_record_batch_size(batch) + dictionaries + 1024


@contextmanager
def _no_room_if_refused(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NoRoom(f"{directory} refused: {error}") from error


def _wait_for_lock(descriptor: int, stopped: Callable[[], bool]) -> None:
    """Poll for a lock. A blocking call could not be interrupted when the holder is stopped but not dead."""
    pause = _FIRST_RETRY_DELAY_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if stopped():
                raise GivenUp from None
        time.sleep(pause)
        pause = min(2 * pause, _LAST_RETRY_DELAY_S)


def _opened_for_use(path: Path) -> int | None:
    """Open a file with a shared lock, which :func:`_is_used` checks; None where the file does not exist."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.utime(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is_used(path: str) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        _unlock(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view, at = memoryview(data), 0
    while at < len(data):
        at += os.pwrite(descriptor, view[at:], at)


def _remove_if_abandoned(path: str) -> bool:
    """Remove an unfinished file of a dead process; False where a live process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except BlockingIOError:
        return False
    finally:
        _unlock(descriptor)


def _unlock(descriptor: int) -> None:
    """Unlock and close. Closing is not enough: a forked child may share the open file."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Return False when the file was renamed or removed while its lock was awaited."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
