"""``tf.train.Example`` messages, decoded and encoded without TensorFlow. Pure.

An Example maps names to lists of bytes, of 32-bit floats or of 64-bit integers. The wire format of protocol buffers
is fixed, and these messages have never changed, so a decoder of some lines replaces a dependency.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

#: The values of a feature: its kind ("bytes", "float", "int", or "" for none), and a list or an array of them.
Feature = tuple[str, Any]
_KINDS = {1: "bytes", 2: "float", 3: "int"}
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
#: Shorter lists of integers are decoded one by one.
_FEW_BYTES = 24


class ExampleError(ValueError):
    """Bytes that are not a ``tf.train.Example``."""


# --------------------------------------------------------------------------- decoding


def decode_example(data: bytes) -> dict[str, Feature]:
    """Return the features of a serialized Example. Raises :class:`ExampleError`."""
    found: dict[str, Feature] = {}
    for number, wire, start, stop in _fields(data, 0, len(data)):
        if (number, wire) == (1, _LENGTH):
            for inner, kind, first, last in _fields(data, start, stop):
                if (inner, kind) == (1, _LENGTH):
                    name, feature = _entry(data, first, last)
                    found[name] = feature
    return found


def _entry(data: bytes, start: int, stop: int) -> tuple[str, Feature]:
    name = ""
    feature: Feature = ("", [])
    for number, wire, first, last in _fields(data, start, stop):
        if (number, wire) == (1, _LENGTH):
            try:
                name = data[first:last].decode()
            except UnicodeDecodeError as error:
                raise ExampleError(f"a feature's name is not UTF-8 ({data[first:last]!r:.60})") from error
        elif (number, wire) == (2, _LENGTH):
            feature = _feature(data, first, last)
    return name, feature


def _feature(data: bytes, start: int, stop: int) -> Feature:
    found: Feature = ("", [])
    for number, wire, first, last in _fields(data, start, stop):
        if number in _KINDS and wire == _LENGTH:
            kind = _KINDS[number]
            values = _VALUES[kind](data, first, last)
            # A message may come in several parts, which belong together.
            found = (kind, [*found[1], *values] if found[0] == kind else values)
    return found


def _bytes_values(data: bytes, start: int, stop: int) -> Any:
    return [
        data[first:last]
        for number, wire, first, last in _fields(data, start, stop)
        if (number, wire) == (1, _LENGTH)
    ]


def _float_values(data: bytes, start: int, stop: int) -> Any:
    parts = []
    for number, wire, first, last in _fields(data, start, stop):
        if number == 1 and wire in (_LENGTH, _FIXED32):
            if (last - first) % 4:
                raise ExampleError("a list of floats has a length that is not a multiple of 4 bytes")
            parts.append(np.frombuffer(data, "<f4", (last - first) // 4, first))
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else []


def _int_values(data: bytes, start: int, stop: int) -> Any:
    values: list[int] = []
    for number, wire, first, last in _fields(data, start, stop):
        if number == 1 and wire in (_LENGTH, _VARINT):
            packed = data[first:last]
            if len(packed) > _FEW_BYTES:
                values.extend(_many_varints(packed).tolist())
            else:
                values.extend(_few_varints(packed))
    return values


_VALUES: Mapping[str, Any] = {"bytes": _bytes_values, "float": _float_values, "int": _int_values}


def _few_varints(packed: bytes) -> Iterator[int]:
    place = 0
    while place < len(packed):
        value, place = _varint(packed, place, len(packed))
        yield value - (1 << 64) if value >> 63 else value


def _many_varints(packed: bytes) -> Any:
    given = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(given < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if len(ends) == 0 or ends[-1] != len(given) - 1 or lengths.max() > 10:
        raise ExampleError("a list of integers ends within one of them")
    shifts = 7 * (np.arange(len(given)) - np.repeat(starts, lengths))
    parts = (given & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    return np.bitwise_or.reduceat(parts, starts).astype(np.int64)


def _fields(data: bytes, place: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (number, wire type, start, stop of the content) of each field of a message."""
    while place < stop:
        tag, place = _varint(data, place, stop)
        wire = tag & 7
        start = place
        if wire == _LENGTH:
            length, start = _varint(data, place, stop)
            place = start + length
        elif wire == _VARINT:
            _, place = _varint(data, place, stop)
        elif wire in (_FIXED32, _FIXED64):
            place += 4 if wire == _FIXED32 else 8
        else:
            raise ExampleError(f"a field has the unknown wire type {wire}")
        if place > stop:
            raise ExampleError("a field is longer than the message that it is in")
        yield tag >> 3, wire, start, place


def _varint(data: bytes, place: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while place < stop and shift < 70:
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, place
        shift += 7
    raise ExampleError("a number is cut off, or longer than 64 bits")


# --------------------------------------------------------------------------- encoding


def encode_example(features: Mapping[str, Feature]) -> bytes:
    """Return a serialized Example."""
    entries = []
    for name, (kind, values) in features.items():
        entry = _part(1, name.encode()) + _part(2, _ENCODERS[kind](values))
        entries.append(_part(1, entry))
    return _part(1, b"".join(entries))


def _part(number: int, content: bytes) -> bytes:
    return _as_varint(number << 3 | _LENGTH) + _as_varint(len(content)) + content


def _encoded_bytes(values: Iterable[bytes]) -> bytes:
    return _part(1, b"".join(_part(1, value) for value in values))


def _encoded_floats(values: Any) -> bytes:
    packed = np.asarray(values, "<f4").tobytes()
    return _part(2, _part(1, packed) if packed else b"")


def _encoded_ints(values: Iterable[int]) -> bytes:
    packed = b"".join(_as_varint(int(value) & 0xFFFFFFFFFFFFFFFF) for value in values)
    return _part(3, _part(1, packed) if packed else b"")


_ENCODERS: Mapping[str, Any] = {
    "bytes": _encoded_bytes,
    "float": _encoded_floats,
    "int": _encoded_ints,
    "": lambda values: b"",
}


#: TensorFlow's numbers of the types of a TensorProto.
_TENSOR_TYPES = {
    "float32": 1, "float64": 2, "int32": 3, "uint8": 4, "int16": 5, "int8": 6, "int64": 9, "bool": 10, "uint16": 17,
    "float16": 19, "uint32": 22, "uint64": 23,
}  # fmt: skip


def encode_tensor(array: Any) -> bytes:
    """Return an array as a serialized TensorProto, which ``tf.io.parse_tensor`` reads."""
    array = np.ascontiguousarray(array)
    sizes = b"".join(_part(2, _as_varint(1 << 3 | _VARINT) + _as_varint(size)) for size in array.shape)
    kind = _as_varint(1 << 3 | _VARINT) + _as_varint(_TENSOR_TYPES[array.dtype.name])
    content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    return kind + _part(2, sizes) + _part(4, content)


def _as_varint(value: int) -> bytes:
    if value < 0x80:
        return struct.pack("B", value)
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
