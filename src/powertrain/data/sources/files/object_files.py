"""Objects of a store as files that are read in pieces."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from powertrain.storage.addresses import Address, parse
from powertrain.storage.objects import ObjectStorage

#: Smallest read: the next read will be close by.
_READ_AHEAD = 1 << 20


class _OneObject(ObjectStorage):
    """The bytes of one object. Retries as its storage does."""

    def __init__(self, address: Address) -> None:
        directory, _, self._key = address.prefix.rpartition("/")
        super().__init__(replace(address, prefix=directory))

    def size(self) -> int | None:
        """Return its size in bytes; None where the object does not exist."""
        import obstore

        name = self._name(self._key)
        try:
            return int(self._persist(lambda client: obstore.head(client, name), key=self._key)["size"])
        except FileNotFoundError:
            return None

    def ranges(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range, end excluded. Near ranges are fetched in one request."""
        import obstore

        name = self._name(self._key)
        starts, ends = [start for start, _ in wanted], [end for _, end in wanted]
        found = self._persist(
            lambda client: obstore.get_ranges(client, name, starts=starts, ends=ends), key=self._key
        )
        return [bytes(each) for each in found]


def objects_at(uri: str) -> _OneObject:
    """Return the object at an address. Connects on first use."""
    return _OneObject(parse(uri))


def list_objects(address: Address) -> list[tuple[str, str, int]]:
    """Return (address, name below ``address``, size) of every object below it."""
    entries = [entry for entry in ObjectStorage(address).list() if entry.key]
    directories = {directory for key, _ in entries for directory in _directories_above(key)}
    # Some tools put an empty object in place of a directory.
    return [(address.child(key).uri, key, size) for key, size in entries if size or key not in directories]


def _directories_above(key: str) -> list[str]:
    parts = key.split("/")
    return ["/".join(parts[:length]) for length in range(1, len(parts))]


def open_object(uri: str, size: int) -> io.RawIOBase:
    """Return an object of known size, open for random access."""
    return _ObjectFile(uri, size)


class _ObjectFile(io.RawIOBase):
    """Fetches pieces when they are read, and keeps the newest."""

    def __init__(self, uri: str, size: int) -> None:
        super().__init__()
        self._object, self._size = objects_at(uri), size
        self._place = 0
        #: Cached pieces, those prefetched and the newest read: the offset of each, and its bytes.
        self._fetched: list[tuple[int, bytes]] = []
        self._newest: tuple[int, bytes] = (0, b"")

    def fetch(self, wanted: Sequence[tuple[int, int]]) -> None:
        """Fetch these pieces now, together; they are kept until the next prefetch."""
        pieces = [(start, min(end, self._size)) for start, end in wanted if start < min(end, self._size)]
        fetched = self._object.ranges(pieces) if pieces else []
        self._fetched = [(start, data) for (start, _), data in zip(pieces, fetched, strict=True)]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = base + offset
        return self._place

    def size(self) -> int:
        return self._size

    def read(self, length: int | None = -1) -> bytes:
        stop = self._size if length is None or length < 0 else min(self._place + length, self._size)
        if self._place >= stop:
            return b""
        data = self._piece(self._place, stop)
        self._place = stop
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _piece(self, start: int, stop: int) -> bytes:
        for first, data in (*self._fetched, self._newest):
            if first <= start and stop <= first + len(data):
                return data[start - first : stop - first]
        ahead = min(max(stop, start + _READ_AHEAD), self._size)
        data = self._object.ranges([(start, ahead)])[0]
        if ahead > stop:
            self._newest = (start, data)
        return data[: stop - start]
