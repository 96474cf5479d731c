"""Files with odd values whose hashes are right: what an attacker who can write to the storage could leave there.

What a reader makes of them may differ from the true run, and nobody can tell; but it may neither crash, hang nor raise
anything but an error of ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import xxhash

from powertrain.run.metrics.points import encode_records
from powertrain.run.metrics.spool import _head_of, read_spool
from powertrain.storage.sealed import seal_json
from powertrain.trace.part_format import PartFrame, complete, encode, read_part

#: What is put in the place of a value.
ODD: tuple[Any, ...] = (
    -1, 0, 1 << 31, 1 << 63, 10**30, -(1 << 63), 0.5, 1e308, -1e308, True, None, "", "x" * 5000, "\x00\x1b[31m\n",
    "../..",
    "/", "s3://b/p?endpoint_override=http://127.0.0.1:9", "file://elsewhere/x", [], {}, [[]], {"$float": []},
    {"$pairs": [[[], 1]]}, {"$bytes": 5}, {"$odd": 1}, ["\ud800"], "checkpoint_000004",
)  # fmt: skip
Path = tuple[Any, ...]
_SEALED = (".powertrain-manifest.json", "run.json", "final_summary.json", ".powertrain-validation.json")


def places_in(file: str, data: bytes) -> int:
    """How many values of a file can be replaced; 0 for a file that is not forged."""
    if file.endswith(".jsonl"):
        return sum(len(list(_paths(json.loads(line)))) for line in data.splitlines())
    if file.endswith(_SEALED) or file.startswith(("commits/", "lease/0")):
        return len(list(_paths(json.loads(data)))) if data else 0
    if file.startswith("metrics/") and file.endswith(".open"):
        return 5
    return 4 if file.startswith("telemetry/") else 0


def forge(file: str, data: bytes, place: int, value: int) -> bytes:
    """The file with its value number ``place`` replaced by :data:`ODD` number ``value``."""
    odd = ODD[value]
    if file.endswith(".jsonl"):
        return _forged_lines(data, place, odd)
    if file.endswith(_SEALED):
        fields = json.loads(data)
        fields.pop("seal", None)
        return seal_json(json.dumps(_replaced(fields, list(_paths(fields))[place], odd), indent=1).encode())
    if file.startswith(("commits/", "lease/")):
        fields = json.loads(data)
        path = list(_paths(fields))[place]
        if path != ("check",):
            fields.pop("check", None)
        return json.dumps(_replaced(fields, path, odd)).encode()
    if file.startswith("metrics/"):
        return _forged_spool(data, place, odd)
    return _forged_frames(data, place, odd, is_growing=file.endswith(".open"))


def _paths(value: Any, above: Path = ()) -> Iterator[Path]:
    """Where each value is, but for the hash."""
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, item in items:
        if (*above, key) not in (("seal",), ("check",)):
            yield (*above, key)
            yield from _paths(item, (*above, key))


def _replaced(value: Any, path: Path, odd: Any) -> Any:
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(value[path[0]], path[1:], odd)
    return copy


def _forged_lines(data: bytes, place: int, odd: Any) -> bytes:
    lines = []
    for line in data.splitlines():
        fields = json.loads(line)
        paths = list(_paths(fields))
        if 0 <= place < len(paths):
            fields = _replaced(fields, paths[place], odd)
        place -= len(paths)
        fields.pop("check", None)
        body = json.dumps(fields, separators=(",", ":")).encode()[:-1]
        lines.append(body + b',"check":"' + xxhash.xxh3_64_hexdigest(body).encode() + b'"}\n')
    return b"".join(lines)


def _forged_spool(data: bytes, place: int, odd: Any) -> bytes:
    forged = b""
    for segment, records in read_spool(data).pieces:
        plain = msgspec.to_builtins(records)
        plain[0][place] = odd
        try:
            piece = encode_records(plain)
        except (OverflowError, UnicodeEncodeError):  # msgpack has no such number or text
            piece = encode_records(records)
        forged += _head_of(piece, segment) + piece
    return forged


def _forged_frames(data: bytes, place: int, odd: Any, is_growing: bool) -> bytes:
    frames = []
    for frame in read_part(data, is_growing).frames:
        number: Any = odd if isinstance(odd, int) and 0 <= odd < 1 << 31 else (1 << 31) - 1
        if place < 3:
            frames.append(frame._replace(**{PartFrame._fields[place]: number}))
        else:
            frames.append(PartFrame(frame.attempt, frame.rank, frame.kind, bytes(len(frame.data))))
    return encode(frames) if is_growing else complete(encode(frames))
