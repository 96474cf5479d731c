"""The manifest: the list of a committed checkpoint's files, and its metrics and metadata.

A checkpoint is committed when its ``.powertrain-manifest.json`` is there; the manifest is put last, after every file it
names is durable. It never changes afterwards. Later results (of a validation, metadata set on the committed checkpoint)
lie in files of their own beside it, whose names start with ``.powertrain-`` as well. These are names with a dot, so
that loops over a checkpoint's files pass over them. In checkpoints of version 0.1 the manifest is ``MANIFEST.json``;
those are read as before.

All of these are *sealed*: their last line holds the xxh3-128 of everything before it, so that a changed byte
is found in them as the manifest lets it be found in the files it lists.

A **void** manifest lies where a checkpoint was announced and then cancelled by a takeover of the run. It keeps the
place, so that the announcing controller cannot put a manifest there when it wakes up.

JSON has no NaN, no infinity, no bytes and only text as keys, and metrics have all of these. A value that JSON cannot
express is written as an object with one key that starts with "$": ``{"$float": "nan"}``, ``{"$bytes": base64}``,
``{"$pairs": [[key, value], …]}``; a plain object that happens to look like one of these is wrapped as ``{"$plain":
{…}}``. :func:`to_json_value` and :func:`from_json_value` are each other's inverse.
"""

from __future__ import annotations

import base64
import math
import re
from typing import Annotated, Any

import msgspec
import xxhash

from powertrain.errors import CheckpointError, OtherVersionError, StorageError
from powertrain.storage import check_key
from powertrain.storage.base import TEMPORARY_PREFIX

#: The file whose presence makes a checkpoint committed.
MANIFEST_NAME = ".powertrain-manifest.json"
#: Its name in checkpoints of version 0.1.
OLD_MANIFEST_NAME = "MANIFEST.json"
#: Both, in the order in which they are looked for.
MANIFEST_NAMES = (MANIFEST_NAME, OLD_MANIFEST_NAME)
#: Other files of ours in a checkpoint's directory start so.
BOOKKEEPING_PREFIX = ".powertrain-"
#: The result of the checkpoint's validation.
VALIDATION_NAME = ".powertrain-validation.json"
#: Metadata that was set after the commit; it replaces the committed metadata.
LATER_METADATA_NAME = ".powertrain-metadata.json"
#: The version of the manifest's form that this code writes and reads.
SCHEMA = 1

#: A number that a run counts with; a manifest with any other is damaged, and a run that went on from it would hang.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
#: Unix seconds before the year 10000.
UnixTime = Annotated[float, msgspec.Meta(ge=0, le=253_402_300_800.0)]


class ManifestFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a checkpoint and the rank that brought it. An empty directory's name ends in "/"."""

    name: str
    size: Count
    xxh3: str
    rank: Count


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known about one committed checkpoint."""

    name: str
    row: Count
    attempt: Count
    metrics: dict[str, Any]
    world_size: Count
    #: Number of the lease under which it was committed.
    lease: Count
    #: Name of the checkpoint committed before it, "" for the first.
    parent: str
    #: Unix seconds of the commit.
    created: UnixTime
    files: list[ManifestFile]
    #: State of other parts of the run for resuming from here, such as the data position.
    extras: dict[str, Any] = {}
    #: The user's metadata from ``Checkpoint.set_metadata`` before reporting.
    metadata: dict[str, Any] = {}
    #: Where the files lie when the user uploaded them himself (a path or address); "" for beside the manifest.
    elsewhere: str = ""
    #: Number of its link in the commit chain, which orders the commits of a run.
    link: Count = 0
    schema: int = SCHEMA

    @property
    def bytes(self) -> int:
        """The size of all files together."""
        return sum(file.size for file in self.files)


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of validating a committed checkpoint."""

    #: The name of a :class:`~powertrain.checkpoint.ReportedCheckpointStatus`.
    status: str
    #: The result of the user's function; they join the checkpoint's own metrics.
    metrics: dict[str, Any] = {}
    #: The reason why there are none.
    error: str = ""
    seconds: float = 0.0


_FREE_FIELDS = ("metrics", "extras", "metadata")


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as indented, sealed JSON, for people and for :func:`decode`."""
    fields = msgspec.structs.asdict(manifest)
    for name in _FREE_FIELDS:
        fields[name] = to_json_value(fields[name])
    return seal(fields)


def decode(data: bytes, where: str = "the manifest") -> Manifest:
    """Return the manifest in ``data``; raises :class:`CheckpointError` for any other content, naming ``where``."""
    fields = _fields(data, where)
    if fields.get("void") is True:
        raise CheckpointError(f"{where} is void: its checkpoint was given up when the run was taken over.")
    if "schema" not in fields:
        raise CheckpointError(
            f"{where} is not the manifest of a Powertrain checkpoint: it has no schema number."
        )
    _check_seal(data, where)
    if fields["schema"] != SCHEMA:
        raise OtherVersionError(
            f"{where} has schema {fields['schema']!r}, and this version of Powertrain reads schema {SCHEMA}. "
            "Use the version that wrote it, or start a run of another name."
        )
    try:
        for name in _FREE_FIELDS:
            fields[name] = from_json_value(fields.get(name, {}))
        manifest = msgspec.convert(fields, Manifest)
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: {error}.") from error
    check_file_name(manifest.name, where)
    for file in manifest.files:
        check_file_name(file.name, where)
    return manifest


def void(lease: int) -> bytes:
    """Return a void manifest, put by the holder of this lease."""
    return seal({"void": True, "lease": lease})


def is_void(data: bytes) -> bool:
    """Return True when ``data`` is a whole void manifest."""
    try:
        return unseal(data, "it").get("void") is True
    except CheckpointError:
        return False


def encode_validation(validation: Validation) -> bytes:
    """Return the sealed content of :data:`VALIDATION_NAME`."""
    fields = msgspec.structs.asdict(validation)
    return seal({**fields, "metrics": to_json_value(validation.metrics)})


def decode_validation(data: bytes, where: str) -> Validation:
    """Return the inverse; raises :class:`CheckpointError` where ``data`` has been changed."""
    fields = unseal(data, where)
    try:
        fields["metrics"] = from_json_value(fields.get("metrics", {}))
        return msgspec.convert(fields, Validation)
    except (msgspec.ValidationError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: {error}.") from error


# --------------------------------------------------------------------------- seals

_SEAL = re.compile(rb',\n "seal": "([0-9a-f]{32})"\n}\n\Z')


def seal(fields: dict[str, Any]) -> bytes:
    """Encode ``fields`` (at least one) as indented JSON whose last line is the hash of everything before it."""
    body = msgspec.json.format(msgspec.json.encode(fields), indent=1).removesuffix(b"\n}")
    return body + b',\n "seal": "' + xxhash.xxh3_128_hexdigest(body).encode() + b'"\n}\n'


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Return the inverse of :func:`seal`; raises :class:`CheckpointError` naming ``where`` if any byte has changed."""
    _check_seal(data, where)
    fields = _fields(data, where)
    fields.pop("seal", None)
    return fields


def _check_seal(data: bytes, where: str) -> None:
    found = _SEAL.search(data)
    if found is None or found[1] != xxhash.xxh3_128_hexdigest(data[: found.start()]).encode():
        raise CheckpointError(f"{where} is damaged: its content does not match the hash in its last line.")


def _fields(data: bytes, where: str) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: it is not JSON ({error}).") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{where} is damaged: it holds JSON of another form.")
    return fields


# --------------------------------------------------------------------------- names


_OWN_WORDS = tuple(
    f'"{word}":'.encode() for word in ("schema", "row", "attempt", "lease", "world_size", "files", "extras")
)


def is_manifest(data: bytes) -> bool:
    """Return True for a manifest of ours, of any schema and even if damaged; False for a user's file of that name."""
    return sum(word in data for word in _OWN_WORDS) >= len(_OWN_WORDS) - 2


def check_file_name(name: str, where: str) -> None:
    """Raises :class:`CheckpointError` for a file name that leads out of its checkpoint or is no text."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{where} names the file {name!r}, which is not UTF-8 and so cannot be kept on every storage. "
            "Rename it."
        ) from error
    try:
        check_key(name.removesuffix("/"))
    except StorageError as error:
        reserved = any(part.startswith(TEMPORARY_PREFIX) for part in name.split("/"))
        why = (
            "which is a name kept for unfinished writes" if reserved else "which leads out of the checkpoint"
        )
        raise CheckpointError(f"{where} names the file {name!r}, {why}. Rename it.") from error


# --------------------------------------------------------------------------- values outside JSON


def to_json_value(value: Any) -> Any:
    """Convert ``value`` to JSON values; :func:`from_json_value` restores it exactly (tuples become lists)."""
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
    """Return the inverse of :func:`to_json_value`; raises ``ValueError`` for a "$" key that it never writes."""
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
