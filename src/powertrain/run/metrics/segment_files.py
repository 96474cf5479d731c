"""A stored metric segment as a file with random access, on any storage."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

from powertrain.storage import Storage
from powertrain.storage.addresses import OBJECT_STORES, parse
from powertrain.storage.files.descriptors import open_below


class SegmentFile:
    """One open segment. ``raw`` is its Python file; ``size`` is its number of bytes."""

    def __init__(self, raw: Any, size: int) -> None:
        self.raw, self.size = raw, size
        self._descriptor: int | None = raw.fileno() if isinstance(raw, io.FileIO) else None
        self._content = raw.getbuffer() if isinstance(raw, io.BytesIO) else None

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._content is not None:
            self._content.release()

    def fetch(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Request these ranges (first byte, byte after the last) together, if storage is remote."""
        fetch = getattr(self.raw, "fetch", None)
        if fetch is not None:
            fetch(ranges)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer`` from ``offset`` on; return the number of bytes read.

        Any thread, except for objects that are fetched in pieces.
        """
        filled = 0
        if self._content is not None:
            found = self._content[offset : offset + len(buffer)]
            buffer[: len(found)] = found
            return len(found)
        if self._descriptor is None:
            self.raw.seek(offset)
            while filled < len(buffer) and (count := self.raw.readinto(buffer[filled:])):
                filled += count
            return filled
        while filled < len(buffer) and (
            count := os.preadv(self._descriptor, [buffer[filled:]], offset + filled)
        ):
            filled += count
        return filled

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` up to ``end`` (exclusive); fewer if the file is shorter."""
        found = bytearray(max(0, end - start))
        return bytes(found[: self.read_into(memoryview(found), start)])


@contextlib.contextmanager
def open_segment(storage: Storage, key: str, size: int, whole: bool = False) -> Iterator[SegmentFile]:
    """Open the value under ``key`` for random access.

    Args:
        storage: The run's storage.
        key: The key of the segment.
        size: Its bytes, as listed.
        whole: True if all of it will be read. Otherwise only the ranges read are fetched, if storage supports it.

    Raises:
        FileNotFoundError: The key is gone.
        OSError: It cannot be read, or something other than a regular file is in its place.
    """
    path = storage.local_path(key)
    try:
        raw: Any
        if path is not None:
            raw = io.FileIO(open_below(path, len(key.split("/"))))
        elif not whole and storage.uri.partition("://")[0] in OBJECT_STORES and _has_own_address(storage):
            from powertrain.data.sources.files.object_files import open_object

            raw = open_object(parse(storage.uri).child(key).uri, size)
        else:
            raw = io.BytesIO(storage.get(key))
        with raw, SegmentFile(raw, size) as file:
            yield file
    except OSError as error:
        if error.errno == errno.ESTALE:  # a network file that another machine has deleted
            raise FileNotFoundError(errno.ENOENT, "no such key", key) from error
        raise


def _has_own_address(storage: Storage) -> bool:
    """Return False for a storage on a user's file system, whose addresses may mean anything."""
    return getattr(storage, "filesystem", None) is None
