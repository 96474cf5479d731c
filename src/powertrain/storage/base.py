"""What Powertrain asks of a place that keeps files, and the rules all such places share.

The surface is small on purpose: whole values go in and come out, one operation decides races
(``put_if_absent``), and nothing is ever changed in place. That is what local disks, mounted file systems and
object stores can all promise.

Keys name values. They use "/" between parts and stay inside the storage: no empty part, no ".", no "..", no
leading "/". A prefix is a key that other keys lie below, as files lie below a directory; the empty prefix
means everything.

``OSError`` passes through from every operation: the caller knows what the value was for and says so.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from powertrain.errors import StorageError

#: Names that start so are unfinished writes: never listed, and swept.
TEMPORARY_PREFIX = ".powertrain-tmp."

_OBJECT_STORES = ("s3", "gs", "gcs", "az", "abfs", "abfss", "adl", "r2", "http", "https")


class Entry(NamedTuple):
    """One stored value: its key and its size in bytes."""

    key: str
    size: int


class FileDigest(NamedTuple):
    """Size in bytes and xxh3-128 (32 hexadecimal digits) of a file's content."""

    size: int
    xxh3: str


class Storage(Protocol):
    """A place that keeps values under keys. See the module's docstring for keys and errors."""

    @property
    def uri(self) -> str:
        """Where it is, as a person would write it; ``open_storage(uri)`` opens it again."""

    def put(self, key: str, data: bytes) -> None:
        """Keep ``data`` under ``key``, replacing what was there. Durable, whole and visible on return."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """As ``put``, but only where ``key`` is absent: of any number of callers exactly one gets True."""

    def put_file(self, key: str, path: str | Path, *, digest: bool = True) -> FileDigest:
        """As ``put`` with a file's content. ``xxh3`` is "" when no digest is asked for."""

    def put_file_if_absent(self, key: str, path: str | Path) -> FileDigest | None:
        """As ``put_if_absent`` with a file's content; None where the key is taken."""

    def get(self, key: str) -> bytes:
        """The value under ``key``; raises ``FileNotFoundError`` where there is none."""

    def get_file(self, key: str, path: str | Path) -> None:
        """Write the value under ``key`` to a local file, whose directory is made if absent."""

    def list(self, prefix: str = "") -> list[Entry]:
        """Everything below ``prefix``, sorted by key; unfinished writes are never in it."""

    def move(self, source: str, key: str) -> None:
        """Keep the value of ``source`` under ``key`` instead, replacing what was there."""

    def delete(self, key: str) -> None:
        """Forget ``key``. An absent key is fine."""

    def delete_tree(self, prefix: str) -> None:
        """Forget everything below ``prefix``. Nothing there is fine."""

    def sweep(self) -> int:
        """Remove what writers that are gone left unfinished; returns how many."""

    def local_path(self, key: str) -> Path | None:
        """The real file of ``key`` (which may not exist yet), or None where storage has no real files."""

    def child(self, prefix: str) -> Storage:
        """The same place seen from below ``prefix``."""


def check_key(key: str) -> str:
    """``key`` itself; raises :class:`StorageError` where it could lead out of its storage."""
    parts = key.split("/")
    if "\0" in key or any(part in ("", ".", "..") for part in parts):
        raise StorageError(
            f"The storage key {key!r} is not allowed: it must be relative, use single '/' between its parts, "
            "and have no empty part, '.' or '..'. Choose a plain name."
        )
    if any(part.startswith(TEMPORARY_PREFIX) for part in parts):
        raise StorageError(
            f"The storage key {key!r} is not allowed: names that start with {TEMPORARY_PREFIX!r} are kept "
            "for unfinished writes. Choose another name."
        )
    return key


def open_storage(path: str | Path) -> Storage:
    """The storage at a plain path or ``file://`` address. Nothing is created until something is put."""
    from powertrain.storage.local import LocalStorage

    text = os.fspath(path)
    if "://" not in text:
        if not text:
            raise StorageError("The storage path is empty. Give a directory, such as '~/powertrain_runs'.")
        return LocalStorage(Path(text).expanduser())
    address = urlsplit(text)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return LocalStorage(Path(unquote(address.path)))
    if address.scheme == "file":
        raise StorageError(
            f"The storage path {text!r} names the host {address.netloc!r}, whose files cannot be reached so. "
            "Write three slashes for a path on this machine: 'file:///path'."
        )
    kind = "object stores are" if address.scheme in _OBJECT_STORES else f"'{address.scheme}://' is"
    raise StorageError(
        f"The storage path {text!r} cannot be used: {kind} not supported yet by this version of Powertrain. "
        "Use a local path, or a path where the store is mounted as a file system."
    )


def probe(storage: Storage) -> None:
    """Prove that storage can be written, read and deleted; raises :class:`StorageError` that says why not."""
    key, data = f".powertrain-probe-{secrets.token_hex(8)}", secrets.token_bytes(64)
    try:
        storage.put(key, data)
        found = storage.get(key)
        storage.delete(key)
    except OSError as error:
        raise StorageError(_why_unusable(storage.uri, error)) from error
    if found != data:
        raise StorageError(
            f"The storage path {storage.uri!r} gave back other bytes than were written to it. "
            "Check the file system, or choose another storage path."
        )


def _why_unusable(uri: str, error: OSError) -> str:
    """One sentence of what is wrong with ``uri`` and one of what to do."""
    fixes = {
        errno.EACCES: "Give this user write permission there, or choose another storage path.",
        errno.EPERM: "Give this user write permission there, or choose another storage path.",
        errno.EROFS: "Mount it writable, or choose another storage path.",
        errno.ENOTDIR: "A part of the path is a file: remove it, or choose another storage path.",
        errno.EEXIST: "A part of the path is a file: remove it, or choose another storage path.",
        errno.ENOSPC: "Free some space there, or choose another storage path.",
        errno.EDQUOT: "Free some of this user's quota there, or choose another storage path.",
        errno.ENAMETOOLONG: "Choose a shorter storage path or run name.",
        errno.ELOOP: "Its symbolic links lead in a circle: choose another storage path.",
    }
    reason = error.strerror or str(error)
    fix = fixes.get(error.errno or 0, "Check that the place exists and is mounted, or choose another path.")
    return f"The storage path {uri!r} cannot be written: {reason}. {fix}"
