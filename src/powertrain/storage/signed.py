"""Signed values, which are opened only where this user's key on this machine signed them.

Opening a pickle runs code. So pickles in a run are signed when they are written, and returned only where the signature
is right: a run directory that another user wrote cannot run code here. The signature covers the name of the run and of
the file, so that a signed value of one run does not pass for that of another, or for another file. A reader that knows
which names a directory has had may name them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from powertrain.errors import ConfigError
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT, RECORD_BYTES_LIMIT, Storage
from powertrain.storage.files.ownership import why_unsafe
from powertrain.storage.local import LocalStorage

_KEY_BYTES = 32
#: Separates these signatures from others made with the key.
_PURPOSE = b"powertrain value of a run"


class NotOurs(Exception):
    """A value was not signed by this user on this machine: opening it could run any code."""


class Signed(NamedTuple):
    """Bytes for one key of one run, and the proof that this user wrote them."""

    key: str
    data: bytes
    signature: bytes


def sign(storage: Storage, key: str, data: bytes) -> Signed:
    """Sign ``data`` as this user's value of ``key`` in the run of ``storage``.

    Raises ``OSError`` or :class:`ConfigError` where no key can be had.
    """
    return Signed(key, data, _signature(_signing_key(), storage, key, data))


def put(storage: Storage, value: Signed) -> None:
    """Keep a signed value, and its signature beside it. Durable on return.

    Where storage has real files only this user can read it, from the moment at which it is begun.
    """
    if isinstance(storage, LocalStorage):
        storage.put(value.key, value.data, mode=0o600)
    else:
        storage.put(value.key, value.data)
    storage.put(_signature_key(value.key), value.signature)


def get(
    storage: Storage,
    key: str,
    *,
    limit: int = LARGE_RECORD_BYTES_LIMIT,
    earlier_names: Callable[[], Iterable[str]] = tuple,
) -> bytes:
    """Return the value under ``key``.

    ``earlier_names`` is called where the signature is not for the name that the directory has now, and returns those
    that it has had. Raises ``FileNotFoundError`` where there is no value, :class:`NotOurs` where its signature is not
    this user's, or missing, :class:`ConfigError` where this user's key cannot be relied on, and ``OSError`` with
    ``EFBIG`` for one of more than ``limit`` bytes.
    """
    data = storage.get(key, limit=limit)
    try:
        signature, own = storage.get(_signature_key(key), limit=RECORD_BYTES_LIMIT), _whole(_key_path())
    except (FileNotFoundError, NotADirectoryError):  # a user without a key has signed nothing
        raise NotOurs(key) from None
    if not hmac.compare_digest(signature, _signature(own, storage, key, data)) and not any(
        hmac.compare_digest(signature, _signature(own, storage, key, data, name)) for name in earlier_names()
    ):
        raise NotOurs(key)
    return data


def delete(storage: Storage, key: str) -> None:
    """Forget a value and its signature. An absent one is fine."""
    storage.delete(_signature_key(key))
    storage.delete(key)


def _signature_key(key: str) -> str:
    return key.rpartition(".")[0] + ".signature"


def _signature(own: bytes, storage: Storage, key: str, data: bytes, name: str | None = None) -> bytes:
    """Covers the names too, each with its length, so that no other names and data give the same bytes."""
    run = (_run_name(storage) if name is None else name).encode(errors="surrogateescape")
    content = b"".join(len(part).to_bytes(8, "big") + part for part in (_PURPOSE, run, key.encode(), data))
    return hmac.new(own, content, hashlib.sha256).hexdigest().encode()


def _run_name(storage: Storage) -> str:
    """Return the name of the run, which stays the same when its directory is moved to another storage path."""
    address = storage.uri.partition("?")[0] if "://" in storage.uri else storage.uri
    return address.rstrip("/").rpartition("/")[2]


def _signing_key() -> bytes:
    """Return this user's key on this machine, made when it is first needed."""
    path = _key_path()
    try:
        return _whole(path)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    unfinished.touch(mode=0o600)
    with open(unfinished, "wb") as file:
        file.write(secrets.token_bytes(_KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(unfinished, path)
    except FileExistsError:
        pass  # another process was first, and its key counts
    finally:
        unfinished.unlink()
    return _whole(path)


def _key_path() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(home, "powertrain", "signing.key")


def _whole(path: Path) -> bytes:
    """Return the key; refuse a short one, or one that others can read, which would let them forge signatures."""
    with open(path, "rb", opener=_open_without_waiting) as file:
        status = os.fstat(file.fileno())
        key = file.read(_KEY_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    if len(key) < _KEY_BYTES:
        raise ConfigError(f"The signing key {str(path)!r} is damaged. Delete it, and a new one is made.")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"The signing key {str(path)!r} may be known to other users: it must belong to you with mode 0600. Delete "
            "it, and a new one is made; or set XDG_CONFIG_HOME to a directory of your own."
        )
    if reason := why_unsafe(path.parent):
        raise ConfigError(
            f"The signing key {str(path)!r} could be replaced by other users: {reason}. Let only yourself write there "
            "(chmod go-w), or set XDG_CONFIG_HOME to a directory that only you can write to."
        )
    return key


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
