"""What Powertrain asks of a place that keeps files, and the rules all such places share.

The surface is small on purpose: whole values go in and come out, one operation decides races
(``put_if_absent``), and nothing is ever changed in place. That is what local disks, mounted file systems and
object stores can all promise.

Keys name values. They use "/" between parts and stay inside the storage: no empty part, no ".", no "..", no
leading "/". A prefix is a key that other keys lie below, as files lie below a directory; the empty prefix
means everything.

``OSError`` passes through from every operation: the caller knows what the value was for and says so. A place
that is reached over a network tries again until its ``timeout`` before it raises one. What trying again cannot
mend (no such bucket, refused credentials) is a :class:`StorageError` at once.

A storage can be pickled, and none starts a thread or opens a connection before it is first used.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

from powertrain.values.arguments import as_path, has_attribute, shorten
from powertrain.errors import ArgumentError, PowertrainError, StorageError
from powertrain.text.redaction import redact
from powertrain.storage.addresses import OBJECT_STORES, without_secrets

if TYPE_CHECKING:
    from powertrain.storage.local import LocalStorage

#: Names that start so are unfinished writes: never listed, and swept.
TEMPORARY_PREFIX = ".powertrain-tmp."
#: An unfinished write of another host is taken for abandoned after this many seconds.
ABANDONED_AFTER = 3600.0
#: How long an operation on a place across a network is tried again, as ``SyncConfig.sync_timeout`` has it.
TIMEOUT = 1800.0
#: How long the probe at the start of a run tries: a person waits for it.
PROBE_SECONDS = 6.0


#: The most bytes that are read of a record of fixed form: ``run.json``, a lease, a commit link, a signature.
RECORD_BYTES_LIMIT = 64 << 20
#: The most bytes that are read of a record that grows with its run: a journal file, a manifest, metadata.
LARGE_RECORD_BYTES_LIMIT = 1 << 30


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

    @property
    def lacks(self) -> tuple[str, ...]:
        """One sentence for each promise of this protocol that the place cannot keep; () where it keeps all."""

    def put(self, key: str, data: bytes) -> None:
        """Keep ``data`` under ``key``, replacing what was there. Durable, whole and visible on return."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """As ``put``, but only where ``key`` is absent: of any number of callers exactly one gets True."""

    def put_file(self, key: str, path: str | Path, *, digest: bool = True) -> FileDigest:
        """As ``put`` with a file's content. ``xxh3`` is "" when no digest is asked for."""

    def put_file_if_absent(self, key: str, path: str | Path) -> FileDigest | None:
        """As ``put_if_absent`` with a file's content; None where the key is taken."""

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """The value under ``key``; raises ``FileNotFoundError`` where there is none.

        One of more than ``limit`` bytes is not read: it raises ``OSError`` with ``EFBIG``.
        """

    def get_file(self, key: str, path: str | Path) -> None:
        """Write the value under ``key`` to a local file, whose directory is made if absent."""

    def digest(self, key: str) -> FileDigest:
        """Size and hash of the value under ``key``, read through without a file of its own."""

    def modified(self, key: str) -> float:
        """When ``key`` was last put, in seconds of the storage's own clock; ``FileNotFoundError`` if never."""

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

    def within(self, timeout: float) -> Storage:
        """The same place, whose operations give up after ``timeout`` seconds where they wait at all."""


# --------------------------------------------------------------------------- names


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


def join_within(pieces: Iterable[bytes], key: str, limit: int | None) -> bytes:
    """Return the pieces of a value as one; raises :func:`too_large` as soon as they are more than ``limit`` bytes."""
    taken, size = [], 0
    for piece in pieces:
        size += len(piece)
        if limit is not None and size > limit:
            raise too_large(key, limit)
        taken.append(piece)
    return b"".join(taken)


def too_large(key: str, limit: int) -> OSError:
    """Return the error for a value that has more bytes than its reader takes."""
    return OSError(errno.EFBIG, f"it has more than {limit:,} bytes, so it is not what was written", key)


def temporary_name() -> str:
    """A name for an unfinished write that tells which process of which host makes it."""
    return f"{TEMPORARY_PREFIX}{host_in_names()}.{os.getpid()}.{secrets.token_hex(8)}"


def is_abandoned(name: str, age: float) -> bool:
    """True when the writer of the temporary ``name``, last changed ``age`` seconds ago, is surely gone."""
    host, _, rest = name[len(TEMPORARY_PREFIX) :].partition(".")
    pid = rest.partition(".")[0]
    if host == host_in_names() and pid.isdigit():
        return not is_alive(int(pid))
    return age > ABANDONED_AFTER


def host_in_names() -> str:
    """This host's name, with only letters, digits and "-"."""
    return "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname()) or "host"


def is_alive(pid: int) -> bool:
    """True when this machine has a process of that number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it exists and is another user's
    return True


# --------------------------------------------------------------------------- opening


def open_storage(path: str | Path, *, filesystem: Any = None, timeout: float = TIMEOUT) -> Storage:
    """The storage at a plain path, a ``file://`` address or an object store's address.

    ``filesystem`` is a pyarrow or fsspec file system that ``path`` is a path of. ``timeout`` bounds how long an
    operation across a network is tried again. Nothing is created or connected until something is put or read.
    """
    text = as_path(path, "The storage path", StorageError)
    if own := own_address(filesystem, text):
        text, filesystem = own, None
    if filesystem is not None:
        check_filesystem(filesystem, "The file system of the storage", StorageError)
        from powertrain.storage.adapter import storage_on

        return storage_on(filesystem, text)
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme in OBJECT_STORES:
        from powertrain.storage.objects import ObjectStorage

        return ObjectStorage(text, timeout=timeout)
    return _open_local(text, scheme)


def own_address(filesystem: Any, path: str) -> str:
    """Return the address of ``path`` on a file system that a Checkpoint or Result of ours has given out.

    Such a file system knows the credentials, which are not in ``path``. Returns "" for any other file system.

    Raises:
        StorageError: The path is outside of that file system.
    """
    find = getattr(getattr(filesystem, "handler", None), "address_of", None)
    if find is None:
        return ""
    try:
        return str(find(path))
    except FileNotFoundError as error:
        raise StorageError(str(error)) from error


def check_filesystem(filesystem: Any, given_as: str, error: type[PowertrainError] = ArgumentError) -> None:
    """Raise ``error`` for what is neither None nor a file system of pyarrow or in the manner of fsspec."""
    if filesystem is None:
        return
    is_pyarrows = any(
        (cls.__module__.partition(".")[0], cls.__name__) == ("pyarrow", "FileSystem")
        for cls in type(filesystem).__mro__
    )
    if not is_pyarrows and not all(
        has_attribute(filesystem, name) for name in ("protocol", "open", "info", "find")
    ):
        raise error(
            f"{given_as} was given {shorten(filesystem)}, which is neither a pyarrow.fs.FileSystem nor an fsspec file "
            "system. Give one of these."
        )


def _open_local(text: str, scheme: str) -> LocalStorage:
    from powertrain.storage.local import LocalStorage

    if not text:
        raise StorageError("The storage path is empty. Give a directory, such as '~/powertrain_runs'.")
    if not scheme:
        return LocalStorage(Path(text).expanduser())
    if scheme != "file":
        raise StorageError(
            f"The storage path {without_secrets(text)!r} cannot be used: '{scheme}://' is not a supported scheme "
            "(file, s3, gs, az, abfs). Use one of them, a path where that storage is mounted, or "
            "RunConfig(storage_filesystem=...) with a pyarrow or fsspec file system."
        )
    address = urlsplit(text)
    if address.netloc not in ("", "localhost"):
        host = address.netloc.rpartition("@")[2]
        raise StorageError(
            f"The storage path {without_secrets(text)!r} names the host {host!r}, whose files cannot be reached so. "
            "Write three slashes for a path on this machine: 'file:///path'."
        )
    return LocalStorage(Path(unquote(address.path)))


# --------------------------------------------------------------------------- proving


def probe(storage: Storage) -> None:
    """Prove that storage can be written, read and deleted, and that ``put_if_absent`` decides races.

    Raises :class:`StorageError` that says why not, within a few seconds even where nobody answers.
    """
    place = storage.within(PROBE_SECONDS)
    key, data = f".powertrain-probe-{secrets.token_hex(8)}", secrets.token_bytes(64)
    shown = without_secrets(storage.uri)
    try:
        place.put(key, data)
        found, decides = place.get(key), not place.put_if_absent(key, b"")
        place.delete(key)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(_why_unusable(shown, error)) from error
    except Exception as error:  # a file system that was handed in raises what it likes
        reason = f"{type(error).__name__}: {error}".rstrip(". ")
        raise StorageError(
            f"The storage path {shown!r} cannot be used: {reason}. Check the file system and its credentials, or "
            "choose another storage path."
        ) from (error if redact(str(error)) == str(error) else None)
    if found != data:
        raise StorageError(
            f"The storage path {shown!r} gave back other bytes than were written to it. "
            "Check the file system, or choose another storage path."
        )
    if not decides:
        raise StorageError(
            f"The storage path {shown!r} overwrote a value that was to be written only if absent, so two runs "
            "could not be told apart there. Update the store to a version with conditional writes "
            "(If-None-Match), or choose another storage path."
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
        errno.ELOOP: "A part of it is a symbolic link, which is not followed below a storage path: replace it by what "
        "it leads to, or choose another storage path.",
        errno.ETIMEDOUT: "Check the endpoint and the network between, or choose another storage path.",
    }
    reason = (error.strerror or str(error)).rstrip(".")
    fix = fixes.get(error.errno or 0, "Check that the place exists and is mounted, or choose another path.")
    return f"The storage path {uri!r} cannot be written: {reason}. {fix}"
