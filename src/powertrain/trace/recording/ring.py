"""The ring buffer of records in shared memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from mmap import mmap
from typing import Union

from powertrain.trace.recording.phases import RECORD_SIZE, StepRecord, pack_into

#: The buffer of records: memory, or a mapped file that outlives the process.
Buffer = Union[bytearray, mmap, memoryview]

_MAGIC = b"PTSTEPS1"
_HEADER = struct.Struct("<8sIIQ")
HEADER_SIZE = _HEADER.size
_COUNT_AT = 16
#: Default number of steps of a ring: 1.6 MB, and more than a side thread may lag.
RECORDS = 16_384


def ring_size(records: int = RECORDS) -> int:
    """Return the size in bytes of a buffer for the newest ``records`` steps."""
    return HEADER_SIZE + records * RECORD_SIZE


def read_ring(buffer: Buffer | bytes, after: int = 0) -> tuple[int, bytes]:
    """Return the number of the first complete record from ``after`` on, and the bytes of all of them.

    The first is later than ``after`` if older ones were overwritten. May be called at any time, in any process and
    after the writer was killed: the count is written after its record, and the one slot that may be half written is
    omitted. Raises ``ValueError`` for a buffer that is not a ring.
    """
    view = memoryview(buffer)
    magic, size, capacity, _ = _HEADER.unpack_from(view)
    if magic != _MAGIC or size != RECORD_SIZE or len(view) < ring_size(capacity) or capacity < 2:
        raise ValueError(
            f"These {len(view)} bytes are not a step ring with records of {RECORD_SIZE} bytes: they begin with "
            f"{magic!r} and speak of {capacity} records of {size} bytes. They were written by another version, or "
            "are something else."
        )
    count = view[_COUNT_AT:HEADER_SIZE].cast("Q")
    written = count[0]
    first = max(after, written - capacity + 1, 0)
    records = b"".join(_slots(view, capacity, first, written))
    # The writer may have overwritten the oldest records during the copy.
    whole_from = max(first, count[0] - capacity + 1)
    return min(whole_from, max(first, written)), records[(whole_from - first) * RECORD_SIZE :]


def _slots(view: memoryview, capacity: int, first: int, end: int) -> Iterator[bytes]:
    """Return the bytes of records ``first`` to ``end``, in at most two pieces."""
    while first < end:
        slot = first % capacity
        length = min(end - first, capacity - slot)
        begin = HEADER_SIZE + slot * RECORD_SIZE
        yield bytes(view[begin : begin + length * RECORD_SIZE])
        first += length


class Ring:
    """The writer of a ring. One thread writes."""

    __slots__ = ("_count", "buffer", "capacity", "written")

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = memoryview(buffer)
        self.capacity = (len(self.buffer) - HEADER_SIZE) // RECORD_SIZE
        if self.capacity < 2:
            raise ValueError(
                f"A ring of {len(self.buffer)} bytes cannot hold two steps, which take {ring_size(2)}. Make the "
                "buffer with ring_size(records)."
            )
        self.written = 0
        _HEADER.pack_into(self.buffer, 0, _MAGIC, RECORD_SIZE, self.capacity, 0)
        # A cast view stores eight bytes at once, while struct stores byte by byte: a reader in another process must not
        # see a partial number.
        self._count = self.buffer[_COUNT_AT:HEADER_SIZE].cast("Q")

    def append(self, record: StepRecord) -> None:
        pack_into(self.buffer, HEADER_SIZE + (self.written % self.capacity) * RECORD_SIZE, record)
        self.written += 1
        self._count[0] = self.written

    def slot(self, number: int) -> memoryview | None:
        """Return the bytes of a record that will not be overwritten soon; None for any other."""
        if not self.written - self.capacity // 2 <= number < self.written:
            return None
        begin = HEADER_SIZE + (number % self.capacity) * RECORD_SIZE
        return self.buffer[begin : begin + RECORD_SIZE]
