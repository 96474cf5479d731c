"""Addresses of object stores, and the client settings to reach them.

``s3://bucket/prefix?region=eu-west-1``: the scheme selects the store, the host is the bucket (in Azure the container),
the path is the prefix, and the query has the options of pyarrow's addresses. In the path "?", "%" and control
characters are written with percent signs; everything else may stand as it is.

Unset options come from the cloud's usual environment: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``,
``AWS_PROFILE``, ``GOOGLE_APPLICATION_CREDENTIALS``, ``AZURE_STORAGE_ACCOUNT_NAME`` and their like.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from powertrain.errors import StorageError
from powertrain.text.redaction import HIDDEN, has_secrets, strip_secrets, without_secrets

__all__ = [
    "OBJECT_STORES",
    "PARAMETERS",
    "Address",
    "ClientSettings",
    "Kind",
    "client_settings",
    "has_secrets",
    "parse",
    "strip_secrets",
    "without_secrets",
]

Kind = Literal["s3", "gcs", "azure"]

_KINDS: dict[str, Kind] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "azure": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
#: Schemes of addresses that this module understands.
OBJECT_STORES = tuple(_KINDS)

_EVERYWHERE = ("endpoint_override", "scheme", "allow_http", "anonymous", "tls_ca_file_path")
#: The query options of each kind of store.
PARAMETERS: dict[Kind, tuple[str, ...]] = {
    "s3": (*_EVERYWHERE, "region", "access_key", "secret_key", "session_token", "force_virtual_addressing"),
    "gcs": _EVERYWHERE,
    "azure": (*_EVERYWHERE, "account_name", "account_key", "sas_token", "use_emulator"),
}
_SECRETS = ("secret_key", "session_token", "account_key", "sas_token")
#: The same in the settings of a client, with the identity that they belong to.
_SECRET_SETTINGS = ("access_key_id", "secret_access_key", "session_token", "account_key", "sas_key")
_BOOLEANS = ("allow_http", "anonymous", "force_virtual_addressing", "use_emulator")


@dataclass(frozen=True, repr=False)
class Address:
    """A prefix in a bucket of an object store. ``query`` and ``user`` are kept as they were written."""

    scheme: str
    bucket: str
    prefix: str
    query: str = ""
    #: The part before "@": "key:secret" in S3; in Azure the container, and the bucket is then the account.
    user: str = ""
    #: The part after "@" in Azure: the account's host.
    host: str = ""

    def __repr__(self) -> str:
        return f"Address({without_secrets(self.uri)!r})"

    @property
    def kind(self) -> Kind:
        return _KINDS[self.scheme]

    @property
    def secrets(self) -> set[str]:
        """The secrets that it holds, as they are written and as they are sent."""
        written = {self.parameters[name] for name in _SECRETS if name in self.parameters}
        endpoint = self.parameters.get("endpoint_override", "")
        for user in (self.user, endpoint.rpartition("@")[0].rpartition("/")[2]):
            written.add(user.partition(":")[2] if ":" in user else user)
        return {
            text for secret in written if secret for text in (secret, unquote(secret), quote(secret, safe=""))
        }

    @property
    def parameters(self) -> dict[str, str]:
        return dict(parse_qsl(self.query, keep_blank_values=True))

    @property
    def uri(self) -> str:
        place = f"{self.bucket}@{self.host}" if self.host else f"{self.user}@{self.bucket}".removeprefix("@")
        path = f"/{_quoted(self.prefix)}" if self.prefix else ""
        return f"{self.scheme}://{place}{path}" + (f"?{self.query}" if self.query else "")

    def child(self, prefix: str) -> Address:
        return replace(self, prefix=f"{self.prefix}/{prefix}".removeprefix("/"))


def parse(uri: str) -> Address:
    """Parse ``uri``; raises :class:`StorageError` with the problem."""
    scheme, _, rest = uri.partition("://")
    scheme = scheme.lower()
    place, _, query = rest.partition("?")
    authority, _, path = place.partition("/")
    user, _, bucket = authority.rpartition("@")
    host = ""
    if _KINDS[scheme] == "azure" and user:
        user, bucket, host = "", user, bucket
    if not bucket:
        raise StorageError(
            f"The storage path {without_secrets(uri)!r} names no bucket. Write it after the slashes: "
            f"'{scheme}://bucket/path'."
        )
    if ":" in bucket and not bucket.startswith("arn:"):
        raise StorageError(
            f"The storage path {without_secrets(uri)!r} has a ':' in its bucket. Write '/' as %2F, '?' as %3F and "
            "'@' as "
            "%40 in keys, or give keys in the environment."
        )
    prefix = "/".join(part for part in unquote(path, errors="surrogateescape").split("/") if part)
    if any(part in (".", "..") for part in prefix.split("/")) or "\0" in prefix:
        raise StorageError(f"The storage path {without_secrets(uri)!r} may not have '.' or '..' as a part.")
    address = Address(scheme, bucket, prefix, query, user, host)
    _check_query(address)
    return address


def _quoted(prefix: str) -> str:
    """``prefix`` with those characters in percent signs that would read as something else in an address."""
    text = re.sub(r"%|\?|[\x00-\x20\x7f]", lambda match: f"%{ord(match[0]):02X}", prefix)
    return re.sub(r"[\ud800-\udfff]", lambda match: f"%{ord(match[0]) & 0xFF:02X}", text)


def _check_query(address: Address) -> None:
    known = PARAMETERS[address.kind]
    for name, value in address.parameters.items():
        if name not in known:
            shown = name if re.fullmatch(r"[A-Za-z][\w.-]{0,39}", name) else HIDDEN
            raise StorageError(
                f"The storage path {without_secrets(address.uri)!r} has the unknown parameter {shown!r}. "
                f"'{address.scheme}://' addresses understand: {', '.join(known)}."
            )
        allowed = ("true", "false") if name in _BOOLEANS else ("http", "https") if name == "scheme" else ()
        if allowed and value.lower() not in allowed:
            raise StorageError(
                f"The storage path {without_secrets(address.uri)!r} says {name}={value!r}, which must be "
                f"{' or '.join(allowed)}."
            )


# --------------------------------------------------------------------------- client settings


@dataclass(frozen=True, repr=False)
class ClientSettings:
    """The settings to reach a bucket: obstore's names and values, as hashable pairs."""

    kind: Kind
    bucket: str
    config: tuple[tuple[str, str | bool], ...]
    allow_http: bool
    ca_file: str

    def __repr__(self) -> str:
        config = {
            name: HIDDEN if name in _SECRET_SETTINGS else without_secrets(str(value))
            for name, value in self.config
        }
        return f"ClientSettings({self.kind!r}, {self.bucket!r}, {config!r})"


def client_settings(address: Address, environ: Mapping[str, str]) -> ClientSettings:
    """Return the settings of an address, completed by the environment and by AWS's own files."""
    parameters = address.parameters
    endpoint = _endpoint(address, parameters, environ)
    config = {"s3": _s3, "gcs": _gcs, "azure": _azure}[address.kind](address, parameters, environ, endpoint)
    if parameters.get("anonymous", "").lower() == "true":
        config["skip_signature"] = True
    http_allowed = parameters.get("allow_http", "").lower() == "true" or endpoint.startswith("http://")
    return ClientSettings(
        kind=address.kind,
        bucket=address.bucket,
        config=tuple(sorted(config.items())),
        allow_http=http_allowed or parameters.get("use_emulator", "").lower() == "true",
        ca_file=parameters.get("tls_ca_file_path")
        or environ.get("AWS_CA_BUNDLE", "") * (address.kind == "s3"),
    )


def endpoint_of(address: Address, environ: Mapping[str, str]) -> str:
    """Return the server that requests for ``address`` go to, as a URL; "" for the cloud's own.

    Raises:
        StorageError: The address or the environment names something that is not a server.
    """
    return _endpoint(address, address.parameters, environ)


def _endpoint(address: Address, said: Mapping[str, str], environ: Mapping[str, str]) -> str:
    """Return the server's URL, "" for the cloud's own; refuse an invalid one."""
    variables = {
        "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
        "gcs": ("STORAGE_EMULATOR_HOST",),
        "azure": ("AZURE_ENDPOINT",),
    }[address.kind]
    found = [("endpoint_override", said.get("endpoint_override", ""))]
    found += [(name, environ.get(name, "")) for name in variables]
    source, endpoint = next(((name, value) for name, value in found if value), ("", ""))
    if not endpoint:
        return ""
    if "://" not in endpoint:
        insecure = source == "STORAGE_EMULATOR_HOST" or said.get("allow_http", "").lower() == "true"
        endpoint = f"{said.get('scheme', 'http' if insecure else 'https')}://{endpoint}"
    if not _is_server(endpoint):
        raise StorageError(
            f"The endpoint {without_secrets(endpoint)!r} (from {source}) is not the address of a server. "
            "Write it as 'https://host:port' or 'http://host:port'."
        )
    return endpoint.rstrip("/")


def _is_server(endpoint: str) -> bool:
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        return False
    printable = endpoint.isascii() and endpoint.isprintable() and not re.search(r"[\s<>\"{}|\\^`]", endpoint)
    return printable and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0


def _s3(
    address: Address, said: Mapping[str, str], environ: Mapping[str, str], endpoint: str
) -> dict[str, str | bool]:
    key, _, secret = (unquote(part) for part in address.user.partition(":"))
    own = {
        "access_key_id": said.get("access_key", key),
        "secret_access_key": said.get("secret_key", secret),
        "session_token": said.get("session_token", ""),
    }
    profile = _aws_profile(environ)
    if not own["access_key_id"] and not _has_aws_credentials(environ):
        own = {name: profile.get(f"aws_{name}", "") for name in own}
    region = said.get("region") or environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    config: dict[str, str | bool] = {name: value for name, value in own.items() if value}
    config["region"] = region or profile.get("region") or "us-east-1"
    config["copy_if_not_exists"] = "multipart"
    virtual = said.get("force_virtual_addressing", "").lower() == "true"
    if virtual:
        config["virtual_hosted_style_request"] = True
    if endpoint:
        virtual_endpoint = endpoint.replace("://", f"://{address.bucket}.", 1)
        # Both names, because of the second one in the environment obstore would make more than of the first.
        config["endpoint"] = config["aws_endpoint_url_s3"] = virtual_endpoint if virtual else endpoint
    return config


def _has_aws_credentials(environ: Mapping[str, str]) -> bool:
    names = (
        "AWS_ACCESS_KEY_ID",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    )
    return any(environ.get(name) for name in names)


def _aws_profile(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the active profile's settings from AWS's shared files; {} where none can be read."""
    import configparser

    home = Path(environ.get("HOME") or "~").expanduser()
    name = environ.get("AWS_PROFILE") or "default"
    found: dict[str, str] = {}
    config = environ.get("AWS_CONFIG_FILE") or str(home / ".aws" / "config")
    credentials = environ.get("AWS_SHARED_CREDENTIALS_FILE") or str(home / ".aws" / "credentials")
    for path, section in ((config, name if name == "default" else f"profile {name}"), (credentials, name)):
        parser = configparser.RawConfigParser()
        try:
            parser.read(Path(path).expanduser(), encoding="utf-8")
            found |= dict(parser.items(section))
        except (configparser.Error, OSError, UnicodeDecodeError):
            continue  # missing or unreadable
    return found


def _gcs(
    address: Address, said: Mapping[str, str], environ: Mapping[str, str], endpoint: str
) -> dict[str, str | bool]:
    config: dict[str, str | bool] = {"base_url": endpoint} if endpoint else {}
    if environ.get("STORAGE_EMULATOR_HOST") and not said.get("endpoint_override"):
        config["skip_signature"] = True
    return config


def _azure(
    address: Address, said: Mapping[str, str], environ: Mapping[str, str], endpoint: str
) -> dict[str, str | bool]:
    emulated = said.get("use_emulator", "").lower() == "true"
    account = said.get("account_name") or address.host.partition(".")[0]
    account = account or environ.get("AZURE_STORAGE_ACCOUNT_NAME") or environ.get("AZURE_STORAGE_ACCOUNT", "")
    if not account and not emulated:
        raise StorageError(
            f"The storage path {without_secrets(address.uri)!r} names no storage account. Set "
            "AZURE_STORAGE_ACCOUNT_NAME, add '?account_name=...', or write "
            "'abfs://container@account.dfs.core.windows.net/path'."
        )
    config: dict[str, str | bool] = {"account_name": account} if account else {}
    for name, setting in (("account_key", "account_key"), ("sas_token", "sas_key")):
        if said.get(name):
            config[setting] = said[name]
    if endpoint:
        config["endpoint"] = endpoint
    if emulated:
        config["use_emulator"] = True
    return config
