"""The spool: a durable file of points that are not in a segment yet.

Points are written in pieces: several records as one msgpack array. Each piece of the file has its length, the number of
its target segment, its hash, and a hash of these three. So an incomplete piece, at the end of a file whose writer died
or is still writing, is distinguished from a damaged one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import xxhash

from powertrain.errors import StorageError
from powertrain.run.metrics.points import PointRecord, decode_records, encode_records
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.files.descriptors import open_for_append

#: Records in one piece.
PIECE_POINTS = 1024
#: Head of each piece: its length, its target segment, its xxh3-64.
_PIECE_HEAD = struct.Struct("<IIQ")
#: Follows if the length has this bit: the xxh3-64 of the head. Earlier versions wrote neither.
_HAS_HEAD_HASH = 1 << 31
_HEAD_HASH = struct.Struct("<Q")


def pieces_of(records: Sequence[PointRecord]) -> list[bytes]:
    """Encode records as pieces."""
    return [
        encode_records(records[start : start + PIECE_POINTS])
        for start in range(0, len(records), PIECE_POINTS)
    ]


def points_in(piece: bytes) -> int:
    """Return the number of records of a piece: the length of its msgpack array."""
    first = piece[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F
    return int.from_bytes(piece[1:3], "big")


def joined(pieces: Iterable[bytes], most_points: int, most_bytes: int) -> Iterator[bytes]:
    """Join pieces into fewer ones, of at most this many points and bytes: many ranks add one at a time."""
    waiting: list[bytes] = []
    points = size = 0
    for piece in pieces:
        more = points_in(piece)
        if waiting and (points + more > min(most_points, PIECE_POINTS) or size + len(piece) > most_bytes):
            yield _as_one(waiting, points)
            waiting, points, size = [], 0, 0
        waiting.append(piece)
        points, size = points + more, size + len(piece)
    if waiting:
        yield _as_one(waiting, points)


def _as_one(pieces: list[bytes], points: int) -> bytes:
    """Concatenate msgpack arrays: the header before their elements is their number, in one or three bytes."""
    if len(pieces) == 1:
        return pieces[0]
    head = bytes([0x90 | points]) if points < 16 else b"\xdc" + points.to_bytes(2, "big")
    return head + b"".join(piece[1 if piece[0] & 0xF0 == 0x90 else 3 :] for piece in pieces)


class Spool:
    """The file of points that are not in a segment yet. Created by the first ``append``."""

    def __init__(self, storage: Storage, lease: int) -> None:
        path = storage.local_path(f"metrics/{lease:04d}.open")
        if path is None:
            raise StorageError(
                f"Metrics cannot be spooled at {without_secrets(storage.uri)!r}: that needs real files. Use a local or "
                "mounted path."
            )
        self.path = str(path)
        self._descriptor = -1
        self._size = 0

    def append(self, pieces: Iterable[bytes], segment: int) -> None:
        """Append pieces for ``segment``, all or none."""
        if self._descriptor < 0:
            # The lease is new, and so is its file: an existing one was not written by this run.
            self._descriptor = open_for_append(self.path, 3, fresh=True)
        data = b"".join(part for piece in pieces for part in (_head_of(piece, segment), piece))
        try:
            if os.write(self._descriptor, data) < len(data):
                raise OSError(f"only a part of {len(data)} bytes could be written to {self.path!r}")
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # an incomplete piece would hide all that follow
            raise
        self._size += len(data)

    def empty(self) -> None:
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
        self._size = 0

    def close(self, keep: bool) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if not keep:
                os.unlink(self.path)


def _head_of(piece: bytes, segment: int) -> bytes:
    head = _PIECE_HEAD.pack(len(piece) | _HAS_HEAD_HASH, segment, xxhash.xxh3_64_intdigest(piece))
    return head + _HEAD_HASH.pack(xxhash.xxh3_64_intdigest(head))


class SpoolContent(NamedTuple):
    """The readable content of a spool."""

    #: (segment, records) of each complete piece up to the first cut or damaged one.
    pieces: list[tuple[int, list[PointRecord]]]
    #: The damage of the next piece; "" for none, or if the file ends within it.
    damage: str = ""


def read_spool(data: bytes) -> SpoolContent:
    """Decode the content of a spool. Never raises."""
    pieces: list[tuple[int, list[PointRecord]]] = []
    offset = 0
    while offset + _PIECE_HEAD.size <= len(data):
        length, segment, digest = _PIECE_HEAD.unpack_from(data, offset)
        start = offset + _PIECE_HEAD.size
        if length & _HAS_HEAD_HASH:
            if start + _HEAD_HASH.size > len(data):
                break
            (expected,) = _HEAD_HASH.unpack_from(data, start)
            if xxhash.xxh3_64_intdigest(data[offset:start]) != expected:
                return SpoolContent(pieces, f"the head of its piece {len(pieces)} is not as it was written")
            start, length = start + _HEAD_HASH.size, length ^ _HAS_HEAD_HASH
        piece = data[start : start + length]
        if len(piece) < length:
            break
        if xxhash.xxh3_64_intdigest(piece) != digest:
            return SpoolContent(pieces, f"its piece {len(pieces)} is not as it was written")
        try:
            pieces.append((segment, decode_records(piece)))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            return SpoolContent(pieces, f"its piece {len(pieces)} cannot be decoded: {error}")
        offset = start + length
    return SpoolContent(pieces)
