"""Storage in a directory of this machine or of a mounted file system.

Every value is written under a temporary name, flushed to the disk, then put in place in one step, and the
directory is flushed too. So after a crash at any moment, of the process or the machine, a key has its old
value, its new value, or none; never half of one. The exception is ``put_if_absent`` on a file system without
hard links: there the key is created first and a crash can leave it short.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash

from powertrain.storage.base import (
    TEMPORARY_PREFIX,
    Entry,
    FileDigest,
    Storage,
    check_key,
    is_abandoned,
    temporary_name,
)
from powertrain.storage.boundaries import crossing

if sys.platform != "win32":
    import fcntl

#: Linux's request number for "make this file share that file's blocks" (ioctl FICLONE).
_FICLONE = 0x40049409
_CHUNK = 1 << 20
#: What ``link`` answers where a file system has no hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
#: The most that one call of the kernel's copies is asked for.
_KERNEL_CHUNK = 1 << 30


class LocalStorage:
    """A directory as storage. It is made by the first ``put``."""

    lacks: tuple[str, ...] = ()

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

    def within(self, timeout: float) -> Storage:
        return self

    # -- writing

    def put(self, key: str, data: bytes) -> None:
        final = self.local_path(key)
        with _temporary_beside(final) as (temporary, file):
            _write(file, data)
            _flush_to_disk(file)
            _rename(temporary, final)
        _flush_directory(final.parent)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        final = self.local_path(key)
        with _temporary_beside(final) as (temporary, file):
            _write(file, data)
            _flush_to_disk(file)
            placed = _place_if_absent(temporary, final)
        _flush_directory(final.parent)
        return placed

    def put_file(self, key: str, path: str | Path, *, digest: bool = True) -> FileDigest:
        final = self.local_path(key)
        with _temporary_beside(final) as (temporary, file):
            result = _copy_into(file, path, digest)
            _flush_to_disk(file)
            _rename(temporary, final)
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

    def adopt(self, key: str, path: str | Path) -> FileDigest:
        """Make the file ``path`` itself the value of ``key``, replacing what was there; its own name is gone after.

        Where ``path`` is missing and the key is there, an earlier call got that far before its process died: the rest
        is made up for. Raises ``OSError`` with ``EXDEV`` where the file is not on the storage's file system (or is
        a link to one that may not be): ``put_file`` copies it then.
        """
        source, final = Path(path), self.local_path(key)
        if source.is_symlink():
            raise OSError(errno.EXDEV, "a symbolic link cannot be adopted", str(source))
        if not os.path.lexists(source) and final.is_file():
            source = final
        with open(source, "rb", buffering=0) as file:
            _make_directory(final.parent)
            if os.fstat(file.fileno()).st_dev != final.parent.stat().st_dev:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(final))
            result = _read_through(file, None)
            _flush_to_disk(file)
        if source is not final:
            _rename(source, final)
            _flush_directory(source.parent)
        _flush_directory(final.parent)
        return result

    def move(self, source: str, key: str) -> None:
        old, new = self.local_path(source), self.local_path(key)
        _make_directory(new.parent)
        _rename(old, new)
        _flush_directory(new.parent)
        _flush_directory(old.parent)

    # -- reading

    def get(self, key: str) -> bytes:
        try:
            return self.local_path(key).read_bytes()
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, "no such key", key) from error

    def get_file(self, key: str, path: str | Path) -> None:
        source = self.local_path(key)
        if not source.is_file():
            raise FileNotFoundError(errno.ENOENT, "no such key", key)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(path).parent / temporary_name()
        try:
            copy_file(source, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def digest(self, key: str) -> FileDigest:
        path = self.local_path(key)
        if not path.is_file():
            raise FileNotFoundError(errno.ENOENT, "no such key", key)
        return digest_of(path)

    def modified(self, key: str) -> float:
        try:
            return self.local_path(key).stat().st_mtime
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, "no such key", key) from error

    def list(self, prefix: str = "") -> list[Entry]:
        return sorted(
            Entry(path.relative_to(self._root).as_posix(), size)
            for path, size in self._files(prefix)
            if not path.name.startswith(TEMPORARY_PREFIX)
        )

    # -- forgetting

    def delete(self, key: str) -> None:
        path = self.local_path(key)
        crossing("unlink", str(path))
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        _flush_directory(path.parent)

    def delete_tree(self, prefix: str) -> None:
        path = self.local_path(prefix)
        crossing("unlink", str(path))
        try:
            shutil.rmtree(path)
        except (FileNotFoundError, NotADirectoryError):
            return
        _flush_directory(path.parent)

    def sweep(self) -> int:
        swept = 0
        for path, _ in self._files(""):
            if path.name.startswith(TEMPORARY_PREFIX) and is_abandoned(path.name, _age(path)):
                crossing("unlink", str(path))
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


def copy_file(source: str | Path, target: str | Path) -> int:
    """Copy a file's content to the new file ``target`` by the cheapest means there is; returns its size.

    The blocks are shared where the file system can do that, else the kernel copies. Neither hashed nor made durable:
    for copies that can be made again.
    """
    with open(target, "xb") as file:
        return _copy_into(file, source, False).size


# --------------------------------------------------------------------------- temporary files


@contextmanager
def _temporary_beside(final: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in the directory of ``final``, which is made if absent; gone afterwards unless moved."""
    _make_directory(final.parent)
    path = final.parent / temporary_name()
    crossing("write", str(path))
    try:
        with open(path, "xb") as file:
            yield path, file
    finally:
        path.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


# --------------------------------------------------------------------------- bytes onto the disk


def _write(file: BinaryIO, data: bytes) -> None:
    crossing("write", file.name)
    file.write(data)


def _rename(old: Path, new: Path) -> None:
    crossing("rename", str(new))
    os.replace(old, new)


def _place_if_absent(temporary: Path, final: Path) -> bool:
    """Give a finished temporary file its name unless that is taken."""
    crossing("link", str(final))
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
        crossing("write", target.name)
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
    return _copied_by(_copy_file_range, source, target) or _copied_by(_sendfile, source, target)


def _copied_by(copy: Callable[[int, int, int], int], source: int, target: int) -> bool:
    copied = 0
    try:
        while count := copy(source, target, copied):
            copied += count
    except OSError:
        if copied:
            raise
        return False  # not between these two file systems
    if copied == 0:
        return _size(source) == 0 and not _has_bytes(source)
    return True


def _copy_file_range(source: int, target: int, _: int) -> int:
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, "copy_file_range")
    return os.copy_file_range(source, target, _KERNEL_CHUNK)


def _sendfile(source: int, target: int, offset: int) -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, "sendfile")  # elsewhere it only sends to sockets
    return os.sendfile(target, source, offset, _KERNEL_CHUNK)


def _has_bytes(source: int) -> bool:
    """True for pseudo files that say they are empty and are not."""
    found = os.read(source, 1)
    os.lseek(source, 0, os.SEEK_SET)
    return bool(found)


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
    crossing("fsync", file.name)
    if sys.platform == "darwin":
        fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)  # fsync stops at the drive's cache there
    else:
        os.fsync(file.fileno())


def _make_directory(path: Path) -> None:
    """Make a directory and its missing parents, so that they survive a crash of the machine."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    crossing("mkdir", str(path))
    try:
        path.mkdir()
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(path)) from None
        return
    _flush_directory(path.parent)


def _flush_directory(path: Path) -> None:
    crossing("fsync", str(path))
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
