"""CRC-32C of many byte strings at once, as TFRecord files have it; with numpy, so that no package is needed for it.

The checksum is linear: that of two joined strings is that of the second, xor that of the first with zeros behind it.
So strings are cut into short pieces, whose checksums are computed side by side and then combined in pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

_POLYNOMIAL = 0x82F63B78
_ALL_ONES = np.uint32(0xFFFFFFFF)
#: Bytes of a piece whose checksum is computed step by step; a power of two.
_PIECE = 64
#: Bytes that are processed together.
_TOGETHER = 8 << 20
#: Added to the rotated checksum by TensorFlow, so that checksums of checksums differ.
_MASK_DELTA = 0xA282EAD8


@functools.cache
def _byte_table() -> Any:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table


@functools.cache
def _python_table() -> tuple[int, ...]:
    return tuple(int(value) for value in _byte_table())


@functools.cache
def _zeros_table(length: int) -> Any:
    """Return four tables, one for each byte of a checksum, that append ``length`` zeros (a power of two) to it."""
    values = np.arange(256, dtype=np.uint32)
    one_byte = np.stack([values << np.uint32(8 * place) for place in range(4)])
    if length == 1:
        table = _byte_table()
        return table[one_byte & 0xFF] ^ (one_byte >> np.uint32(8))
    half = _zeros_table(length // 2)
    return _appended(_appended(one_byte, half), half)


def _appended(checksums: Any, table: Any) -> Any:
    """Return checksums after the zeros of ``table``."""
    found = table[0][checksums & 0xFF]
    for place in range(1, 4):
        found = found ^ table[place][(checksums >> np.uint32(8 * place)) & 0xFF]
    return found


def crc32c(data: bytes) -> int:
    """Return the checksum of one short byte string."""
    table, found = _python_table(), 0xFFFFFFFF
    for byte in data:
        found = table[(found ^ byte) & 0xFF] ^ (found >> 8)
    return found ^ 0xFFFFFFFF


def crc32c_of_all(strings: Sequence[bytes | memoryview]) -> Any:
    """Return the checksum of each byte string, as an array of uint32."""
    found = np.zeros(len(strings), np.uint32)
    lengths = np.fromiter((len(each) for each in strings), np.int64, len(strings))
    for place in np.flatnonzero(lengths < 4):
        found[place] = crc32c(bytes(strings[int(place)]))
    # Strings of similar lengths are rows of one array, with zeros before them.
    widths = np.int64(1) << np.ceil(np.log2(np.maximum(lengths, 4))).astype(np.int64)
    for width in np.unique(widths[lengths >= 4]):
        places = np.flatnonzero((widths == width) & (lengths >= 4))
        step = max(1, _TOGETHER // int(width))
        for first in range(0, len(places), step):
            chosen = places[first : first + step]
            found[chosen] = _of_one_width([strings[int(place)] for place in chosen], int(width))
    return found


def _of_one_width(strings: Sequence[bytes | memoryview], width: int) -> Any:
    """Return the checksums of strings of 4 to ``width`` bytes, a power of two."""
    rows = np.zeros((len(strings), width), np.uint8)
    for row, each in zip(rows, strings, strict=True):
        row[width - len(each) :] = np.frombuffer(each, np.uint8)
        # The same as to begin with all ones; zeros before the string then change nothing.
        row[width - len(each) : width - len(each) + 4] ^= 0xFF
    piece = min(width, _PIECE)
    table = _byte_table()
    columns = np.ascontiguousarray(rows.reshape(-1, piece).T)
    checksums: Any = np.zeros(columns.shape[1], np.uint32)
    for column in columns:
        checksums = table[(checksums ^ column) & 0xFF] ^ (checksums >> np.uint32(8))
    checksums = checksums.reshape(len(strings), -1)
    while checksums.shape[1] > 1:
        checksums = _appended(checksums[:, ::2], _zeros_table(piece)) ^ checksums[:, 1::2]
        piece *= 2
    return checksums[:, 0] ^ _ALL_ONES


def masked(checksum: int) -> int:
    """Return a checksum as TFRecord files store it."""
    return ((checksum >> 15 | checksum << 17) + _MASK_DELTA) & 0xFFFFFFFF


def masked_all(checksums: Any) -> Any:
    """Return checksums as TFRecord files store them."""
    rotated = (checksums >> np.uint32(15)) | (checksums << np.uint32(17))
    return (rotated.astype(np.uint64) + _MASK_DELTA).astype(np.uint32)
