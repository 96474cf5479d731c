"""Wait for changes in a directory that may come and go, without polling.

inotify reports files that are made, changed or removed, and those whose last writer has closed them, which also reveals
the exit of a process that had one open. Where inotify is missing or exhausted, :attr:`DirectoryWatch.problem` holds the
reason, and the caller has to poll.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import select
import struct
import sys
import time
from pathlib import Path
from typing import Any

from powertrain.engine.local import locks

_MODIFY, _CLOSE_WRITE, _MOVED, _CREATE, _DELETE = 0x2, 0x8, 0xC0, 0x100, 0x200
_ONLYDIR = 0x01000000
#: Watch, mask, cookie and the length of the name that follows.
_EVENT = struct.Struct("iIII")
_READ = 1 << 16


class DirectoryWatch:
    """Watches ``directory`` and its entry in the parent directory. One thread waits; any may wake it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        #: The reason why changes are not reported; "" when they are.
        self.problem = ""
        self._above = self._inside = -1
        self._poll = select.poll()
        self._wake_read, self._wake_write = locks.unshared_pipe()
        self._poll.register(self._wake_read, select.POLLIN)
        self._inotify = -1
        try:
            self._inotify = locks.unshared(_open_inotify)
            self._poll.register(self._inotify, select.POLLIN)
        except OSError as error:
            self.problem = str(error.strerror)

    def arm(self) -> None:
        """Start reporting. To be called before each poll: the directory may have been replaced."""
        if self._inotify < 0:
            return
        try:
            self._above = _watch(self._inotify, self._directory.parent, _CREATE | _MOVED)
            try:
                self._inside = _watch(
                    self._inotify, self._directory, _CREATE | _DELETE | _MOVED | _MODIFY | _CLOSE_WRITE
                )
            except FileNotFoundError:
                self._inside = -1  # its creation will be reported
            self.problem = ""
        except OSError as error:
            self.problem = str(error.strerror)

    def wait(self, seconds: float) -> set[str]:
        """Return when something has changed since :meth:`arm`, or on :meth:`wake`, or at the timeout.

        Returns the names of the files whose last writer has closed them. The writer's lock may remain for a moment: the
        kernel releases it after the event.
        """
        closed: set[str] = set()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            ready = {descriptor for descriptor, _ in self._poll.poll(left * 1000)}
            if self._wake_read in ready:
                os.read(self._wake_read, _READ)
                return closed
            if self._inotify in ready and self._read_events(closed):
                return closed
        return closed

    def wake(self) -> None:
        """End a :meth:`wait` of now, or the next one."""
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            pass  # it has been woken often enough

    def close(self) -> None:
        for descriptor in (self._inotify, self._wake_read, self._wake_write):
            if descriptor >= 0:
                locks.close(descriptor)

    def _read_events(self, closed: set[str]) -> bool:
        """Read the pending events; return False when all were about other entries of the parent directory."""
        concerned = False
        data, at = os.read(self._inotify, _READ), 0
        while at < len(data):
            watch, mask, _, length = _EVENT.unpack_from(data, at)
            name = os.fsdecode(data[at + _EVENT.size : at + _EVENT.size + length].rstrip(b"\0"))
            at += _EVENT.size + length
            concerned |= watch != self._above or name == self._directory.name
            if watch == self._inside and mask & _CLOSE_WRITE:
                closed.add(name)
        return concerned


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _open_inotify() -> int:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"{sys.platform} has no inotify")
    return _checked(_libc().inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))


def _watch(inotify: int, directory: Path, mask: int) -> int:
    """Watch a directory, which may be watched already."""
    return _checked(_libc().inotify_add_watch(inotify, os.fsencode(directory), mask | _ONLYDIR))


def _checked(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer
