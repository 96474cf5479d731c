"""Wake a thread that waits in ``poll``."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """A descriptor that any thread can make readable."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        # A closed descriptor's number may soon be reused: nothing writes to it after that.
        self._open = threading.Lock()
        self._closed = False
        #: True from ``set`` to ``clear``: the clearing thread then checks everything that it was set for.
        self._is_set = False

    def fileno(self) -> int:
        return self._read

    def set(self) -> None:
        if self._is_set:
            return
        self._is_set = True
        with self._open:
            if not self._closed:
                try:
                    os.write(self._write, b"x")
                except BlockingIOError:
                    pass  # full: it is readable already

    def clear(self) -> None:
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            pass
        # Not before: a byte written in between would be read, and no other would follow.
        self._is_set = False

    def close(self) -> None:
        with self._open:
            if not self._closed:
                self._closed = True
                os.close(self._read)
                os.close(self._write)
