"""CRC-32C of many stretches of bytes at once, as TFRecord files have it; with numpy, so that it needs no package.

The checksum is linear: that of two joined strings is that of the second, xor that of the first with zeros behind it.
So stretches are cut into short pieces, whose checksums are computed side by side and then combined in pairs.
"""

from __future__ import annotations

import functools
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
def _pair_table() -> Any:
    """Return the checksums of all pairs of bytes, to take two steps at once."""
    table = _byte_table()
    once = table[np.arange(65536, dtype=np.uint32) & 0xFF] ^ (
        np.arange(65536, dtype=np.uint32) >> np.uint32(8)
    )
    return table[once & 0xFF] ^ (once >> np.uint32(8))


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


def crc32c_of_all(data: bytes, starts: Any, stops: Any) -> Any:
    """Return the checksum of each stretch ``data[start:stop]``, as an array of uint32."""
    starts, stops = np.asarray(starts, np.int64), np.asarray(stops, np.int64)
    lengths = stops - starts
    found = np.zeros(len(lengths), np.uint32)
    for place in np.flatnonzero(lengths < 4):
        found[place] = crc32c(data[starts[place] : stops[place]])
    # Stretches of similar lengths are rows of one array, with zeros before them.
    widths = np.int64(1) << np.ceil(np.log2(np.maximum(lengths, 4))).astype(np.int64)
    for width in np.unique(widths[lengths >= 4]):
        places = np.flatnonzero((widths == width) & (lengths >= 4))
        step = max(1, _TOGETHER // int(width))
        for first in range(0, len(places), step):
            chosen = places[first : first + step]
            found[chosen] = _of_one_width(data, stops[chosen], lengths[chosen], int(width))
    return found


def _of_one_width(data: bytes, stops: Any, lengths: Any, width: int) -> Any:
    """Return the checksums of stretches of 4 to ``width`` bytes, a power of two."""
    first = int((stops - lengths).min())
    last = int(stops.max())
    # With room before it, so that every stretch has ``width`` bytes that end where it does.
    near = np.concatenate([np.zeros(width, np.uint8), np.frombuffer(data, np.uint8, last - first, first)])
    rows = np.lib.stride_tricks.sliding_window_view(near, width)[stops - first]
    missing = width - lengths
    rows[np.arange(width) < missing[:, None]] = 0
    # The same as to begin with all ones; zeros before the stretch then change nothing.
    rows[np.arange(len(rows))[:, None], missing[:, None] + np.arange(4)] ^= 0xFF
    piece = min(width, _PIECE)
    table = _pair_table()
    columns = np.ascontiguousarray(rows.view("<u2").reshape(-1, piece // 2).T)
    checksums: Any = np.zeros(columns.shape[1], np.uint32)
    for column in columns:
        checksums = table[(checksums ^ column) & 0xFFFF] ^ (checksums >> np.uint32(16))
    checksums = checksums.reshape(len(rows), -1)
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
