"""Content of a disk after a power cut: only flushed data survives.

Killing a process proves little about durability, because the kernel keeps what the process wrote. So ``os.fsync`` and
``os.fdatasync`` are replaced in the processes under test (:func:`watch`): each call adds to the chronicle what it made
durable, the content of a file or the names of a directory. A :class:`Disk` adds these up to what would be left, and
:func:`build` makes a directory of it that can be looked at, or gone on from.

File systems differ in which names outlive a power cut, so there are three views: names as directories were flushed,
names as they were, whether flushed or not, and for each directory one or the other by chance. In all of them a file
whose content was never flushed is empty. What reaches the disk by other means (a sync by the kernel, or by code that is
not Python's) is not seen and counts as lost.
"""

from __future__ import annotations

import ctypes
import os
import random
import secrets
import shutil
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from powertrain.testing import chronicle
from powertrain.testing.chronicle import DirectoryFlushed, FileFlushed, Name, Record

_CONTENTS = "contents"
#: What this process watches, and where it puts it down.
_watched: tuple[Path, Path] | None = None


# --------------------------------------------------------------------------- in the processes under test


def watch(root: str | Path, directory: str | Path) -> Callable[[], None]:
    """Put into the chronicle at ``directory`` whatever this process flushes below ``root``, until the result is called.

    Children made by ``fork`` watch too; to watch the same again changes nothing. Nothing may lie below ``root`` before
    the first process watches it. Linux only.
    """
    global _watched
    if sys.platform != "linux":
        raise OSError("Flushes can be watched on Linux only: elsewhere a descriptor does not tell its path.")
    top, log = Path(os.path.realpath(root)), Path(directory)
    if _watched is not None:
        if _watched != (top, log):
            raise RuntimeError(
                f"This process watches {_watched[0]} already, so it cannot watch {top}. End that first."
            )
        return lambda: None
    _watched = top, log
    (log / _CONTENTS).mkdir(parents=True, exist_ok=True)
    originals = os.fsync, os.fdatasync
    for name, original in zip(("fsync", "fdatasync"), originals, strict=True):
        setattr(os, name, _recording(original, top, log))

    def end() -> None:
        global _watched
        _watched = None
        os.fsync, os.fdatasync = originals

    return end


def _recording(flush: Callable[[Any], None], top: Path, log: Path) -> Callable[[Any], None]:
    """Return ``flush`` with a record of what it made durable."""

    def flush_and_record(fd: Any) -> None:
        number = fd if isinstance(fd, int) else fd.fileno()
        # Looked at before the flush: what is written while it runs may or may not be in it.
        record = _state_of(number, top, log)
        flush(fd)
        if record is not None:
            chronicle.append(log, record)

    return flush_and_record


def _state_of(descriptor: int, top: Path, log: Path) -> Record | None:
    """What a flush of this descriptor makes durable; None where it is none of the watched files."""
    path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    if path != top and top not in path.parents:
        return None
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        below = "" if path == top else path.relative_to(top).as_posix()
        return DirectoryFlushed(file=_identity(descriptor), path=below, names=list(_names_in(descriptor)))
    if stat.S_ISREG(mode):
        content = secrets.token_hex(8)
        # Opened anew: the caller's descriptor may be for writing only, and has a position of its own.
        shutil.copyfile(f"/proc/self/fd/{descriptor}", log / _CONTENTS / content)
        return FileFlushed(file=_identity(descriptor), content=content)
    return None


def names_below(root: str | Path) -> list[Name]:
    """Return every name below ``root`` as it is now, a directory before its entries; names that vanish are left out."""
    found: list[Name] = []
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        try:
            descriptor = os.open(Path(root, prefix), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            for name in _names_in(descriptor):
                path = f"{prefix}/{name.path}".lstrip("/")
                found.append(Name(path, name.file, name.kind, name.leads_to))
                if name.kind == "directory":
                    waiting.append(path)
        finally:
            os.close(descriptor)
    return found


def _names_in(directory: int) -> Iterator[Name]:
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda one: one.name):
            try:
                if entry.is_symlink():
                    leads_to = os.readlink(entry.name, dir_fd=directory)
                    yield Name(entry.name, _identity(directory, entry.name), "link", leads_to)
                elif entry.is_dir(follow_symlinks=False):
                    yield Name(entry.name, _identity(directory, entry.name), "directory")
                elif entry.is_file(follow_symlinks=False):
                    yield Name(entry.name, _identity(directory, entry.name))
            except FileNotFoundError:
                continue  # gone while we looked


_AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH, _STATX_BTIME = 0x100, 0x1000, 0x800
_SIZE_OF_STATX, _OFFSET_OF_BIRTH = 256, 80


def _identity(descriptor: int, name: str = "") -> str:
    """Device, inode and time of birth of an open file, or of ``name`` in an open directory.

    Where the file system does not tell the birth, a reused inode can pass for the file that had it before.
    """
    if name:
        status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    else:
        status = os.fstat(descriptor)
    buffer = ctypes.create_string_buffer(_SIZE_OF_STATX)
    flags = _AT_SYMLINK_NOFOLLOW | (0 if name else _AT_EMPTY_PATH)
    failed = ctypes.CDLL(None).statx(descriptor, os.fsencode(name), flags, _STATX_BTIME, buffer)
    seconds, nanoseconds = (0, 0) if failed else struct.unpack_from("qI", buffer, _OFFSET_OF_BIRTH)
    return f"{status.st_dev}:{status.st_ino}:{seconds}.{nanoseconds:09d}"


# --------------------------------------------------------------------------- after the power cut


class Remains(NamedTuple):
    """The content under one name after the power cut."""

    #: "file", "directory" or "link".
    kind: str
    #: The copy in the chronicle of a file's content ("" for none: the file is empty); where a link leads.
    content: str = ""


class Disk:
    """The data flushed so far. Give it the records of a chronicle one after another."""

    def __init__(self) -> None:
        self._contents: dict[str, str] = {}
        self._directories: dict[str, list[Name]] = {}
        self._root = ""

    def add(self, record: Record) -> None:
        """Take one more record into account."""
        if isinstance(record, FileFlushed):
            self._contents[record.file] = record.content
        elif isinstance(record, DirectoryFlushed):
            self._directories[record.file] = record.names
            if not record.path:
                self._root = record.file

    def with_flushed_names(self) -> dict[str, Remains]:
        """Return by path the content after a power cut where a name lasts only once its directory was flushed."""
        return self._walk(self._directories)

    def with_names(self, names: Sequence[Name]) -> dict[str, Remains]:
        """Return by path the content after a power cut where every name lasts and only contents are lost."""
        return {name.path: self._remains_of(name) for name in names}

    def with_some_names(self, names: Sequence[Name], chance: random.Random) -> dict[str, Remains]:
        """By path, what may be left where it is by chance, for each directory, whether unflushed names last."""
        directories = {"": self._root} | {name.path: name.file for name in names if name.kind == "directory"}
        # One that is gone by now was emptied before, and that may last although its own end does not.
        current: dict[str, list[Name]] = {one: [] for one in (*self._directories, *directories.values())}
        for name in names:
            above, _, own = name.path.rpartition("/")
            current[directories[above]].append(Name(own, name.file, name.kind, name.leads_to))
        lasting = {directory: now for directory, now in current.items() if chance.random() < 0.5}
        return self._walk({**self._directories, **lasting})

    def _walk(self, directories: Mapping[str, Sequence[Name]]) -> dict[str, Remains]:
        remains: dict[str, Remains] = {}
        waiting = [("", self._root, frozenset[str]())]
        while waiting:
            prefix, directory, above = waiting.pop()
            for name in directories.get(directory, ()):
                remains[prefix + name.path] = self._remains_of(name)
                # A directory that was moved down and flushed in the wrong order could lie within itself.
                if name.kind == "directory" and name.file not in above:
                    waiting.append((f"{prefix}{name.path}/", name.file, above | {name.file}))
        return remains

    def _remains_of(self, name: Name) -> Remains:
        if name.kind == "file":
            return Remains("file", self._contents.get(name.file, ""))
        return Remains(name.kind, name.leads_to)


def build(
    remains: dict[str, Remains], directory: str | Path, target: str | Path, *, share: bool = False
) -> None:
    """Make in ``target``, which must not exist, the files that survive the power cut. ``directory`` is the chronicle.

    ``share`` saves time where the result is only read: its files are then the chronicle's own.
    """
    Path(target).mkdir(parents=True)
    for path in sorted(remains):  # a directory sorts before what it holds
        place, (kind, content) = Path(target, path), remains[path]
        if kind == "directory":
            place.mkdir()
        elif kind == "link":
            place.symlink_to(content)
        elif not content:
            place.touch()
        elif share:
            os.link(Path(directory, _CONTENTS, content), place)
        else:
            shutil.copyfile(Path(directory, _CONTENTS, content), place)


def materialise(
    directory: str | Path, root: str | Path, target: str | Path, *, names_survive: bool = False
) -> None:
    """Make in ``target`` the files of ``root`` that survive a power cut now, by the chronicle at ``directory``.

    With ``names_survive`` all names that ``root`` has now last, whether flushed or not.
    """
    disk = Disk()
    for record in chronicle.read(directory):
        disk.add(record)
    remains = disk.with_names(names_below(root)) if names_survive else disk.with_flushed_names()
    build(remains, directory, target)
