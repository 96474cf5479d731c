"""obstore's clients: one for each bucket and process, made when it is first needed.

obstore runs threads once it is used, and a process forked after that has none of them and would wait for ever. So
constructing a storage makes no client, and a forked child of a process that made one is refused with a remedy.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from powertrain.errors import StorageError
from powertrain.storage.addresses import ClientSettings

_clients: dict[tuple[ClientSettings, float, bool], Any] = {}
_clients_guard = threading.Lock()
#: The process whose obstore has threads, None before any.
_used_by: int | None = None


def client_for(settings: ClientSettings, request_timeout: float, in_parts: bool) -> Any:
    """Return the client of this process for a bucket, made at its first use."""
    global _used_by
    with _clients_guard:
        if _used_by not in (None, os.getpid()):
            raise StorageError(
                f"The bucket {settings.bucket!r} cannot be reached from this process: it was forked from one that had "
                "used an object store, whose threads it lacks, and would wait for ever. Start it with 'spawn' "
                "(multiprocessing.get_context('spawn')), or fork before the first use."
            )
        wanted = (settings, request_timeout, in_parts)
        if wanted not in _clients:
            _used_by = os.getpid()
            _clients[wanted] = _new_client(settings, request_timeout, in_parts)
        return _clients[wanted]


def _new_client(settings: ClientSettings, request_timeout: float, in_parts: bool) -> Any:
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, S3Store

    options: dict[str, Any] = {
        "timeout": timedelta(seconds=request_timeout),
        "connect_timeout": timedelta(seconds=min(5.0, request_timeout)),
        "allow_http": settings.allow_http,
        "user_agent": "powertrain",
    }
    if settings.ca_file:
        options["root_certificate"] = _certificate(settings.ca_file)
    # obstore retries single parts of a multipart upload; everything else is retried by us, with a report.
    retries = {"max_retries": 3 if in_parts else 0, "retry_timeout": timedelta(seconds=2 * request_timeout)}
    maker: Any = {"s3": S3Store, "gcs": GCSStore, "azure": AzureStore}[settings.kind]
    more = {"client_options": options, "retry_config": retries, **_own_identity(settings)}
    try:
        return maker(settings.bucket, config=dict(settings.config), **more)
    except (BaseError, ValueError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise StorageError(
            f"The bucket {settings.bucket!r} cannot be reached with these settings: {reason}. Correct the storage "
            "path or the environment variables of the cloud."
        ) from error


def _own_identity(settings: ClientSettings) -> dict[str, Any]:
    """Keeps a session token of the environment away from keys that came from elsewhere."""
    config = dict(settings.config)
    token_around = os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_TOKEN")
    if (
        settings.kind != "s3"
        or "access_key_id" not in config
        or "session_token" in config
        or not token_around
    ):
        return {}
    identity = {name: config.get(name, "") for name in ("access_key_id", "secret_access_key")}
    return {"credential_provider": lambda: {**identity, "token": None, "expires_at": None}}


def _certificate(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise StorageError(
            f"The certificate file {path!r} for the object store cannot be read: {error.strerror}. Correct "
            "'tls_ca_file_path' or AWS_CA_BUNDLE."
        ) from error


#: Clients of the process that this one was forked from: kept, because taking them down needs their threads.
_inherited: list[Any] = []


def _forget_clients_in_child() -> None:
    global _clients_guard
    _inherited.extend(_clients.values())
    _clients.clear()
    _clients_guard = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_clients_in_child)
