"""What a trainer was made of, kept in its run, so that ``restore(path)`` can make it again.

The arguments are pickled, and to open a pickle is to run code. So they are signed with a key that only this user has,
and opened only where the signature is right: a run directory that somebody else wrote cannot run code here.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import os
import pickle
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from powertrain.errors import ConfigError
from powertrain.storage import Storage
from powertrain.storage.addresses import has_secrets

_KEY, _SIGNATURE = "trainer.pickle", "trainer.signature"
_KEY_BYTES = 32
#: Datasets that hold more rows than this many bytes are not kept: whoever restores the run gives them again.
_MOST_DATA = 16 * 2**20
_ADDRESS = re.compile(rb"[a-z0-9]+://[!-~]+")


def store(storage: Storage, arguments: dict[str, Any]) -> str:
    """Keep a trainer's arguments in its run; returns "" or why they could not be kept.

    Datasets that have many rows in memory, have a secret in an address, are Ray's or cannot be pickled are left out;
    their names are kept instead.
    """
    try:
        data = cloudpickle.dumps({**arguments, **_lasting_datasets(arguments.get("datasets"))})
        key = _signing_key()
    except Exception as error:  # whatever the user's objects do when they are pickled
        storage.delete(_SIGNATURE)  # of an earlier start, whose arguments are not these
        storage.delete(_KEY)
        return f"{type(error).__name__}: {error}"
    storage.put(_KEY, data)
    if (path := storage.local_path(_KEY)) is not None:
        path.chmod(0o600)  # a loop's config may hold what others should not read
    storage.put(_SIGNATURE, _signature(key, data))
    return ""


def load(storage: Storage) -> dict[str, Any]:
    """The arguments of the run's trainer; raises :class:`ConfigError` where there are none that can be trusted."""
    try:
        data, signature = storage.get(_KEY), storage.get(_SIGNATURE)
    except FileNotFoundError:
        raise ConfigError(
            _ask_for_function(storage, "it does not hold what its trainer was made of")
        ) from None
    if not hmac.compare_digest(signature, _signature(_signing_key(), data)):
        raise ConfigError(
            _ask_for_function(
                storage,
                "what it holds was not written by you on this machine, and opening it could run any code",
            )
        )
    arguments: dict[str, Any] = pickle.loads(data)
    if arguments.get("datasets"):
        arguments["datasets"] = pickle.loads(arguments["datasets"])
    return arguments


def _lasting_datasets(datasets: Mapping[str, Any] | None) -> dict[str, Any]:
    """``datasets`` as they are kept: pickled, or only the names of those that are not."""
    if not datasets:
        return {"datasets": None}
    left_out = {"datasets": None, "needs_datasets": sorted(datasets)}
    if any(type(dataset).__module__.startswith("ray.") for dataset in datasets.values()):
        return left_out  # what it refers to is gone with its cluster
    limited = _LimitedFile()
    try:
        cloudpickle.CloudPickler(limited).dump(dict(datasets))
    except Exception:  # too large, or whatever the user's objects do when they are pickled
        return left_out
    data = limited.getvalue()
    has_a_secret = any(has_secrets(found.decode()) for found in _ADDRESS.findall(data))
    return left_out if has_a_secret else {"datasets": data}


class _TooLarge(Exception):
    """More than is worth keeping."""


class _LimitedFile(io.BytesIO):
    """Bytes in memory, but not more than :data:`_MOST_DATA`: large rows are not copied only to learn their size."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _MOST_DATA:
            raise _TooLarge
        return super().write(data)


def _ask_for_function(storage: Storage, why: str) -> str:
    return (
        f"The trainer of {storage.uri!r} cannot be made from that run alone: {why}. Give the training function: "
        "restore(path, train_loop_per_worker=..., scaling_config=...)."
    )


def _signature(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).hexdigest().encode()


def _signing_key() -> bytes:
    """This user's key on this machine, made when it is first needed."""
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    path = Path(home, "powertrain", "signing.key")
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


def _whole(path: Path) -> bytes:
    """The key; an empty or short one would make signatures that anybody could forge."""
    key = path.read_bytes()
    if len(key) < _KEY_BYTES:
        raise ConfigError(f"The signing key {str(path)!r} is damaged. Delete it, and a new one is made.")
    return key
