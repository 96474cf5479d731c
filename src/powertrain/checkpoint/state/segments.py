"""Shared-memory segments, in which a rank's state is staged at memory speed, in its final form.

A segment is a file in a directory under ``/dev/shm``, mapped into the rank. A save fills it and puts a symbolic link
to it into the staged directory; the uploader reads it through the link, also after the rank's death, and removes
the staged directory when the file is in storage. From then on the segment is free, and the next save fills it
again: its pages are mapped already, so the copy runs at memory speed.

The link itself shows whether a segment is free, through a descriptor that follows it when the staged directory is
renamed: a link count of 0 means that it was removed.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

from powertrain.checkpoint.state.ahead import SegmentAhead
from powertrain.checkpoint.state.shared_memory import SharedMemorySegment

#: A second segment is made ahead of need only where this many times its size is free; the first one, which a save needs
#: in any case, where this many times.
_PLENTY, _ENOUGH = 4, 2
#: A segment for a state of unknown layout can grow to this many times its expected size: that of a model, to which the
#: state of its optimizer is added.
_GROWTH = 4
#: A dead process's segment is made ready where its size is within these multiples of the expected one.
_FITTING = (0.9, _GROWTH)


class Segments:
    """The segments of one rank in ``directory``. Not for several threads."""

    def __init__(self, directory: str, owner: str, staging: str = "") -> None:
        """``owner`` begins the names of this rank's files. ``staging`` is the directory below which links to them
        can lie; with it, segments that dead processes of this rank left are used again."""
        self._directory, self._owner, self._staging = directory, owner, staging
        self._all: list[SharedMemorySegment] = []
        self._ahead: SegmentAhead | None = None
        #: True once a state was saved.
        self._is_used = False
        self._process = os.getpid()

    def take(self, size: int) -> SharedMemorySegment:
        """Return a free segment of ``size`` bytes. Raises ``OSError`` (ENOSPC) where shared memory has no room for one.

        It is free until :meth:`SharedMemorySegment.link_at` is called on it.
        """
        self._is_used = True
        found = self._free(size)
        if found is None or found.ready < size:
            found = self._take_ahead(size) or found
        if found is not None:
            return found
        self._forget_other_sizes(size)
        self._adopt_abandoned()
        if (found := self._free(size)) is not None:
            return found
        self._require_room(size)
        self._all.append(SharedMemorySegment.create(self._new_path(), size))
        return self._all[-1]

    def expect(self, size: int, gpu: int | None) -> None:
        """Begin to make a first segment ready for a state of about ``size`` bytes, which ``gpu`` copies to it.

        A later call with a larger size continues it. Does nothing where memory is short, or a state was saved already.
        """
        if self._is_used:
            return
        if self._ahead is None:
            self._adopt_abandoned()
            self._begin_first(size, gpu)
        elif self._has_room(_ENOUGH * (size - self._ahead.size)):
            self._ahead.expect(size)

    def make_one_ahead(self, size: int, gpu: int | None = None) -> None:
        """Begin to make a second segment of ``size`` where there is plenty of memory.

        The next save then need not wait, although the uploader still reads this one.
        """
        of_size = [segment for segment in self._all if segment.size == size]
        if self._ahead is not None or len(of_size) != 1 or not self._has_room(_PLENTY * size):
            return
        try:
            segment = SharedMemorySegment.create(self._new_path(), 0, reserve=size)
        except OSError:
            return  # another process took the room; the next save handles it
        self._begin_ahead(segment, size, gpu)

    def wait_for_ahead(self) -> None:
        """Wait until the segment that is being made ahead is ready."""
        if self._ahead is not None:
            self._ahead.wait()

    def close(self) -> None:
        """Release all segments. Those that a staged directory still needs stay on disk."""
        if self._process != os.getpid():
            return  # a forked child has copies of the objects; the segments are its parent's
        if self._ahead is not None:
            self._ahead.take().close(remove=True)
            self._ahead = None
        while self._all:
            segment = self._all.pop()
            segment.close(remove=not segment.busy)

    def _begin_first(self, size: int, gpu: int | None) -> None:
        """Take the smallest fitting segment of a dead process, whose state is this one's, else a new one."""
        low, high = _FITTING[0] * size, _FITTING[1] * size
        fitting = [one for one in self._all if low <= one.size <= high and not one.busy]
        if fitting:
            adopted = min(fitting, key=lambda one: one.size)
            self._all.remove(adopted)
            self._begin_ahead(adopted, adopted.size, gpu)
        elif self._has_room(_ENOUGH * size):
            try:
                segment = SharedMemorySegment.create(self._new_path(), 0, reserve=_GROWTH * size)
            except OSError:
                return  # the save sees to it
            self._begin_ahead(segment, size, gpu)

    def _begin_ahead(self, segment: SharedMemorySegment, size: int, gpu: int | None) -> None:
        self._ahead = SegmentAhead(segment, gpu)
        self._ahead.expect(size)

    def _take_ahead(self, size: int) -> SharedMemorySegment | None:
        """Return the segment that was made ahead, with this size; None where it cannot have it."""
        if self._ahead is None:
            return None
        segment, self._ahead = self._ahead.take(), None
        try:
            if segment.capacity >= size and self._has_room(size - segment.size):
                segment.resize(size)
                self._forget_other_sizes(size)
                self._all.append(segment)
                return segment
        except OSError:
            pass  # no room is left: the caller raises what is missing
        segment.close(remove=True)
        return None

    def _has_room(self, size: int) -> bool:
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        return room(self._directory) >= size

    def _free(self, size: int) -> SharedMemorySegment | None:
        fitting = [one for one in self._all if one.size == size and not one.busy]
        return max(fitting, key=lambda one: one.ready, default=None)

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
