"""pyarrow file systems on which the paths of checkpoints and results can be used unchanged.

An address such as ``s3://bucket/run?region=…`` is not a path on any of pyarrow's own file systems, and their
credentials would come from elsewhere than ours. So this is one on top of our own storage. Only imported when a file
system is requested, because it needs pyarrow.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from powertrain.storage import Entry, Storage, open_storage
from powertrain.storage.addresses import OBJECT_STORES, parse, strip_secrets, without_secrets

_Base: Any = fs.FileSystemHandler  # its stub has no constructor and few methods


def pyarrow_filesystem(address: str | None, given: Any = None) -> fs.FileSystem:
    """Return the file system for paths below ``address``, None for plain local paths; or ``given``, in pyarrow's
    form."""
    if isinstance(given, fs.FileSystem):
        return given
    if given is not None:
        handler: Any = fs.FSSpecHandler
        return fs.PyFileSystem(handler(given))
    if address is None:
        return fs.LocalFileSystem()
    return fs.PyFileSystem(StorageHandler(address))


def plain_path(address: str) -> str:
    """Return an address of an object store as "bucket/prefix"; any other path as it is."""
    if address.partition("://")[0].lower() not in OBJECT_STORES:
        return address
    place = parse(address)
    return f"{place.bucket}/{place.prefix}".rstrip("/")


class StorageHandler(_Base):  # type: ignore[misc]  # see above
    """pyarrow's file system interface on the storage at ``address``.

    Paths are ``address`` itself, or start with it and a "/"; credentials in it may be left out of them. The same places
    as "bucket/prefix", without scheme and query, are paths as well, as on pyarrow's own file systems. Directories exist
    only as prefixes of files, as in the store.
    """

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._tops = (self._address, strip_secrets(self._address), plain_path(self._address))

    def __reduce__(self) -> tuple[Any, ...]:
        return (StorageHandler, (self._address,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageHandler) and other._address == self._address

    def __hash__(self) -> int:
        return hash(self._address)

    def get_type_name(self) -> str:
        return "powertrain"

    def normalize_path(self, path: str) -> str:
        return path

    @property
    def _storage(self) -> Storage:
        return open_storage(self._address)

    def _key(self, path: str) -> str:
        """Return the key of a path; "" for the top."""
        path = path.rstrip("/")
        for top in self._tops:
            if path == top or path.startswith(f"{top}/"):
                return path[len(top) + 1 :]
        plain, top = plain_path(path), self._tops[-1]
        if "://" in path and (
            plain == top or plain.startswith(f"{top}/")
        ):  # of a child, with the query behind it
            return plain[len(top) + 1 :]
        raise FileNotFoundError(
            f"{without_secrets(path)!r} is not a path of this file system: its paths start with "
            f"{without_secrets(self._address)!r}."
        )

    def address_of(self, path: str) -> str:
        """Return the address of a path of this file system, with the credentials and settings of the file system.

        Raises:
            FileNotFoundError: The path is outside of this file system.
        """
        key = self._key(path)
        return parse(self._address).child(key).uri if key else self._address

    # -- looking

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> fs.FileInfo:
        key = self._key(path)
        above, _, _ = key.rpartition("/")
        for entry in self._storage.list(above):
            if entry.key == key:
                return fs.FileInfo(path, fs.FileType.File, size=entry.size)
            if not key or entry.key.startswith(f"{key}/"):
                return fs.FileInfo(path, fs.FileType.Directory)
        return fs.FileInfo(path, fs.FileType.NotFound)

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        top = self._key(selector.base_dir)
        entries = self._storage.list(top)
        if not entries and not selector.allow_not_found:
            raise FileNotFoundError(f"Nothing lies at {without_secrets(selector.base_dir)!r}.")
        prefix = f"{top}/" if top else ""
        return [
            self._described(f"{selector.base_dir.rstrip('/')}/{name.removeprefix(prefix)}", entry)
            for name, entry in sorted(_tree(entries, prefix).items())
            if selector.recursive or "/" not in name.removeprefix(prefix)
        ]

    def _described(self, path: str, entry: Entry | None) -> fs.FileInfo:
        if entry is None:
            return fs.FileInfo(path, fs.FileType.Directory)
        return fs.FileInfo(path, fs.FileType.File, size=entry.size)

    # -- reading and writing

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Return a copy on this machine's disk that goes when it is closed: stores give values whole."""
        with tempfile.TemporaryDirectory(prefix="powertrain-read-") as directory:
            copy = Path(directory, "value")
            self._storage.get_file(self._key(path), copy)
            return pa.PythonFile(open(copy, "rb"), mode="r")

    open_input_stream = open_input_file

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        return pa.PythonFile(_Upload(self._storage, self._key(path)), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise NotImplementedError(
            f"{without_secrets(path)!r} cannot be appended to: stored values never change."
        )

    # -- changing

    def create_dir(self, path: str, recursive: bool) -> None:
        self._key(path)  # a directory is there as soon as a file is

    def copy_file(self, source: str, target: str) -> None:
        with self.open_input_file(source) as stream:
            self._storage.put(self._key(target), stream.read())

    def move(self, source: str, target: str) -> None:
        self._storage.move(self._key(source), self._key(target))

    def delete_file(self, path: str) -> None:
        self._storage.delete(self._key(path))

    def delete_dir(self, path: str) -> None:
        self._storage.delete_tree(self._key(path))

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        for entry in self._storage.list(self._key(path)):
            self._storage.delete(entry.key)

    def delete_root_dir_contents(self) -> None:
        self.delete_dir_contents(self._address)


def _tree(entries: list[Entry], prefix: str) -> dict[str, Entry | None]:
    """Return files by name, and with None the directories between them and ``prefix``."""
    found: dict[str, Entry | None] = {}
    for entry in entries:
        found[entry.key] = entry
        for directory in _directories(entry.key, prefix):
            found.setdefault(directory, None)
    return found


def _directories(key: str, prefix: str) -> Iterator[str]:
    for position in range(len(prefix), len(key)):
        if key[position] == "/":
            yield key[:position]


class _Upload(io.FileIO):
    """A file to write to, which becomes a value when it is closed."""

    def __init__(self, storage: Storage, key: str) -> None:
        descriptor, self._path = tempfile.mkstemp(prefix="powertrain-write-")
        super().__init__(descriptor, "wb")
        self._storage, self._key = storage, key

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        try:
            self._storage.put_file(self._key, self._path, digest=False)
        finally:
            os.unlink(self._path)
