"""The servers that this user has chosen, as opposed to those that only a file in storage names.

A request to an object store is signed, or carries a token. So an address that was read from a file, and not given by
the user, may choose a bucket and a path, but neither the server nor the account: those must be the ones of the run's
own storage, or of this process's environment. It has no credentials either: they would be an account of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from powertrain.errors import StorageError
from powertrain.storage.addresses import (
    OBJECT_STORES,
    Address,
    endpoint_of,
    has_secrets,
    parse,
    without_secrets,
)

#: Names of buckets and regions become part of a server's name.
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REGION = re.compile(r"[A-Za-z0-9-]*")


class _Server(NamedTuple):
    """The server of requests, and the account."""

    kind: str
    endpoint: str
    allow_http: str
    ca_file: str
    emulated: str
    account: str


def require_known_server(named: str, own: str, environ: Mapping[str, str]) -> None:
    """Check that an address from a file leads to no other server than the user's own. Local paths pass.

    Args:
        named: The address or path that the file names.
        own: The address or path of the run's storage.
        environ: The environment, which may name a server and an account.

    Raises:
        StorageError: It leads to another server or account, has credentials, or cannot be understood.
    """
    scheme = named.partition("://")[0].lower() if "://" in named else ""
    if scheme in ("", "file"):
        return
    place = f"it names {without_secrets(named)!r} as the place of its files"
    if scheme not in OBJECT_STORES:
        raise StorageError(f"{place}, and '{scheme}://' is not a scheme that Powertrain reads.")
    if has_secrets(named) or _has_credentials(address := parse(named)):
        raise StorageError(
            f"{place}, and that address has credentials. Give them in the environment, and not in the address."
        )
    if not _BUCKET.fullmatch(address.bucket) or not _REGION.fullmatch(address.parameters.get("region", "")):
        raise StorageError(f"{place}, and its bucket or region is not valid.")
    if _server_of(address, environ) not in _known_servers(address, own, environ):
        raise StorageError(
            f"{place}, on another server or in another account than those of the run's storage and of this "
            "environment. Requests there would carry your credentials. If you trust it, name it in the environment "
            "(AWS_ENDPOINT_URL, STORAGE_EMULATOR_HOST, AZURE_STORAGE_ACCOUNT_NAME) and not in the "
            "address."
        )


def _has_credentials(address: Address) -> bool:
    """Return True for credentials in any form, also those that look like hidden ones."""
    return bool(address.user or address.secrets or "access_key" in address.parameters)


def _known_servers(address: Address, own: str, environ: Mapping[str, str]) -> list[_Server]:
    """Return the servers for addresses of this kind that the environment and the run's storage name."""
    known = [_server_of(replace(address, query="", user="", host=""), environ)]
    if own.partition("://")[0].lower() in OBJECT_STORES and "://" in own:
        known.append(_server_of(parse(own), environ))
    return known


def _server_of(address: Address, environ: Mapping[str, str]) -> _Server:
    chosen = address.parameters
    account = ""
    if address.kind == "azure":
        account = chosen.get("account_name") or address.host
        account = (
            account or environ.get("AZURE_STORAGE_ACCOUNT_NAME") or environ.get("AZURE_STORAGE_ACCOUNT", "")
        )
    return _Server(
        kind=address.kind,
        endpoint=endpoint_of(address, environ),
        allow_http=chosen.get("allow_http", "").lower(),
        ca_file=chosen.get("tls_ca_file_path", ""),
        emulated=chosen.get("use_emulator", "").lower(),
        account=account.partition(".")[0],
    )
