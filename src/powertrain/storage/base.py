"""The storage protocol, and the rules that all storages share.

The surface is small on purpose: whole values go in and come out, one operation decides races (``put_if_absent``), and
nothing is ever changed in place. Local disks, mounted file systems and object stores can all guarantee that.

Keys name values. They use "/" between parts and stay inside the storage: no empty part, no ".", no "..", no
leading "/". A prefix is a key that other keys lie below, as files lie below a directory; the empty prefix
means everything.

``OSError`` passes through from every operation: the caller knows the purpose of the value and names it. Remote storage
retries until its ``timeout`` before it raises one. Permanent failures (no such bucket, refused credentials) raise a
:class:`StorageError` at once.

A storage can be pickled, and none starts a thread or opens a connection before it is first used.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from powertrain.errors import ArgumentError, PowertrainError, StorageError
from powertrain.values.arguments import has_attribute, shorten

#: Names that start so are unfinished writes: never listed, and swept.
TEMPORARY_PREFIX = ".powertrain-tmp."
#: An unfinished write of another host is taken for abandoned after this many seconds.
ABANDONED_TIMEOUT_S = 3600.0
#: How long an operation on a place across a network is tried again, as ``SyncConfig.sync_timeout`` has it.
TIMEOUT_S = 1800.0

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


class StoredPart(NamedTuple):
    """Some bytes of a value, and the size of the whole value."""

    data: bytes
    size: int


class Storage(Protocol):
    """A place that keeps values under keys. See the module's docstring for keys and errors."""

    @property
    def uri(self) -> str:
        """Return its address in the user's form; ``open_storage(uri)`` opens it again."""

    @property
    def lacks(self) -> tuple[str, ...]:
        """One sentence for each promise of this protocol that the place cannot keep; () where it keeps all."""

    def put(self, key: str, data: bytes) -> None:
        """Store ``data`` under ``key``, replacing an earlier value. Durable, whole and visible on return."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """As ``put``, but only where ``key`` is absent: of any number of callers exactly one gets True."""

    def put_file(self, key: str, path: str | Path, *, digest: bool = True) -> FileDigest:
        """As ``put`` with a file's content. ``xxh3`` is "" when no digest is requested."""

    def put_file_if_absent(self, key: str, path: str | Path) -> FileDigest | None:
        """As ``put_if_absent`` with a file's content; None where the key is taken."""

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        """Return the value under ``key``; raises ``FileNotFoundError`` for a missing key.

        A value of more than ``limit`` bytes is not read: it raises ``OSError`` with ``EFBIG``.
        """

    def get_range(self, key: str, start: int, length: int) -> StoredPart:
        """Return up to ``length`` bytes of ``key`` from ``start`` on, without reading the others; none after its end.

        Raises ``FileNotFoundError`` for a missing key.
        """

    def get_file(self, key: str, path: str | Path) -> None:
        """Write the value under ``key`` to a local file, whose directory is made if absent."""

    def digest(self, key: str) -> FileDigest:
        """Return size and hash of the value under ``key``, read through without a file of its own."""

    def modified(self, key: str) -> float:
        """Return the time of the last put of ``key``, in seconds of the storage's clock; ``FileNotFoundError`` if
        never."""

    def list(self, prefix: str = "") -> list[Entry]:
        """Return everything below ``prefix``, sorted by key; unfinished writes are never in it."""

    def directories(self) -> Sequence[str]:
        """Return the first parts of keys that have more than one, sorted. The keys below them are not listed, and a
        file system may have directories without any."""

    def move(self, source: str, key: str) -> None:
        """Move the value of ``source`` to ``key``, replacing an earlier value."""

    def delete(self, key: str) -> None:
        """Forget ``key``. An absent key is fine."""

    def delete_tree(self, prefix: str) -> None:
        """Delete everything below ``prefix``. A prefix without values is fine."""

    def sweep(self) -> int:
        """Remove unfinished writes of dead writers; return their number."""

    def local_path(self, key: str) -> Path | None:
        """Return the real file of ``key`` (which may not exist yet), or None where storage has no real files."""

    def child(self, prefix: str) -> Storage:
        """Return the same place seen from below ``prefix``."""

    def within(self, timeout: float) -> Storage:
        """Return the same place, whose operations give up after ``timeout`` seconds where they wait at all."""


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
    return OSError(errno.EFBIG, f"it has more than {limit:,} bytes, so it was changed or damaged", key)


def temporary_name() -> str:
    """Return a name for an unfinished write that identifies its process and host."""
    return f"{TEMPORARY_PREFIX}{host_in_names()}.{os.getpid()}.{secrets.token_hex(8)}"


def is_abandoned(name: str, age: float) -> bool:
    """Return True when the writer of the temporary ``name``, last changed ``age`` seconds ago, is surely gone."""
    host, _, rest = name[len(TEMPORARY_PREFIX) :].partition(".")
    pid = rest.partition(".")[0]
    if host == host_in_names() and pid.isdigit():
        return not is_alive(int(pid))
    return age > ABANDONED_TIMEOUT_S


def host_in_names() -> str:
    """Return this host's name, with only letters, digits and "-"."""
    return "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname()) or "host"


def is_alive(pid: int) -> bool:
    """Return True when this machine has a process of that number."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it exists and is another user's
    return True


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
    """Raise ``error`` for a value that is neither None nor a file system of pyarrow or fsspec."""
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
