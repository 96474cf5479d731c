"""The newest reports of a rank, in a mapped file that survives its death.

``report`` puts a message on a queue; a rank that is killed at once may never send it. The row it reached and the report
itself are also written to a mapped file, which costs an encoding and a few memory writes, and stays with the system
when the process is gone. So a controller that sees a rank die knows which reports had returned, and has their metrics.

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

#: Bytes of one half: hundreds of ordinary reports, where a rank has at most some hundred unsent ones. A report that
#: needs more is not kept.
HALF_BYTES = 64 << 10
#: The half that is appended to, and of each half the bytes that are used and the newest row at the time.
_HEADER = struct.Struct("<qqqqq")
_NUMBER = struct.Struct("<q")
_USED_AND_ROW = struct.Struct("<qq")
_HALF_AT, _USED_AT = 0, (8, 24)
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
            file.write(_HEADER.pack(0, 0, 0, 0, 0))
            file.flush()
            self._has_room = _allocate(file.fileno())
            self._map = mmap.mmap(file.fileno(), 0)

    def add(self, point: Point, *, is_pending: bool = False) -> bool:
        """Keep a report that is about to return.

        Args:
            point: The report.
            is_pending: True when its values are still on their way from a GPU. Then only its row is kept, as for a
                report that is too large, and for one with a share of a checkpoint, which is sealed with its report.

        Returns:
            True while this and the unsent reports before it are kept; False when they should be sent at once: this one
            is not kept, or earlier ones are given up as soon as a half is full.
        """
        target = self._map
        if target is None:
            return False
        is_safe = False
        if self._has_room and point.part is None and not is_pending:
            try:
                data = frames.encoded(point, HALF_BYTES - _LENGTH.size)
            except frames.TooLarge:
                pass
            else:
                end = self._used + _LENGTH.size + len(data)
                is_safe = end <= HALF_BYTES
                if not is_safe:
                    end -= self._used
                    self._begin_other_half(target)
                at = _HEADER.size + self._half * HALF_BYTES + self._used
                _LENGTH.pack_into(target, at, len(data))
                target[at + _LENGTH.size : at + _LENGTH.size + len(data)] = data
                self._used = end
        _USED_AND_ROW.pack_into(target, _USED_AT[self._half], self._used, point.row)
        return is_safe

    def _begin_other_half(self, target: mmap.mmap) -> None:
        self._half, self._used = 1 - self._half, 0
        _NUMBER.pack_into(target, _USED_AT[self._half], 0)  # its row stays until a newer one is written
        _NUMBER.pack_into(target, _HALF_AT, self._half)

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

    Of a rank that lives the reports may be incomplete.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_FILE_BYTES)
        half, *of_halves = _HEADER.unpack_from(content)
    except (OSError, struct.error):
        return ReportsOfRank(0, [])
    used, row = of_halves[::2], max(of_halves[1::2])
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
        except (msgspec.DecodeError, UnicodeDecodeError):  # not written by this class
            return
