"""A mark of a rank's newest row that survives its death.

``report`` puts a message on a queue; a rank that is killed at once may never send it. The row it reached is also
written to a mapped file, which costs a memory write and stays with the system when the process is gone. So a
controller that sees a rank die knows which reports had returned.
"""

from __future__ import annotations

import mmap
import os
import struct

_ROW = struct.Struct("<q")


class RowMark:
    """The writing end. ``path`` is made anew; "" keeps no mark."""

    def __init__(self, path: str) -> None:
        self._map: mmap.mmap | None = None
        if path:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb+") as file:
                file.write(_ROW.pack(0))
                file.flush()
                self._map = mmap.mmap(file.fileno(), _ROW.size)

    def set(self, row: int) -> None:
        """Mark ``row``, whose report is about to return."""
        if self._map is not None:
            _ROW.pack_into(self._map, 0, row)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


def marked_row(path: str) -> int:
    """Return the newest row whose report had returned; 0 where there is no mark."""
    try:
        with open(path, "rb") as file:
            row: int = _ROW.unpack(file.read(_ROW.size))[0]
            return row
    except (OSError, struct.error):
        return 0
