"""Storage on a file system object of pyarrow or fsspec.

They guarantee less than this package needs; :attr:`FilesystemStorage.lacks` lists the gaps in sentences. Where such an
object is nothing but this machine's disk, the storage is a :class:`LocalStorage`, which lacks nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timezone
from pathlib import Path
from typing import IO, Any

import xxhash

from powertrain.errors import StorageError
from powertrain.storage.addresses import without_secrets
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
)
from powertrain.storage.boundaries import crossing
from powertrain.storage.local import LocalStorage

_CHUNK = 8 << 20
#: Kinds of file systems whose files appear whole when they are closed; elsewhere that takes a rename.
_WHOLE_AT_CLOSE = frozenset({"s3", "s3a", "gcs", "gs", "abfs", "abfss", "az", "adl", "oss", "memory"})


def storage_on(filesystem: Any, path: str) -> Storage:
    """Return the storage at ``path`` of a pyarrow or fsspec file system; plain local ones become
    :class:`LocalStorage`."""
    path = path.partition("://")[2] if "://" in path else path
    if not path.strip("/"):
        raise StorageError(
            f"The storage path {path!r} on the file system {type(filesystem).__name__} is empty. Give a path on it, "
            "such as "
            "'bucket/runs'."
        )
    local = _local_path(filesystem, path)
    return LocalStorage(local) if local is not None else FilesystemStorage(filesystem, path)


def _local_path(filesystem: Any, path: str) -> str | None:
    """Return the path on this machine's disk of ``path`` in a file system, None where it lies elsewhere."""
    from pyarrow import fs

    if isinstance(filesystem, fs.LocalFileSystem):
        return path
    if isinstance(filesystem, fs.SubTreeFileSystem):
        return _local_path(filesystem.base_fs, f"{filesystem.base_path.rstrip('/')}/{path.lstrip('/')}")
    return path if _is_fsspec(filesystem) and set(_protocols(filesystem)) & {"file", "local"} else None


def _is_fsspec(filesystem: Any) -> bool:
    return all(hasattr(filesystem, name) for name in ("protocol", "open", "info", "find"))


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


class FilesystemStorage:
    """A directory of a pyarrow or fsspec file system as storage.

    ``uri`` is the path on that file system: ``open_storage(uri, filesystem=...)`` opens it again.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._given, self._root = filesystem, root.rstrip("/")
        self._wrapped: Any = None

    def __repr__(self) -> str:
        return f"FilesystemStorage({type(self._given).__name__}, {without_secrets(self._root)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (FilesystemStorage, (self._given, self._root))

    @property
    def filesystem(self) -> Any:
        """The file system as it was given."""
        return self._given

    @property
    def uri(self) -> str:
        return self._root

    @property
    def lacks(self) -> tuple[str, ...]:
        name = type(self._given).__name__
        return (
            f"{name} cannot write a value only where there is none: it is looked for first and written then, so two "
            "starts of the same run in the same instant could both win.",
            f"When a written value survives a crash of the machine is up to {name}: nothing can be made durable from "
            "outside.",
            f"Whether a failed request is made again is up to {name}: its errors are passed on at once.",
            *(() if self._is_whole_at_close() else (_NOT_ATOMIC.format(name),)),
        )

    def local_path(self, key: str) -> None:
        check_key(key)

    def child(self, prefix: str) -> FilesystemStorage:
        return FilesystemStorage(self._given, self._path(prefix))

    def within(self, timeout: float) -> FilesystemStorage:
        return self

    # -- writing

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        crossing("put", path)
        self._write(path, iter((data,)), None)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        if self._exists(self._path(key)):
            return False
        self.put(key, data)
        return True

    def put_file(self, key: str, path: str | Path, *, digest: bool = True) -> FileDigest:
        final, hasher = self._path(key), xxhash.xxh3_128() if digest else None
        with open(path, "rb", buffering=0) as source:
            crossing("put", final)
            size = self._write(final, _pieces(source), hasher)
        return FileDigest(size, hasher.hexdigest() if hasher else "")

    def put_file_if_absent(self, key: str, path: str | Path) -> FileDigest | None:
        return None if self._exists(self._path(key)) else self.put_file(key, path)

    def move(self, source: str, key: str) -> None:
        old, new = self._path(source), self._path(key)
        if not self._exists(old):
            raise FileNotFoundError(errno.ENOENT, "no such key", source)
        crossing("rename", new)
        self._make_parent(new)
        self._replace(old, new)

    def _write(self, path: str, pieces: Iterator[bytes], hasher: xxhash.xxh3_128 | None) -> int:
        """Write a file whole or not at all as far as the file system allows; returns its size."""
        self._make_parent(path)
        direct = self._is_whole_at_close()
        target = path if direct else f"{path.rpartition('/')[0]}/{temporary_name()}"
        size = 0
        try:
            with self._fs.open_output_stream(target) as stream:
                for piece in pieces:
                    stream.write(piece)
                    size += len(piece)
                    if hasher is not None:
                        hasher.update(piece)
            if not direct:
                self._replace(target, path)
        except BaseException:
            if not direct:
                self._remove(target)
            raise
        return size

    def _replace(self, old: str, new: str) -> None:
        try:
            self._fs.move(old, new)
        except OSError:
            if not self._exists(new):
                raise
            self._remove(new)  # some file systems do not move onto a file that is there
            self._fs.move(old, new)

    def _make_parent(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        if parent:
            self._fs.create_dir(parent, recursive=True)

    # -- reading

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return join_within(self._content(key), key, limit)

    def get_range(self, key: str, start: int, length: int) -> StoredPart:
        path = self._path(key)
        if not self._exists(path):
            raise FileNotFoundError(errno.ENOENT, "no such key", key)
        with self._fs.open_input_file(path) as file:
            size = int(file.size())
            if start >= size:
                return StoredPart(b"", size)
            file.seek(start)
            return StoredPart(file.read(length), size)

    def get_file(self, key: str, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / temporary_name()
        try:
            with open(temporary, "xb") as file:
                for piece in self._content(key):
                    file.write(piece)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def digest(self, key: str) -> FileDigest:
        hasher, size = xxhash.xxh3_128(), 0
        for piece in self._content(key):
            hasher.update(piece)
            size += len(piece)
        return FileDigest(size, hasher.hexdigest())

    def modified(self, key: str) -> float:
        if not self._exists(self._path(key)):
            raise FileNotFoundError(errno.ENOENT, "no such key", key)
        return self._moment(self._path(key))

    def _moment(self, path: str) -> float:
        moment = self._fs.get_file_info(path).mtime
        if moment is None and _is_fsspec(self._given):
            with contextlib.suppress(NotImplementedError):
                moment = self._given.modified(path)
        if moment is None:
            raise OSError(
                errno.ENOTSUP, f"{type(self._given).__name__} does not report modification times", path
            )
        return float((moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp())

    def list(self, prefix: str = "") -> list[Entry]:
        files = ((path, info.size) for path, info in self._files(prefix))
        return sorted(Entry(path, size) for path, size in files if not _is_temporary(path))

    def directories(self) -> Sequence[str]:
        from pyarrow import fs

        try:
            found = self._fs.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        except NotADirectoryError:
            return []
        names = (_below(self._root, info.path) for info in found if info.type == fs.FileType.Directory)
        return sorted(name for name in names if not _is_temporary(name))

    def _content(self, key: str) -> Iterator[bytes]:
        path = self._path(key)
        if not self._exists(path):
            raise FileNotFoundError(errno.ENOENT, "no such key", key)
        with self._fs.open_input_stream(path) as stream:
            while piece := stream.read(_CHUNK):
                yield piece

    def _exists(self, path: str) -> bool:
        from pyarrow import fs

        try:
            return bool(self._fs.get_file_info(path).type == fs.FileType.File)
        except NotADirectoryError:
            return False

    def _files(self, prefix: str) -> Sequence[tuple[str, Any]]:
        """Return (key, file info) of every file below ``prefix``, unfinished ones too."""
        from pyarrow import fs

        top = self._path(prefix) if prefix else self._root
        selector = fs.FileSelector(top, allow_not_found=True, recursive=True)
        try:
            found = self._fs.get_file_info(selector)
        except NotADirectoryError:
            return []  # a file lies below nothing
        files = [info for info in found if info.type == fs.FileType.File]
        return [(_below(self._root, info.path), info) for info in files]

    # -- forgetting

    def delete(self, key: str) -> None:
        path = self._path(key)
        crossing("delete", path)
        self._remove(path)

    def delete_tree(self, prefix: str) -> None:
        from pyarrow import fs

        path = self._path(prefix)
        crossing("delete", path)
        if self._fs.get_file_info(path).type == fs.FileType.Directory:
            with contextlib.suppress(
                FileNotFoundError
            ):  # a directory that only its files made is gone with them
                self._fs.delete_dir(path)

    def sweep(self) -> int:
        swept = 0
        for key, info in self._files(""):
            age = time.time() - info.mtime.timestamp() if info.mtime is not None else 0.0
            if _is_temporary(key) and is_abandoned(key.rpartition("/")[2], age):
                self._remove(info.path)
                swept += 1
        return swept

    def _remove(self, path: str) -> None:
        if self._exists(path):
            self._fs.delete_file(path)

    # -- the file system

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    @property
    def _fs(self) -> Any:
        if self._wrapped is None:
            self._wrapped = _as_pyarrow(self._given)
        return self._wrapped

    def _is_whole_at_close(self) -> bool:
        names = _protocols(self._given) if _is_fsspec(self._given) else (self._fs.type_name,)
        return bool(_WHOLE_AT_CLOSE & set(names))


_NOT_ATOMIC = (
    "{0} may replace a value by removing the old one first, so a crash in that moment can leave the key without "
    "a value."
)


def _as_pyarrow(filesystem: Any) -> Any:
    from pyarrow import fs

    if isinstance(filesystem, fs.FileSystem):
        return filesystem
    if _is_fsspec(filesystem):
        handler: Any = fs.FSSpecHandler  # its stub leaves out that its methods are there
        return fs.PyFileSystem(handler(filesystem))
    raise StorageError(
        f"The storage file system is a {type(filesystem).__name__}, neither a pyarrow.fs.FileSystem nor "
        "an fsspec file system. Give one of these, or leave storage_filesystem out and write the storage path as "
        "an address such as 's3://bucket/runs'."
    )


def _pieces(source: IO[bytes]) -> Iterator[bytes]:
    while piece := source.read(_CHUNK):
        yield piece


def _below(root: str, path: str) -> str:
    """Return the key of a file that a listing named, whose leading "/" some file systems leave out."""
    return path.lstrip("/").removeprefix(root.lstrip("/")).lstrip("/")


def _is_temporary(key: str) -> bool:
    return key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)
