"""The bytes of a part of the telemetry: frames, each with hashes of its head and its data. Pure.

::

    frame    length, attempt, rank, kind (with a mark that a hash of these follows), hash of the data;
             hash of all that; data
    ...
    the end  a frame of its own kind with the number of bytes before it; only in parts that are complete

Earlier versions wrote neither the hash of the head nor the end. Their parts are read as before: a changed rank or
attempt, and a cut between two frames, cannot be found in them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import xxhash

from powertrain.trace.machine import samples
from powertrain.trace.recording import phases

#: Kinds of frames: records of steps, samples, and text (one JSON object).
#: 1 are samples of earlier versions without stolen cores: they are skipped.
STEPS, FACTS, SAMPLES = 0, 2, 3
_END = 4
#: Added to the kind of a frame whose head has a hash.
_HAS_HEAD_HASH = 1 << 31
#: Length, attempt, rank, kind, xxh3-64 of the data.
_HEAD = struct.Struct("<IIIIQ")
_HEAD_HASH = struct.Struct("<Q")


class PartFrame(NamedTuple):
    """Records of one rank."""

    attempt: int
    rank: int
    kind: int
    data: bytes


class PartContent(NamedTuple):
    """The readable content of a part."""

    frames: list[PartFrame]
    #: The error after these frames; "" for none, or if a growing part ends within a frame.
    damage: str = ""


def encode(frames: Iterable[PartFrame]) -> bytes:
    """Return the frames one after the other."""
    return b"".join(part for frame in frames for part in (_head_of(frame), frame.data))


def complete(frames: bytes) -> bytes:
    """Return encoded frames with the end that makes them a part that never grows again."""
    return frames + encode([PartFrame(0, 0, _END, struct.pack("<Q", len(frames)))])


def _head_of(frame: PartFrame) -> bytes:
    head = _HEAD.pack(
        len(frame.data),
        frame.attempt,
        frame.rank,
        frame.kind | _HAS_HEAD_HASH,
        xxhash.xxh3_64_intdigest(frame.data),
    )
    return head + _HEAD_HASH.pack(xxhash.xxh3_64_intdigest(head))


def read_part(data: bytes, is_growing: bool) -> PartContent:
    """Decode a part up to its end, or to a cut or damaged frame. Never raises.

    Args:
        data: The content of the file.
        is_growing: True for a part that its writer may just be adding to, or has died while adding to.
    """
    frames: list[PartFrame] = []
    offset, has_hashes = 0, False
    while offset < len(data):
        head = _read_head(data, offset)
        if head is None:
            return PartContent(frames, "" if is_growing else "it is cut short")
        if isinstance(head, str):
            return PartContent(frames, f"frame {len(frames)}: {head}")
        has_hashes = has_hashes or head.is_hashed
        piece = data[head.start : head.start + head.length]
        if len(piece) < head.length:
            return PartContent(frames, "" if is_growing else "it is cut short")
        if xxhash.xxh3_64_intdigest(piece) != head.digest:
            return PartContent(frames, f"frame {len(frames)}: its data are not as they were written")
        end = head.start + head.length
        if head.kind == _END and head.is_hashed:
            is_whole = piece == struct.pack("<Q", offset) and end == len(data)
            return PartContent(frames, "" if is_whole else "its end is not where it was")
        frame = PartFrame(head.attempt, head.rank, head.kind, piece)
        if fault := _fault_of(frame):
            return PartContent(frames, f"frame {len(frames)}: {fault}")
        frames.append(frame)
        offset = end
    is_cut = not is_growing and (has_hashes or not data)
    return PartContent(frames, "it is cut short" if is_cut else "")


class _Head(NamedTuple):
    length: int
    attempt: int
    rank: int
    kind: int
    digest: int
    is_hashed: bool
    #: Offset of the data.
    start: int


def _read_head(data: bytes, offset: int) -> _Head | str | None:
    """Return the head of the frame at ``offset``, or its error; None if the data end within it."""
    if offset + _HEAD.size > len(data):
        return None
    length, attempt, rank, kind, digest = _HEAD.unpack_from(data, offset)
    start = offset + _HEAD.size
    if not kind & _HAS_HEAD_HASH:
        return _Head(length, attempt, rank, kind, digest, False, start)
    if start + _HEAD_HASH.size > len(data):
        return None
    if xxhash.xxh3_64_intdigest(data[offset:start]) != _HEAD_HASH.unpack_from(data, start)[0]:
        return "its head is not as it was written"
    return _Head(length, attempt, rank, kind ^ _HAS_HEAD_HASH, digest, True, start + _HEAD_HASH.size)


def _fault_of(frame: PartFrame) -> str:
    """Return the error of a frame; "" for none."""
    size = {STEPS: phases.RECORD_SIZE, SAMPLES: samples.SAMPLE_SIZE}.get(frame.kind)
    if size is not None and len(frame.data) % size:
        return "its data are not whole records"
    if frame.kind == FACTS:
        try:
            if not isinstance(msgspec.json.decode(frame.data), dict):
                return "its text is not an object"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return f"its text is not JSON ({error})"
    return ""
