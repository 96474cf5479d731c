"""Storage in a directory of this machine or of a mounted file system.

Every value is written under a temporary name, flushed to the disk, then put in place in one step, and the
directory is flushed too. So after a crash at any moment, of the process or the machine, a key has its old
value, its new value, or none; never half of one. The exception is ``put_if_absent`` on a file system without
hard links: there the key is created first and a crash can leave it short.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash

from powertrain.storage.base import TEMPORARY_PREFIX, Entry, FileDigest, Storage, check_key

if sys.platform != "win32":
    import fcntl

#: Linux's request number for "make this file share that file's blocks" (ioctl FICLONE).
_FICLONE = 0x40049409
_CHUNK = 1 << 20
#: What ``link`` answers where a file system has no hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
#: An unfinished write of another host is taken for abandoned after this many seconds.
_ABANDONED_AFTER = 3600.0


class LocalStorage:
    """A directory as storage. It is made by the first ``put``."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(os.path.abspath(root))

    def __repr__(self) -> str:
        return f"LocalStorage({str(self._root)!r})"

    @property
    def uri(self) -> str:
        return str(self._root)

    def local_path(self, key: str) -> Path:
        return self._root / check_key(key)

    def child(self, prefix: str) -> Storage:
        return LocalStorage(self._root / check_key(prefix))

    # -- writing

    def put(self, key: str, data: bytes) -> None:
        final = self.local_path(key)
        with _temporary_beside(final) as (temporary, file):
            file.write(data)
            _flush_to_disk(file)
            os.replace(temporary, final)
        _flush_directory(final.parent)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        final = self.local_path(key)
        with _temporary_beside(final) as (temporary, file):
            file.write(data)
            _flush_to_disk(file)
            placed = _place_if_absent(temporary, final)
        _flush_directory(final.parent)
        return placed

    def put_file(self, key: str, path: str | Path, *, digest: bool = True) -> FileDigest:
        final = self.local_path(key)
        with _temporary_beside(final) as (temporary, file):
            result = _copy_into(file, path, digest)
            _flush_to_disk(file)
            os.replace(temporary, final)
        _flush_directory(final.parent)
        return result

    def put_file_if_absent(self, key: str, path: str | Path) -> FileDigest | None:
        final = self.local_path(key)
        if os.path.lexists(final):
            return None
        with _temporary_beside(final) as (temporary, file):
            result = _copy_into(file, path, True)
            _flush_to_disk(file)
            placed = _place_if_absent(temporary, final)
        _flush_directory(final.parent)
        return result if placed else None

    def move(self, source: str, key: str) -> None:
        old, new = self.local_path(source), self.local_path(key)
        _make_directory(new.parent)
        os.replace(old, new)
        _flush_directory(new.parent)
        _flush_directory(old.parent)

    # -- reading

    def get(self, key: str) -> bytes:
        try:
            return self.local_path(key).read_bytes()
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, "no such key", key) from error

    def get_file(self, key: str, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.local_path(key), path)

    def list(self, prefix: str = "") -> list[Entry]:
        return sorted(
            Entry(path.relative_to(self._root).as_posix(), size)
            for path, size in self._files(prefix)
            if not path.name.startswith(TEMPORARY_PREFIX)
        )

    # -- forgetting

    def delete(self, key: str) -> None:
        path = self.local_path(key)
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        _flush_directory(path.parent)

    def delete_tree(self, prefix: str) -> None:
        path = self.local_path(prefix)
        try:
            shutil.rmtree(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        _flush_directory(path.parent)

    def sweep(self) -> int:
        swept = 0
        for path, _ in self._files(""):
            if path.name.startswith(TEMPORARY_PREFIX) and _is_abandoned(path):
                path.unlink(missing_ok=True)
                swept += 1
        return swept

    def _files(self, prefix: str) -> Iterator[tuple[Path, int]]:
        top = self.local_path(prefix) if prefix else self._root
        for directory, _, names in os.walk(top):
            for name in names:
                path = Path(directory, name)
                try:
                    yield path, path.stat().st_size
                except FileNotFoundError:
                    continue  # deleted while we looked


def digest_of(path: str | Path) -> FileDigest:
    """Size and xxh3-128 of a file's content."""
    with open(path, "rb", buffering=0) as source:
        return _read_through(source, None)


# --------------------------------------------------------------------------- temporary files


@contextmanager
def _temporary_beside(final: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in the directory of ``final``, which is made if absent; gone afterwards unless moved."""
    _make_directory(final.parent)
    host = _host_in_names()
    path = final.parent / f"{TEMPORARY_PREFIX}{host}.{os.getpid()}.{secrets.token_hex(8)}"
    try:
        with open(path, "xb") as file:
            yield path, file
    finally:
        path.unlink(missing_ok=True)


def _host_in_names() -> str:
    return "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname()) or "host"


def _is_abandoned(path: Path) -> bool:
    """True when the writer of this temporary file is surely gone."""
    host, _, rest = path.name[len(TEMPORARY_PREFIX) :].partition(".")
    pid = rest.partition(".")[0]
    if host == _host_in_names() and pid.isdigit():
        return not _is_alive(int(pid))
    try:
        return time.time() - path.stat().st_mtime > _ABANDONED_AFTER
    except FileNotFoundError:
        return False


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OverflowError:
        return False
    except PermissionError:
        pass  # it exists and is another user's
    return True


# --------------------------------------------------------------------------- bytes onto the disk


def _place_if_absent(temporary: Path, final: Path) -> bool:
    """Give a finished temporary file its name unless that is taken."""
    try:
        os.link(temporary, final)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        with open(final, "xb") as file:
            _copy_into(file, temporary, False)
            _flush_to_disk(file)
        return True
    except FileExistsError:
        return False


def _copy_into(target: BinaryIO, path: str | Path, digest: bool) -> FileDigest:
    """Copy a file, by the cheapest means there is, into the empty ``target``."""
    with open(path, "rb", buffering=0) as source:
        if _reflinked(source.fileno(), target.fileno()):
            # The clone is frozen, so its digest is that of what is stored even if the source changes now.
            with open(target.name, "rb", buffering=0) as clone:
                return _read_through(clone, None) if digest else FileDigest(_size(clone.fileno()), "")
        if not digest and _copied_by_kernel(source.fileno(), target.fileno()):
            return FileDigest(_size(target.fileno()), "")
        result = _read_through(source, target)
        return result if digest else FileDigest(result.size, "")


def _reflinked(source: int, target: int) -> bool:
    """True when the file system let ``target`` share the blocks of ``source``."""
    if sys.platform != "linux":
        return False
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def _copied_by_kernel(source: int, target: int) -> bool:
    """True when the kernel copied everything; False when it copied nothing."""
    if not hasattr(os, "copy_file_range"):
        return False
    copied = 0
    try:
        while count := os.copy_file_range(source, target, 1 << 30):
            copied += count
    except OSError:
        if copied:
            raise
        return False
    return copied == _size(source)  # some pseudo files report themselves empty to the kernel's copy


def _read_through(source: BinaryIO, target: BinaryIO | None) -> FileDigest:
    """Read ``source`` to its end, hash it, and write it to ``target`` where there is one."""
    hasher, buffer, size = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK)), 0
    while count := source.readinto(buffer):  # type: ignore[attr-defined]
        size += count
        hasher.update(buffer[:count])
        if target is not None:
            target.write(buffer[:count])
    return FileDigest(size, hasher.hexdigest())


def _size(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


def _flush_to_disk(file: BinaryIO) -> None:
    file.flush()
    if sys.platform == "darwin":
        fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)  # fsync stops at the drive's cache there
    else:
        os.fsync(file.fileno())


def _make_directory(path: Path) -> None:
    """Make a directory and its missing parents, so that they survive a crash of the machine."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path)) from None
        return
    _flush_directory(path.parent)


def _flush_directory(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return  # a directory that may be written but not read cannot be flushed either
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
