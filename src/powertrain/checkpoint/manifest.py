"""The manifest: the list of what a committed checkpoint consists of, and everything said about it.

A checkpoint is committed when its ``MANIFEST.json`` is there; the manifest is put last, after every file it
names is durable.

JSON has no NaN, no infinity, no bytes and only text as keys, and metrics have all of these. A value that JSON
cannot say is written as an object with one key that starts with "$": ``{"$float": "nan"}``, ``{"$bytes":
base64}``, ``{"$pairs": [[key, value], …]}``; a plain object that happens to look like one of these is wrapped
as ``{"$plain": {…}}``. :func:`to_json_value` and :func:`from_json_value` are each other's inverse.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import msgspec

from powertrain.errors import CheckpointError, StorageError
from powertrain.storage import check_key

#: The file whose presence makes a checkpoint committed.
MANIFEST_NAME = "MANIFEST.json"
#: The version of the manifest's form that this code writes and reads.
SCHEMA = 1


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint and the rank that brought it. An empty directory's name ends in "/"."""

    name: str
    size: int
    xxh3: str
    rank: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known about one committed checkpoint."""

    name: str
    row: int
    attempt: int
    metrics: dict[str, Any]
    world_size: int
    #: Number of the lease under which it was committed.
    lease: int
    #: Name of the checkpoint committed before it, "" for the first.
    parent: str
    #: Unix seconds of the commit.
    created: float
    files: list[ManifestFile]
    #: What other parts of the run need to go on from here, such as the data position.
    extras: dict[str, Any] = {}
    #: What the user attached with ``Checkpoint.set_metadata`` before reporting.
    metadata: dict[str, Any] = {}
    schema: int = SCHEMA

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(file.size for file in self.files)


_FREE_FIELDS = ("metrics", "extras", "metadata")


def encode(manifest: Manifest) -> bytes:
    """The manifest as indented JSON, for people and for :func:`decode`."""
    fields = msgspec.structs.asdict(manifest)
    for name in _FREE_FIELDS:
        fields[name] = to_json_value(fields[name])
    return msgspec.json.format(msgspec.json.encode(fields), indent=1) + b"\n"


def decode(data: bytes, where: str = "the manifest") -> Manifest:
    """The manifest in ``data``; raises :class:`CheckpointError` for any other content, naming ``where``."""
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{where} is damaged: it is not JSON ({error}).") from error
    if not isinstance(fields, dict) or "schema" not in fields:
        raise CheckpointError(
            f"{where} is not the manifest of a Powertrain checkpoint: it has no schema number."
        )
    if fields["schema"] != SCHEMA:
        raise CheckpointError(
            f"{where} has schema {fields['schema']!r}, and this version of Powertrain reads schema {SCHEMA}. "
            "Use the version that wrote it."
        )
    try:
        for name in _FREE_FIELDS:
            fields[name] = from_json_value(fields.get(name, {}))
        manifest = msgspec.convert(fields, Manifest)
    except (msgspec.ValidationError, ValueError) as error:
        raise CheckpointError(f"{where} is damaged: {error}.") from error
    for file in manifest.files:
        check_file_name(file.name, where)
    return manifest


def is_manifest(data: bytes) -> bool:
    """True when ``data`` is a manifest of ours, of whatever schema, and not a user's file of that name."""
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(fields, dict) and {"schema", "name", "row", "lease", "files"} <= fields.keys()


def check_file_name(name: str, where: str) -> None:
    """Raises :class:`CheckpointError` for a file name that leads out of its checkpoint."""
    try:
        check_key(name.removesuffix("/"))
    except StorageError as error:
        raise CheckpointError(
            f"{where} names the file {name!r}, which leads out of the checkpoint."
        ) from error


# --------------------------------------------------------------------------- values that JSON cannot say


def to_json_value(value: Any) -> Any:
    """``value`` in words of JSON; :func:`from_json_value` gives it back exactly (tuples become lists)."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(float(value))}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return {"$pairs": [[to_json_value(key), to_json_value(item)] for key, item in value.items()]}
        plain = {key: to_json_value(item) for key, item in value.items()}
        return {"$plain": plain} if len(plain) == 1 and next(iter(plain)).startswith("$") else plain
    if isinstance(value, (list, tuple)):
        return [to_json_value(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": base64.b64encode(value).decode()}
    return value


def from_json_value(value: Any) -> Any:
    """The inverse of :func:`to_json_value`; raises ``ValueError`` for a "$" key that it never writes."""
    if isinstance(value, list):
        return [from_json_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind: str
    content: Any
    kind, content = next(iter(value.items()), ("", None))
    if len(value) != 1 or not kind.startswith("$"):
        return {key: from_json_value(item) for key, item in value.items()}
    if kind == "$float":
        return float(content)
    if kind == "$bytes":
        return base64.b64decode(content)
    if kind == "$pairs":
        return {from_json_value(key): from_json_value(item) for key, item in content}
    if kind == "$plain" and isinstance(content, dict):
        return {key: from_json_value(item) for key, item in content.items()}
    raise ValueError(f"the value {value!r} cannot be understood")
