"""The parts of a metric segment that are read separately, each with its hash.

A segment holds Arrow IPC files. A reader needs the schema of a file, and of each batch its head (the positions of the
columns' bytes) and the bytes of the requested columns. Each of these parts has an xxh3-128 in the segment's footer, and
is verified before Arrow sees a byte: damaged bytes may crash Arrow's readers, and in compressed columns they silently
become other numbers.

Columns that were not requested are neither read nor checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import xxhash

from powertrain.storage.sealed import DamagedError

if TYPE_CHECKING:
    import pyarrow as pa

_HASH_BYTES = 16
#: Number of bytes of an Arrow file's magic; the messages follow.
_MAGIC_BYTES = 8
#: Before each message: a mark, and the length of its head.
_PREFIX = struct.Struct("<iI")
_SCHEMA, _RECORD_BATCH = 1, 3
#: Maximum size of a head or a schema; a larger length is invalid.
_LARGEST_HEAD = 1 << 28


class BatchParts(msgspec.Struct, frozen=True, array_like=True):
    """One batch: its head from ``start`` to the first of ``ends``, then each column up to the next end."""

    start: int
    ends: list[int]
    #: Hashes of the head and each column, in order.
    hashes: bytes


class SegmentLayout(msgspec.Struct, frozen=True, array_like=True):
    """The positions of an Arrow file's parts, relative to the file, and their hashes."""

    schema_end: int
    schema_hash: bytes
    batches: list[BatchParts]


class Readable(Protocol):
    """A file with random access."""

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Prepare to read these ranges (first byte, byte after the last)."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from ``offset`` on; return the number of bytes read."""


# --------------------------------------------------------------------------- writing


def layout_of(data: memoryview, schema: pa.Schema) -> SegmentLayout:
    """Find and hash the parts of an Arrow IPC file that was just written.

    Args:
        data: The whole file.
        schema: The schema of its batches.
    """
    buffers = [_buffer_count(field.type) for field in schema]
    schema_end, batches = 0, []
    for message in _messages(data):
        if message.kind == _SCHEMA:
            schema_end = message.body
        elif message.kind == _RECORD_BATCH:
            ends = _column_ends(data, message, buffers)
            bounds = [message.start, *ends]
            hashes = b"".join(
                xxhash.xxh3_128_digest(data[first:end]) for first, end in zip(bounds, ends, strict=False)
            )
            batches.append(BatchParts(message.start, ends, hashes))
    return SegmentLayout(schema_end, xxhash.xxh3_128_digest(data[_MAGIC_BYTES:schema_end]), batches)


class _Message(NamedTuple):
    kind: int
    #: Offsets of its prefix, of its body, and of the table of its header.
    start: int
    body: int
    header: int
    body_length: int


def _messages(data: memoryview) -> Iterator[_Message]:
    """Yield the encapsulated messages of an Arrow file up to the end-of-stream mark."""
    start = _MAGIC_BYTES
    while True:
        _, length = _PREFIX.unpack_from(data, start)
        if length == 0:
            return
        flatbuffer = start + _PREFIX.size
        table = flatbuffer + struct.unpack_from("<I", data, flatbuffer)[0]
        kind, header, body = (_field(data, table, number) for number in (1, 2, 3))
        yield _Message(
            kind=data[kind],
            start=start,
            body=flatbuffer + length,
            header=header + struct.unpack_from("<I", data, header)[0],
            body_length=struct.unpack_from("<q", data, body)[0] if body else 0,
        )
        start = flatbuffer + length + (struct.unpack_from("<q", data, body)[0] if body else 0)


def _field(data: memoryview, table: int, number: int) -> int:
    """Return the offset of a field of a flatbuffers table; 0 if it has its default."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, vtable)
    place = 4 + 2 * number
    (offset,) = struct.unpack_from("<H", data, vtable + place) if place < size else (0,)
    return table + offset if offset else 0


def _column_ends(data: memoryview, message: _Message, buffers: Sequence[int]) -> list[int]:
    """Return the end offsets of the head and of each column."""
    vector = _field(data, message.header, 2)
    vector += struct.unpack_from("<I", data, vector)[0]
    ends, first = [], 0
    for count in buffers:  # a column begins where its first buffer does
        (offset,) = struct.unpack_from("<q", data, vector + 4 + 16 * first)
        ends.append(message.body + offset)
        first += count
    return [*ends, message.body + message.body_length] if ends else [message.body + message.body_length]


def _buffer_count(kind: pa.DataType) -> int:
    """Return the number of buffers of a column of this type; raise ``TypeError`` for a type that no segment has."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return 1 + sum(_buffer_count(kind.field(number).type) for number in range(kind.num_fields))
    if pa.types.is_string(kind):
        return 3
    if pa.types.is_primitive(kind):
        return 2
    raise TypeError(f"a column of type {kind} has no place in a segment")


# --------------------------------------------------------------------------- reading


class CheckedFile:
    """An Arrow file whose parts are verified by their hashes before they are decoded."""

    def __init__(self, layout: SegmentLayout, begin: int, end: int) -> None:
        """Open the file from ``begin`` to ``end`` of its segment. Raises :class:`DamagedError` for parts beyond it."""
        self._layout, self._begin = layout, begin
        _check_bounds(layout, end - begin)
        self._schema_bytes = b""
        self._names: list[str] = []

    @property
    def batch_count(self) -> int:
        """The number of its batches."""
        return len(self._layout.batches)

    def schema(self, file: Readable) -> pa.Schema:
        """Read the schema. Raises :class:`DamagedError` if it is damaged."""
        import pyarrow as pa

        size = self._layout.schema_end - _MAGIC_BYTES
        found = memoryview(bytearray(size))
        _read_exactly(file, found, self._begin + _MAGIC_BYTES, "schema")
        if xxhash.xxh3_128_digest(found) != self._layout.schema_hash:
            raise DamagedError("its schema is not as it was written")
        schema = pa.ipc.read_schema(pa.py_buffer(found))
        if any(len(parts.ends) != len(schema) + 1 for parts in self._layout.batches):
            raise DamagedError("its batches have other columns than its schema")
        self._schema_bytes, self._names = bytes(found), list(schema.names)
        return schema

    def batch(
        self, file: Readable, number: int, columns: Sequence[str] | None = None, threads: bool = True
    ) -> pa.RecordBatch:
        """Read one batch with the existing ones of ``columns``, or all columns if none are named.

        Raises :class:`DamagedError` if a part of it is damaged.
        """
        import pyarrow as pa

        if not self._schema_bytes:
            self.schema(file)
        parts, included = self._layout.batches[number], self._included(columns)
        wanted = range(len(self._names)) if included is None else included
        ranges = _joined([(0, *_bounds(parts, 0)), *((i + 1, *_bounds(parts, i + 1)) for i in wanted)])
        file.fetch([(self._begin + first, self._begin + end) for first, end in ranges])
        # Arrow's allocator keeps large blocks; the system's frees them immediately. New pages, as for a bytearray,
        # would cost more than all reading and hashing.
        pool, head = pa.system_memory_pool(), len(self._schema_bytes)
        message = pa.allocate_buffer(head + parts.ends[-1] - parts.start, memory_pool=pool)
        view = memoryview(message).cast("B")
        view[:head] = self._schema_bytes
        view = view[head:]
        for first, end in ranges:
            part = view[first - parts.start : end - parts.start]
            _read_exactly(file, part, self._begin + first, f"batch {number}")
        for part_number in (0, *(i + 1 for i in wanted)):
            _check_part(view, parts, part_number, f"batch {number}", self._names)
        options = pa.ipc.IpcReadOptions(use_threads=threads, included_fields=included)
        with pa.ipc.open_stream(message, options=options, memory_pool=pool) as reader:
            return reader.read_next_batch()

    def _included(self, columns: Sequence[str] | None) -> list[int] | None:
        if columns is None:
            return None
        wanted = {*columns}
        return [number for number, name in enumerate(self._names) if name in wanted]


def _check_bounds(layout: SegmentLayout, size: int) -> None:
    """Raise :class:`DamagedError` unless every part lies in the file, one after the other."""
    before = _MAGIC_BYTES
    bounds = [layout.schema_end]
    for parts in layout.batches:
        if len(parts.hashes) != _HASH_BYTES * len(parts.ends) or not parts.ends:
            raise DamagedError("its footer has another number of hashes than of parts")
        if parts.ends[0] - parts.start > _LARGEST_HEAD:
            raise DamagedError("its footer names a part that is too large")
        bounds += [parts.start, *parts.ends]
    for bound in [*bounds, size]:
        if bound < before:
            raise DamagedError("its footer names parts that lie outside of it")
        before = bound


def _bounds(parts: BatchParts, number: int) -> tuple[int, int]:
    """Return the range of the head (0) or a column (from 1 on): the first byte, and the byte after its last."""
    return (parts.ends[number - 1] if number else parts.start), parts.ends[number]


def _joined(parts: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the parts' ranges, with adjacent ones merged."""
    ranges: list[tuple[int, int]] = []
    for _, first, end in parts:
        if ranges and ranges[-1][1] == first:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((first, end))
    return ranges


def _check_part(view: memoryview, parts: BatchParts, number: int, which: str, names: Sequence[str]) -> None:
    first, end = _bounds(parts, number)
    expected = parts.hashes[_HASH_BYTES * number : _HASH_BYTES * (number + 1)]
    if xxhash.xxh3_128_digest(view[first - parts.start : end - parts.start]) != expected:
        what = f"column {names[number - 1]!r} of {which}" if number else f"the head of {which}"
        raise DamagedError(f"{what} is not as it was written")


def _read_exactly(file: Readable, buffer: memoryview, offset: int, which: str) -> None:
    if file.read_into(buffer, offset) < len(buffer):
        raise DamagedError(f"it ends before the end of its {which}")
