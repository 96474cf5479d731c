"""Shared-memory segments, in which a rank's state is staged at memory speed, in its final form.

A segment is a file in a directory under ``/dev/shm``, mapped into the rank. A save fills it and puts a symbolic link
to it into the staged directory; the uploader reads it through the link, also after the rank's death, and removes
the staged directory when the file is in storage. From then on the segment is free, and the next save fills it
again: its pages are mapped already, so the copy runs at memory speed.

The link itself shows whether a segment is free, through a descriptor that follows it when the staged directory is
renamed: a link count of 0 means that it was removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: A second segment is made ahead of need only where this many times its size is free.
_PLENTY = 4
#: Bytes of a segment made ahead that are touched before looking whether it is still wanted.
_TOUCHED_AT_ONCE = 64 * 2**20


class SharedMemorySegment:
    """One file in shared memory, mapped and locked by this process. Its pages are allocated from the start."""

    def __init__(self, path: str, descriptor: int, size: int) -> None:
        self.path = path
        self.size = size
        self.map = mmap.mmap(descriptor, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        #: The layout of its header; maintained by the code that fills it.
        self.layout: object = None
        #: Views of each tensor's place in the mapping; maintained by the code that fills it.
        self.views: list[Any] = []
        self._descriptor = descriptor
        self._link = -1
        #: True when CUDA has pinned it; ``None`` before the attempt.
        self._pinned: bool | None = None

    @classmethod
    def create(cls, path: str, size: int) -> SharedMemorySegment:
        """Return a new segment of ``size`` bytes; raises ``OSError`` (ENOSPC) where the memory cannot be had."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Memory that is only promised would kill the process when it is touched; this fails instead.
            os.posix_fallocate(descriptor, 0, size)
            return cls(path, descriptor, size)
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
            return cls(path, descriptor, os.fstat(descriptor).st_size)
        except (OSError, ValueError):  # locked by a live process, or empty because its maker died at once
            os.close(descriptor)
            return None

    def touch(self, stop: threading.Event) -> None:
        """Map every page until ``stop`` is set, so that filling it later causes no page fault. Other threads run
        meanwhile."""
        for start in range(0, self.size, _TOUCHED_AT_ONCE):
            if stop.is_set():
                return
            ctypes.memset(self.address + start, 0, min(_TOUCHED_AT_ONCE, self.size - start))

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
        """Make it memory that a GPU can write to by itself; once is enough. False where CUDA refuses."""
        if self._pinned is None:
            self._pinned = int(_cuda_runtime().cudaHostRegister(self.address, self.size, 0)) == 0
            if not self._pinned:
                _forget_cuda_error()
        return self._pinned

    def close(self, *, remove: bool) -> None:
        """Give up the mapping and the lock; with ``remove`` the file as well."""
        if self._pinned:
            _cuda_runtime().cudaHostUnregister(self.address)
            self._pinned = None
        self.views.clear()
        self._drop_link()
        if remove:
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                pass  # swept already
        os.close(self._descriptor)

    def _drop_link(self) -> None:
        if self._link >= 0:
            os.close(self._link)
            self._link = -1


def _cuda_runtime() -> Any:
    import torch

    cuda: Any = torch.cuda
    return cuda.cudart()


def _forget_cuda_error() -> None:
    """Clear CUDA's last error, which the next call would report as the user's own."""
    import torch

    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


class Segments:
    """The segments of one rank in ``directory``. Not for several threads."""

    def __init__(self, directory: str, owner: str, staging: str = "") -> None:
        """``owner`` begins the names of this rank's files. ``staging`` is the directory below which links to them
        can lie; with it, segments that dead processes of this rank left are used again."""
        self._directory, self._owner, self._staging = directory, owner, staging
        self._all: list[SharedMemorySegment] = []
        self._ahead: threading.Thread | None = None
        self._closing = threading.Event()
        self._process = os.getpid()

    def take(self, size: int) -> SharedMemorySegment:
        """Return a free segment of ``size`` bytes. Raises ``OSError`` (ENOSPC) where shared memory has no room for one.

        It is free until :meth:`SharedMemorySegment.link_at` is called on it.
        """
        if (found := self._free(size)) is not None:
            return found
        if self._ahead is not None:
            self._ahead.join()
            self._ahead = None
            if (found := self._free(size)) is not None:
                return found
        self._forget_other_sizes(size)
        self._adopt_abandoned()
        if (found := self._free(size)) is not None:
            return found
        self._require_room(size)
        self._all.append(SharedMemorySegment.create(self._new_path(), size))
        return self._all[-1]

    def make_one_ahead(self, size: int) -> None:
        """Begin to make a second segment of ``size`` where there is plenty of memory.

        The next save then need not wait, although the uploader still reads this one.
        """
        of_size = [segment for segment in self._all if segment.size == size]
        if self._ahead is not None or len(of_size) != 1 or room(self._directory) < _PLENTY * size:
            return
        self._ahead = threading.Thread(
            target=self._make_spare, args=(self._new_path(), size), name="powertrain-segment", daemon=True
        )
        self._ahead.start()

    def close(self) -> None:
        """Release all segments. Those that a staged directory still needs stay on disk."""
        if self._process != os.getpid():
            return  # a forked child has copies of the objects; the segments are its parent's
        self._closing.set()
        if self._ahead is not None:
            self._ahead.join()
        while self._all:
            segment = self._all.pop()
            segment.close(remove=not segment.busy)

    def _free(self, size: int) -> SharedMemorySegment | None:
        return next((one for one in self._all if one.size == size and not one.busy), None)

    def _forget_other_sizes(self, size: int) -> None:
        """Remove free segments of other sizes, to make room after a change of the state's structure."""
        for segment in [one for one in self._all if one.size != size and not one.busy]:
            self._all.remove(segment)
            segment.close(remove=True)

    def _adopt_abandoned(self) -> None:
        """Take over segments of this rank's dead processes that no staged directory needs any more."""
        if not self._staging:
            return
        mine = {segment.path for segment in self._all}
        needed: set[str] | None = None
        for path in sorted(Path(self._directory).glob(f"{self._owner}-*")):
            if str(path) in mine or (segment := SharedMemorySegment.adopt(str(path))) is None:
                continue
            # Looked at after the lock was got: its dead owner makes no more links.
            needed = set(_link_targets(self._staging)) if needed is None else needed
            if str(path) in needed:
                segment.close(remove=False)
            else:
                self._all.append(segment)

    def _require_room(self, size: int) -> None:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        free = room(self._directory)
        if free < size:
            raise OSError(
                errno.ENOSPC,
                f"{size / 2**20:,.0f} MiB of shared memory are needed and {free / 2**20:,.0f} MiB are free",
                self._directory,
            )

    def _make_spare(self, path: str, size: int) -> None:
        try:
            spare = SharedMemorySegment.create(path, size)
        except OSError:
            return  # another process took the room; the next save handles it
        spare.touch(self._closing)
        self._all.append(spare)

    def _new_path(self) -> str:
        return os.path.join(self._directory, f"{self._owner}-{uuid.uuid4().hex[:12]}")


def room(directory: str) -> int:
    """Return the bytes that a new segment in ``directory`` may have: free there, in the machine and in its
    container."""
    place = os.statvfs(directory)
    return max(0, min(place.f_bavail * place.f_frsize, _available_memory(), _container_memory()))


def _available_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().available)


def _container_memory(group: str = "/sys/fs/cgroup") -> int:
    """Return the free memory under the container's limit; its page cache can be dropped and counts as free."""
    try:
        limit = Path(group, "memory.max").read_text().strip()
        used = int(Path(group, "memory.current").read_text())
        statistics = Path(group, "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return 2**63
    if limit == "max":
        return 2**63
    cached = sum(
        int(line.split()[1]) for line in statistics if line.startswith(("inactive_file ", "active_file "))
    )
    return int(limit) - used + cached


def _link_targets(directory: str) -> Iterator[str]:
    """Yield the target of each symbolic link below ``directory``."""
    for parent, directories, files in os.walk(directory):
        for name in (*files, *directories):
            path = os.path.join(parent, name)
            try:
                if os.path.islink(path):
                    yield os.readlink(path)
            except OSError:
                continue  # removed meanwhile
