"""Storage in a directory of this machine or of a mounted file system.

Every value is written under a temporary name, flushed to the disk, then put in place in one step, and the
directory is flushed too. So after a crash at any moment, of the process or the machine, a key has its old
value, its new value, or none; never half of one. The exception is ``put_if_absent`` on a file system without
hard links: there the key is created first and a crash can leave it short.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import xxhash

from powertrain.storage.base import (
    TEMPORARY_PREFIX,
    Entry,
    FileDigest,
    Storage,
    StoredPart,
    check_key,
    is_abandoned,
    join_within,
    temporary_name,
    too_large,
)
from powertrain.storage.boundaries import crossing
from powertrain.storage.files.descriptors import files_below, open_directory, open_file, remove_tree_at

if sys.platform != "win32":
    import fcntl

#: Linux's request number for "make this file share that file's blocks" (ioctl FICLONE).
_FICLONE = 0x40049409
_CHUNK = 1 << 20
#: The errors of ``link`` on a file system without hard links.
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV})
#: The most bytes for one copying system call.
_KERNEL_CHUNK = 1 << 30


class LocalStorage:
    """A directory as storage. It is made by the first ``put``.

    Links on the way to the directory that it was opened with are followed, because the user named it. Nothing below
    that is reached through a link: every operation goes from one directory descriptor to the next.
    """

    lacks: tuple[str, ...] = ()

    def __init__(self, root: str | Path, *, base: str | Path | None = None) -> None:
        """``base`` is the directory above ``root`` from which on no links are followed; ``root`` itself by default."""
        self._root = Path(os.path.abspath(root))
        self._base = self._root if base is None else Path(base)
        self._parts = self._root.relative_to(self._base).parts

    def __repr__(self) -> str:
        return f"LocalStorage({str(self._root)!r})"

    @property
    def uri(self) -> str:
        return str(self._root)

    def local_path(self, key: str) -> Path:
        return self._root / check_key(key)

    def child(self, prefix: str) -> Storage:
        return LocalStorage(self._root / check_key(prefix), base=self._base)

    def within(self, timeout: float) -> Storage:
        return self

    # -- writing

    def put(self, key: str, data: bytes, *, mode: int = 0o666) -> None:
        with self._place(key, make=True) as place:
            with place.temporary(mode) as (temporary, file):
                _write(file, data, temporary.path)
                _flush_to_disk(file, temporary.path)
                _rename(temporary, place)
            place.flush()

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._place(key, make=True) as place:
            with place.temporary() as (temporary, file):
                _write(file, data, temporary.path)
                _flush_to_disk(file, temporary.path)
                placed = _place_if_absent(temporary, place)
            place.flush()
        return placed

    def put_file(self, key: str, path: str | Path, *, digest: bool = True) -> FileDigest:
        with self._place(key, make=True) as place:
            with place.temporary() as (temporary, file), open(path, "rb", buffering=0) as source:
                result = _copy_into(file, temporary.path, source, digest)
                _flush_to_disk(file, temporary.path)
                _rename(temporary, place)
            place.flush()
        return result

    def put_file_if_absent(self, key: str, path: str | Path) -> FileDigest | None:
        with self._place(key, make=True) as place:
            if place.exists():
                return None
            with place.temporary() as (temporary, file), open(path, "rb", buffering=0) as source:
                result = _copy_into(file, temporary.path, source, True)
                _flush_to_disk(file, temporary.path)
                placed = _place_if_absent(temporary, place)
            place.flush()
        return result if placed else None

    def adopt(self, key: str, path: str | Path) -> FileDigest:
        """Move the file ``path`` to be the value of ``key``, replacing an earlier value; its own name is gone after.

        Where ``path`` is missing and the key is there, an earlier call got that far before its process died, and this
        call completes it. Raises ``OSError`` with ``EXDEV`` where the file is not on the storage's file system (or is a
        link to one that may not be): ``put_file`` copies it then.
        """
        source = Path(path)
        if source.is_symlink():
            raise OSError(errno.EXDEV, "a symbolic link cannot be adopted", str(source))
        with self._place(key, make=True) as place:
            was_moved = not os.path.lexists(source) and place.is_file()
            opened = (
                place.open() if was_moved else os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            )
            with open(opened, "rb", buffering=0) as file:
                if os.fstat(opened).st_dev != os.fstat(place.parent).st_dev:
                    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, place.path)
                result = _read_through(file, None)
                _flush_to_disk(file, place.path if was_moved else str(source))
            if not was_moved:
                crossing("rename", place.path)
                os.replace(source, place.name, dst_dir_fd=place.parent)
                flush_directory(source.parent)
            place.flush()
        return result

    def make_directory(self, key: str) -> None:
        """Make an empty directory, and those above it, so that they survive a crash of the machine."""
        with self._place(f"{key}/x", make=True):
            pass

    def move(self, source: str, key: str) -> None:
        with self._place(key, make=True) as new, self._place(source) as old:
            _rename(old, new)
            new.flush()
            old.flush()

    # -- reading

    def open(self, key: str, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
        """Return a descriptor of the regular file of ``key``, opened without following links.

        With ``os.O_CREAT`` the directories above it are made.
        """
        with self._place(key, make=bool(flags & os.O_CREAT)) as place:
            return place.open(flags, mode)

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        try:
            with open(self.open(key), "rb", buffering=0) as file:
                if limit is None:
                    return file.read()
                if os.fstat(file.fileno()).st_size > limit:
                    raise too_large(key, limit)
                return join_within(iter(lambda: file.read(_CHUNK), b""), key, limit)
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, "no such key", key) from error

    def get_range(self, key: str, start: int, length: int) -> StoredPart:
        with self._opened(key) as file:
            size = os.fstat(file.fileno()).st_size
            return StoredPart(os.pread(file.fileno(), max(0, min(length, size - start)), start), size)

    def get_file(self, key: str, path: str | Path) -> None:
        with self._opened(key) as source:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            temporary = Path(path).parent / temporary_name()
            try:
                with open(temporary, "x+b") as file:
                    _copy_into(file, str(temporary), source, False)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)

    def digest(self, key: str) -> FileDigest:
        with self._opened(key) as source:
            return _read_through(source, None)

    def modified(self, key: str) -> float:
        try:
            with self._place(key) as place:
                return os.stat(place.name, dir_fd=place.parent, follow_symlinks=False).st_mtime
        except NotADirectoryError as error:
            raise FileNotFoundError(errno.ENOENT, "no such key", key) from error

    def list(self, prefix: str = "") -> list[Entry]:
        return sorted(
            Entry(key, size)
            for key, size in self._files(prefix)
            if not key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)
        )

    def directories(self) -> Sequence[str]:
        try:
            with open_directory(self._base, self._parts) as top, os.scandir(top) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    # -- forgetting

    def delete(self, key: str) -> None:
        try:
            with self._place(key) as place:
                crossing("unlink", place.path)
                os.unlink(place.name, dir_fd=place.parent)
                place.flush()
        except (FileNotFoundError, NotADirectoryError):
            return

    def delete_tree(self, prefix: str) -> None:
        try:
            with self._place(prefix) as place:
                crossing("unlink", place.path)
                if not place.exists():
                    return
                remove_tree_at(place.parent, place.name)
                place.flush()
        except (FileNotFoundError, NotADirectoryError):
            return

    def sweep(self) -> int:
        swept = 0
        for key, _ in self._files("", skips_deeper=True):
            if not key.rpartition("/")[2].startswith(TEMPORARY_PREFIX):
                continue
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                self._place(key, is_temporary=True) as place,
            ):
                age = time.time() - os.stat(place.name, dir_fd=place.parent, follow_symlinks=False).st_mtime
                if is_abandoned(place.name, age):
                    crossing("unlink", place.path)
                    os.unlink(place.name, dir_fd=place.parent)
                    swept += 1
        return swept

    # -- by descriptor

    @contextmanager
    def _place(self, key: str, *, make: bool = False, is_temporary: bool = False) -> Iterator[_Place]:
        """Yield the directory of a key, held open; with ``make`` it is made."""
        *above, name = (key if is_temporary else check_key(key)).split("/")
        if make:
            _make_directory(self._base)
        with open_directory(
            self._base,
            (*self._parts, *above),
            make=make,
            before_making=lambda path: crossing("mkdir", path),
            after_making=_flush_descriptor,
        ) as parent:
            yield _Place(parent, name, os.path.join(self._root, *above))

    @contextmanager
    def _opened(self, key: str) -> Iterator[FileIO]:
        try:
            descriptor = self.open(key)
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, "no such key", key) from error
        with open(descriptor, "rb", buffering=0) as file:
            yield file

    def _files(self, prefix: str, *, skips_deeper: bool = False) -> Iterator[tuple[str, int]]:
        """Yield keys and sizes of all non-directories below ``prefix``; links are not followed."""
        parts = check_key(prefix).split("/") if prefix else []
        try:
            with open_directory(self._base, (*self._parts, *parts)) as top:
                yield from files_below(top, f"{prefix}/" if prefix else "", skips_deeper=skips_deeper)
        except (FileNotFoundError, NotADirectoryError):
            return


class _Place:
    """A name in a directory that is held open."""

    def __init__(self, parent: int, name: str, directory: str) -> None:
        self.parent, self.name, self._directory = parent, name, directory

    @property
    def path(self) -> str:
        """For messages and hooks."""
        return os.path.join(self._directory, self.name)

    def exists(self) -> bool:
        try:
            os.stat(self.name, dir_fd=self.parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def is_file(self) -> bool:
        try:
            return stat.S_ISREG(os.stat(self.name, dir_fd=self.parent, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            return False

    def open(self, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
        return open_file(self.parent, self.name, self.path, flags, mode)

    @contextmanager
    def temporary(self, mode: int = 0o666) -> Iterator[tuple[_Place, BinaryIO]]:
        """Yield a new file in the same directory; gone afterwards unless it was moved."""
        place = _Place(self.parent, temporary_name(), self._directory)
        crossing("write", place.path)
        try:
            with open(place.open(os.O_RDWR | os.O_CREAT | os.O_EXCL, mode), "w+b") as file:
                yield place, file
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(place.name, dir_fd=place.parent)

    def flush(self) -> None:
        """Make the names in the directory durable."""
        _flush_descriptor(self.parent, self._directory)


def digest_of(path: str | Path) -> FileDigest:
    """Return size and xxh3-128 of a file's content."""
    with open(path, "rb", buffering=0) as source:
        return _read_through(source, None)


def copy_file(source: str | Path, target: str | Path) -> int:
    """Copy a file's content to the new file ``target`` by the cheapest means available; return its size.

    The blocks are shared where the file system can do that, else the kernel copies. Neither hashed nor made durable:
    for copies that can be made again.
    """
    with open(target, "x+b") as file, open(source, "rb", buffering=0) as content:
        return _copy_into(file, str(target), content, False).size


# --------------------------------------------------------------------------- bytes onto the disk


def _write(file: BinaryIO, data: bytes, path: str) -> None:
    crossing("write", path)
    file.write(data)


def _rename(old: _Place, new: _Place) -> None:
    crossing("rename", new.path)
    os.replace(old.name, new.name, src_dir_fd=old.parent, dst_dir_fd=new.parent)


def _place_if_absent(temporary: _Place, final: _Place) -> bool:
    """Give a finished temporary file its name unless that is taken."""
    crossing("link", final.path)
    try:
        os.link(
            temporary.name,
            final.name,
            src_dir_fd=temporary.parent,
            dst_dir_fd=final.parent,
            follow_symlinks=False,
        )
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        made = final.open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    with open(made, "w+b") as file, open(temporary.open(), "rb", buffering=0) as source:
        _copy_into(file, final.path, source, False)
        _flush_to_disk(file, final.path)
    return True


def _copy_into(target: BinaryIO, path: str, source: FileIO, digest: bool) -> FileDigest:
    """Copy a file, by the cheapest means available, into the empty ``target`` at ``path``."""
    crossing("write", path)
    if _reflinked(source.fileno(), target.fileno()):
        # The clone is frozen, so its digest is the stored file's even if the source changes now.
        target.seek(0)
        return _read_through(target, None) if digest else FileDigest(_size(target.fileno()), "")
    if not digest and _copied_by_kernel(source.fileno(), target.fileno()):
        return FileDigest(_size(target.fileno()), "")
    result = _read_through(source, target)
    return result if digest else FileDigest(result.size, "")


def _reflinked(source: int, target: int) -> bool:
    """Return True when the file system let ``target`` share the blocks of ``source``."""
    if sys.platform != "linux":
        return False
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def _copied_by_kernel(source: int, target: int) -> bool:
    """Return True when the kernel copied everything; False when it copied nothing."""
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
    """Return True for pseudo files that report a size of 0 and are not empty."""
    found = os.read(source, 1)
    os.lseek(source, 0, os.SEEK_SET)
    return bool(found)


def _read_through(source: BinaryIO | FileIO, target: BinaryIO | None) -> FileDigest:
    """Read ``source`` to its end, hash it, and write it to ``target`` if given."""
    hasher, buffer, size = xxhash.xxh3_128(), memoryview(bytearray(_CHUNK)), 0
    while count := source.readinto(buffer):  # type: ignore[union-attr]
        size += count
        hasher.update(buffer[:count])
        if target is not None:
            target.write(buffer[:count])
    return FileDigest(size, hasher.hexdigest())


def _size(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


def _flush_to_disk(file: BinaryIO | FileIO, path: str) -> None:
    file.flush()
    crossing("fsync", path)
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
    flush_directory(path.parent)


def flush_directory(path: Path) -> None:
    """Make the names in a directory durable, where its file system can do that."""
    crossing("fsync", str(path))
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        return  # a directory that may be written but not read cannot be flushed either
    try:
        _fsync_directory(descriptor)
    finally:
        os.close(descriptor)


def _flush_descriptor(directory: int, path: str) -> None:
    """Make the names in an open directory durable."""
    crossing("fsync", path)
    _fsync_directory(directory)


def _fsync_directory(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot, and a directory that may not be read was opened as a mere path.
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
