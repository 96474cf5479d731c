"""Values that only this user may open: signed with a key of this user on this machine.

To open a pickle is to run code. So what a run keeps as one is signed when it is written, and given out only where the
signature is right: a run directory that somebody else wrote cannot run code here.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from powertrain.errors import ConfigError
from powertrain.storage.base import Storage

_KEY_BYTES = 32


class NotOurs(Exception):
    """A value was not signed by this user on this machine: opening it could run any code."""


class Signed(NamedTuple):
    """Bytes, and the proof that this user wrote them."""

    data: bytes
    signature: bytes


def sign(data: bytes) -> Signed:
    """``data`` as this user's. Raises ``OSError`` or :class:`ConfigError` where no key can be had."""
    return Signed(data, _signature(_signing_key(), data))


def put(storage: Storage, key: str, value: Signed) -> None:
    """Keep a value under ``key``, and its signature beside it. Durable on return; only this user can read it where
    storage has real files."""
    storage.put(key, value.data)
    if (path := storage.local_path(key)) is not None:
        path.chmod(0o600)  # it may hold what others should not read
    storage.put(_signature_key(key), value.signature)


def get(storage: Storage, key: str) -> bytes:
    """The value under ``key``. Raises ``FileNotFoundError`` where there is none, :class:`NotOurs` where its signature
    is not this user's, or missing."""
    data = storage.get(key)
    try:
        signature, own = storage.get(_signature_key(key)), _whole(_key_path())
    except FileNotFoundError:  # nor has who has no key signed anything
        raise NotOurs(key) from None
    if not hmac.compare_digest(signature, _signature(own, data)):
        raise NotOurs(key)
    return data


def delete(storage: Storage, key: str) -> None:
    """Forget a value and its signature. An absent one is fine."""
    storage.delete(_signature_key(key))
    storage.delete(key)


def _signature_key(key: str) -> str:
    return key.rpartition(".")[0] + ".signature"


def _signature(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).hexdigest().encode()


def _signing_key() -> bytes:
    """This user's key on this machine, made when it is first needed."""
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
    """The key; an empty or short one would make signatures that anybody could forge."""
    key = path.read_bytes()
    if len(key) < _KEY_BYTES:
        raise ConfigError(f"The signing key {str(path)!r} is damaged. Delete it, and a new one is made.")
    return key
