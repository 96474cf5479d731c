"""The newest reports of a rank, in a mapped file that survives its death.

``report`` puts a message on a queue; a rank that is killed at once may never send it. The row it reached and the report
itself are also written to a mapped file, which costs two memory writes and stays with the system when the process is
gone. So a controller that sees a rank die knows which reports had returned, and has their metrics.

The file is a header and two halves, each a sequence of entries: a length and an encoded report. Reports are appended to
one half until it is full, then to the other, whose old entries are given up. An entry is complete before the header
counts it, so a reader never sees a torn one.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from powertrain.wire import frames
from powertrain.wire.values import Point

#: Bytes of one half: hundreds of ordinary reports, where a rank rarely has more than a few unsent ones. A report that
#: needs more is not kept.
HALF_BYTES = 64 << 10
#: The newest row, the half that is appended to, and the bytes used in each half.
_HEADER = struct.Struct("<qqqq")
_NUMBER = struct.Struct("<q")
_HALF_AT, _USED_AT = 8, (16, 24)
_LENGTH = struct.Struct("<I")
_FILE_BYTES = _HEADER.size + 2 * HALF_BYTES

_decode: Callable[[bytes], Point] = msgspec.msgpack.Decoder(Point).decode


class ReportsOfRank(NamedTuple):
    """The newest row whose report had returned, and the newest reports, oldest first."""

    row: int
    reports: list[Point]


class NewestReports:
    """The writing end. ``path`` is created anew; "" keeps nothing."""

    def __init__(self, path: str) -> None:
        self._map: mmap.mmap | None = None
        self._half, self._used = 0, 0
        self._has_room = False
        if not path:
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb+") as file:
            file.write(_HEADER.pack(0, 0, 0, 0))
            file.flush()
            self._has_room = _allocate(file.fileno())
            self._map = mmap.mmap(file.fileno(), 0)

    def add(self, point: Point, *, is_pending: bool = False) -> None:
        """Keep a report that is about to return.

        Args:
            point: The report.
            is_pending: True when its values are still on their way from a GPU. Then only its row is kept, as for a
                report that is too large, and for one with a share of a checkpoint, which is sealed with its report.
        """
        if self._map is None:
            return
        if self._has_room and point.part is None and not is_pending:
            try:
                data = frames.encoded(point, HALF_BYTES - _LENGTH.size)
            except frames.TooLarge:
                pass
            else:
                self._append(self._map, data)
        _NUMBER.pack_into(self._map, 0, point.row)

    def _append(self, target: mmap.mmap, data: bytes) -> None:
        needed = _LENGTH.size + len(data)
        if self._used + needed > HALF_BYTES:
            self._half, self._used = 1 - self._half, 0
            _NUMBER.pack_into(target, _USED_AT[self._half], 0)
            _NUMBER.pack_into(target, _HALF_AT, self._half)
        at = _HEADER.size + self._half * HALF_BYTES + self._used
        _LENGTH.pack_into(target, at, len(data))
        target[at + _LENGTH.size : at + needed] = data
        self._used += needed
        _NUMBER.pack_into(target, _USED_AT[self._half], self._used)

    def close(self) -> None:
        """Unmap the file, which stays."""
        if self._map is not None:
            self._map.close()
            self._map = None


def _allocate(descriptor: int) -> bool:
    """Reserve the space of the reports; False on a full disk, where a write to a mapped page would end the process."""
    try:
        os.posix_fallocate(descriptor, 0, _FILE_BYTES)
    except OSError:
        os.ftruncate(descriptor, _HEADER.size)
        return False
    return True


def read_newest_reports(path: str, after: int = 0) -> ReportsOfRank:
    """Return what the file of a rank has of rows beyond ``after``; row 0 and no reports where there is no file.

    May be called at any time, in any process and after the rank was killed.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_FILE_BYTES)
        row, half, *used = _HEADER.unpack_from(content)
    except (OSError, struct.error):
        return ReportsOfRank(0, [])
    reports: list[Point] = []
    if row > after and len(content) == _FILE_BYTES and half in (0, 1):
        for number in (1 - half, half):
            begin = _HEADER.size + number * HALF_BYTES
            reports += _entries(content[begin : begin + max(0, min(used[number], HALF_BYTES))])
    return ReportsOfRank(row, [point for point in reports if point.row > after])


def _entries(half: bytes) -> Iterator[Point]:
    at = 0
    while at + _LENGTH.size <= len(half):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(half, at)[0]
        try:
            yield _decode(half[begin:at])
        except msgspec.DecodeError:  # not written by this class
            return
