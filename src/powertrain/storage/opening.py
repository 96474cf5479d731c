"""Open the storage of an address, and probe that it can be used."""

from __future__ import annotations

import errno
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from powertrain.errors import StorageError
from powertrain.storage.addresses import OBJECT_STORES, without_secrets
from powertrain.storage.base import TIMEOUT_S, check_filesystem, own_address
from powertrain.text.redaction import redact
from powertrain.values.arguments import as_path

if TYPE_CHECKING:
    from powertrain.storage.base import Storage
    from powertrain.storage.local import LocalStorage

#: How long the probe at the start of a run tries: a person waits for it.
PROBE_TIMEOUT_S = 6.0


def open_storage(path: str | Path, *, filesystem: Any = None, timeout: float = TIMEOUT_S) -> Storage:
    """Return the storage at a plain path, a ``file://`` address or an object store's address.

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


def probe(storage: Storage) -> None:
    """Check that storage can be written, read and deleted, and that ``put_if_absent`` decides races.

    Raises :class:`StorageError` with the reason, within a few seconds even where the server does not answer.
    """
    place = storage.within(PROBE_TIMEOUT_S)
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
    except Exception as error:  # a user's file system may raise anything
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
    """Return one sentence with the problem of ``uri`` and one with the remedy."""
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
