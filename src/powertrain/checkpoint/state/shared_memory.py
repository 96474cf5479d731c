"""One file in shared memory, mapped into this process, whose pages are allocated, mapped and pinned in pieces.

CUDA stops the launching of kernels while it pins memory, for 0.2 s with 4 GiB. In pieces a training loop beside it
does not notice; but a copy must then not cross from one piece into the next (:attr:`SharedMemorySegment.cuts`).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from functools import cache
from typing import Any

#: Bytes that are allocated, mapped and pinned at once.
PIECE = 64 * 2**20
#: Bytes of the unit in which the system counts a file's pages.
_BLOCK = 512
#: Linux's advice to map pages for writing, since 5.14.
_POPULATE_WRITE = 23


class SharedMemorySegment:
    """A file that this process has mapped and locked. All its pages are allocated; the first ``ready`` bytes are
    mapped, too, and pinned where that was asked for."""

    def __init__(self, path: str, descriptor: int, size: int, reserve: int = 0) -> None:
        """``reserve`` is the size up to which it can grow; the file has at least that size while this runs."""
        self.path = path
        self.size = size
        self.map = mmap.mmap(descriptor, max(size, reserve))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        #: The layout of its header; maintained by the code that fills it.
        self.layout: object = None
        #: Views of each tensor's place in the mapping; maintained by the code that fills it.
        self.views: list[Any] = []
        self.ready = 0
        self._descriptor = descriptor
        self._link = -1
        #: The pinned pieces, from each one's start to its end; and whether CUDA has refused one.
        self._pinned: list[tuple[int, int]] = []
        self._is_refused = False

    @classmethod
    def create(cls, path: str, size: int, reserve: int = 0) -> SharedMemorySegment:
        """Return a new segment of ``size`` bytes that can grow up to ``reserve``.

        Raises:
            OSError: The memory cannot be had (ENOSPC).
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Memory that is only promised would kill the process when it is touched; this fails instead.
            if size:
                os.posix_fallocate(descriptor, 0, size)
            if reserve <= size:
                return cls(path, descriptor, size)
            os.ftruncate(descriptor, reserve)
            segment = cls(path, descriptor, size, reserve)
            os.ftruncate(descriptor, size)
            return segment
        except BaseException:
            os.close(descriptor)
            os.unlink(path)
            raise

    @classmethod
    def adopt(cls, path: str) -> SharedMemorySegment | None:
        """Return the segment of a process that has died; ``None`` while its process lives."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            if found.st_blocks * _BLOCK < found.st_size:
                raise ValueError(
                    "its maker died before it had allocated all pages: writing to it could end this process"
                )
            return cls(path, descriptor, found.st_size)
        except (OSError, ValueError):  # also locked by a live process, or empty
            os.close(descriptor)
            return None

    @property
    def capacity(self) -> int:
        """The size up to which it can grow."""
        return len(self.map)

    @property
    def cuts(self) -> list[int]:
        """The addresses at which a pinned piece begins or ends, ascending."""
        return sorted({self.address + edge for piece in self._pinned for edge in piece})

    def make_ready(self, until: int, *, pinned: bool) -> None:
        """Allocate, map and perhaps pin the next piece before ``until``; its content may be lost. Other threads run
        meanwhile.

        Raises:
            OSError: The memory cannot be had (ENOSPC).
        """
        start, stop = self.ready, min(self.ready + PIECE, until, self.capacity)
        self.layout = None
        if stop > self.size:
            os.posix_fallocate(self._descriptor, self.size, stop - self.size)
            self.size = stop
        _map_pages(self.address + start, stop - start)
        if pinned:
            self._pin_between(start, stop)
        self.ready = stop

    def resize(self, size: int) -> None:
        """Give the file this size, at most :attr:`capacity`. It must not be busy.

        Raises:
            OSError: The memory cannot be had (ENOSPC).
        """
        if size > self.size:
            os.posix_fallocate(self._descriptor, self.size, size - self.size)
        elif size < self.size:
            os.ftruncate(self._descriptor, size)
            for piece in [one for one in self._pinned if one[0] >= size]:
                self._unpin(piece)
        self.size = size
        self.ready = min(self.ready, size)

    def link_at(self, path: str) -> None:
        """Put a link to it at ``path``; the segment is busy until that link is removed, wherever it was moved."""
        os.symlink(self.path, path)
        self._drop_link()
        self._link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)

    @property
    def busy(self) -> bool:
        """True while a staged directory holds the link to it."""
        if self._link >= 0 and os.fstat(self._link).st_nlink == 0:
            self._drop_link()
        return self._link >= 0

    def pin(self) -> bool:
        """Make all of it memory that a GPU can write to by itself. False where CUDA refuses.

        A refusal in the background is tried again: what caused it may be over.
        """
        self._is_refused = False
        start = max((end for _, end in self._pinned), default=0)
        while start < self.size and not self._is_refused:
            stop = min(start + PIECE, self.size)
            self._pin_between(start, stop)
            start = stop
        return not self._is_refused

    def close(self, *, remove: bool) -> None:
        """Give up the mapping and the lock; with ``remove`` the file as well."""
        for piece in list(self._pinned):
            self._unpin(piece)
        self.views.clear()
        self._drop_link()
        if remove:
            with contextlib.suppress(FileNotFoundError):  # swept already
                os.unlink(self.path)
        os.close(self._descriptor)

    def _pin_between(self, start: int, stop: int) -> None:
        if self._is_refused or stop <= start:
            return
        if int(_cuda_runtime().cudaHostRegister(self.address + start, stop - start, 0)) == 0:
            self._pinned.append((start, stop))
        else:
            self._is_refused = True
            _forget_cuda_error()

    def _unpin(self, piece: tuple[int, int]) -> None:
        self._pinned.remove(piece)
        _cuda_runtime().cudaHostUnregister(self.address + piece[0])

    def _drop_link(self) -> None:
        if self._link >= 0:
            os.close(self._link)
            self._link = -1


def _map_pages(address: int, size: int) -> None:
    """Map pages of this process, so that filling them later causes no page fault; their content may be lost."""
    if size > 0 and _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _POPULATE_WRITE) != 0:
        ctypes.memset(address, 0, size)  # a kernel that does not know the advice


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)


def _cuda_runtime() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.cudart()


def _forget_cuda_error() -> None:
    """Clear CUDA's last error, which the next call would report as the user's own."""
    import torch

    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
