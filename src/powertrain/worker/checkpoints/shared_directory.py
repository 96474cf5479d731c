"""Checkpoints that are reported from the directory that ranks work in: ``Checkpoint.from_directory(".")``.

The launch directory also holds the script, its data and its logs, so only entries are taken that are new or have
changed since the rank started: compared with a listing from then. A directory that was made for the ranks is taken
whole. Other processes may be writing there, so a file is copied when it rests, and one that never does is left out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
import zipfile
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

#: Times of files come from a clock that lags a little behind ``time.time()``.
_CLOCK_LAG_NS = 50_000_000
#: A file that has not changed for so long is not being written.
_QUIET_DELAY_S = 0.2
#: An empty file may have been opened for writing a moment ago.
_EMPTY_QUIET_DELAY_S = 2.0
_POLL_INTERVAL_S = 0.02
#: How long one report waits for files that change. The last rank to write a file includes it, whatever the others leave
#: out, so it need not be long.
_REST_TIMEOUT_S = 5.0
#: Every rank lists its launch directory when it starts: that must not take long where it holds a dataset.
_LISTED_ENTRIES, _LISTING_TIMEOUT_S = 10_000, 0.25
#: Directories of tools, which hold nothing of a checkpoint.
_OF_TOOLS = frozenset({"__pycache__", "node_modules"})


class Version(NamedTuple):
    """Values that change with every change of an entry. Modification times do not: copies keep those of the
    original."""

    #: Inode, size and time of change; of a link that is followed also those of its target.
    identity: tuple[int, ...]
    #: When the entry was last changed or renamed, by the clock of the file system.
    changed_ns: int


@dataclass(frozen=True)
class Listing:
    """The entries of a directory at one time."""

    #: Nanoseconds of ``time.time_ns()``.
    taken_ns: int = 0
    versions: Mapping[str, Version] = field(default_factory=dict)
    #: False where there was more than could be listed in time.
    is_complete: bool = True
    #: True where everything counts as new, also what tools keep in directories of their own.
    is_before_all: bool = False


#: For a directory that was made for the ranks.
BEFORE_ALL = Listing(is_before_all=True)


def is_new(name: str, version: Version, before: Listing) -> bool:
    """Return True when an entry was made or changed since a listing. Pure.

    One that was changed just before the listing counts as changed: the clock of files may tick too slowly to tell a
    change right after it. Where the listing is not complete the time of change decides.
    """
    is_recent = version.changed_ns >= before.taken_ns - _CLOCK_LAG_NS
    known = before.versions.get(name)
    if known is not None:
        return version != known or is_recent
    return before.is_complete or is_recent


class DirectoryEntry(NamedTuple):
    """A file, or what has no files below it, in a directory that was walked through."""

    name: str
    path: Path
    version: Version
    #: True for a directory that is empty, or that is not walked through.
    is_directory: bool = False
    #: Why it cannot be part of a checkpoint; "" where it can.
    problem: str = ""


@dataclass
class Copied:
    """The result of copying the entries of a directory."""

    names: list[str] = field(default_factory=list)
    #: By name why an entry was left out.
    left_out: dict[str, str] = field(default_factory=dict)
    #: Those of them that did not come to rest.
    changing: set[str] = field(default_factory=set)


def is_same_directory(one: str, other: str) -> bool:
    """Return True when two paths name the same directory; False where one is empty."""
    return bool(one and other) and os.path.realpath(one) == os.path.realpath(other)


def output_files() -> list[str]:
    """Return the files that standard output and standard error of this process go to; none for terminals and pipes."""
    found = []
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                found.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
    return found


def listing_of(top: str, entries: int = _LISTED_ENTRIES) -> Listing:
    """Return the current listing of a directory; an empty, incomplete one where it cannot be read or is too large.

    Args:
        top: The directory that a rank is about to work in.
        entries: How many to list at most.
    """
    taken, deadline = time.time_ns(), time.monotonic() + _LISTING_TIMEOUT_S
    versions: dict[str, Version] = {}
    if not os.path.isdir(top):
        return Listing(taken, is_complete=False)
    for entry in _Walk(top, None, limit=entries + 1).entries():
        if len(versions) >= entries or time.monotonic() > deadline:
            return Listing(taken, versions, is_complete=False)
        versions[entry.name] = entry.version
    return Listing(taken, versions)


def copy_new_entries(
    top: str,
    target: str,
    *,
    before: Listing,
    excluded: Sequence[str],
    outputs: Collection[str],
    is_shared: bool,
    hopeless: Collection[str] = (),
) -> Copied:
    """Copy new entries below ``top``. A link inside it becomes a copy of its target.

    Args:
        top: The directory that was reported.
        target: An empty directory.
        before: What ``top`` held when the rank started.
        excluded: Directories below ``top`` that are left out, such as the run's own storage.
        outputs: Files that are left out silently: the output of the rank and of the driver goes there.
        is_shared: Whether other ranks may be writing the files now.
        hopeless: Names that did not come to rest at an earlier report, and are not waited for again.

    Returns:
        The names of copied entries, relative to ``top``, and of those left out.

    Raises:
        OSError: A file cannot be read or written.
    """
    copied, waiting = Copied(), []
    for entry in _Walk(top, before, excluded).entries():
        if not is_new(entry.name, entry.version, before) or _is_ours(entry.name):
            continue
        if outputs and os.path.realpath(entry.path) in outputs:
            continue
        if entry.problem:
            copied.left_out[entry.name] = entry.problem
        elif entry.is_directory:
            (Path(target) / entry.name).mkdir(parents=True, exist_ok=True)
            copied.names.append(entry.name + "/")
        else:
            waiting.append(_ChangingFile(entry, Path(target) / entry.name, is_shared))
    deadline = time.monotonic() + _REST_TIMEOUT_S
    while waiting:
        waiting = [one for one in waiting if not one.is_over(copied)]
        if time.monotonic() > deadline or all(one.entry.name in hopeless for one in waiting):
            break
        time.sleep(_POLL_INTERVAL_S)
    for one in waiting:
        one.give_up(copied)
    copied.names.sort()
    return copied


class _ChangingFile:
    """A file that is to be copied once it rests, so that another rank's half-written one is not taken."""

    def __init__(self, entry: DirectoryEntry, target: Path, is_shared: bool) -> None:
        self.entry = entry
        self._target, self._is_shared = target, is_shared
        self._seen: Version | None = None
        self._seen_at = 0.0

    def is_over(self, copied: Copied) -> bool:
        """Copy the file if it rests; True where there is nothing left to do."""
        try:
            found = self.entry.path.stat()
            if not self._rests(found):
                return False
            self._target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.entry.path, self._target)
            if _version(self.entry.path.stat()) != _version(found):
                return False
        except FileNotFoundError:
            self._target.unlink(missing_ok=True)
            return not os.path.lexists(self.entry.path)  # removed since the directory was listed
        if self._is_shared and not _is_whole(self._target):
            return False
        copied.names.append(self.entry.name)
        return True

    def _rests(self, found: os.stat_result) -> bool:
        if not self._is_shared:
            return True
        if self._seen != _version(found):
            self._seen, self._seen_at = _version(found), time.monotonic()
        quiet = _QUIET_DELAY_S if found.st_size else _EMPTY_QUIET_DELAY_S
        # A file server's clock may be ahead of this machine's, so the time since the last look counts as well.
        return max(time.time() - found.st_ctime, time.monotonic() - self._seen_at) >= quiet

    def give_up(self, copied: Copied) -> None:
        self._target.unlink(missing_ok=True)
        copied.left_out[self.entry.name] = "it was being written all the time, or is incomplete"
        copied.changing.add(self.entry.name)


class _Walk:
    """Goes through a directory, nearest entries first, so that a listing that is cut short has those."""

    def __init__(
        self, top: str, before: Listing | None, excluded: Sequence[str] = (), limit: int | None = None
    ) -> None:
        """``before`` is None for a walk that makes the listing; ``limit`` is for the entries of each directory."""
        self._top, self._real_top = top, os.path.realpath(top)
        self._before, self._limit = before, limit
        self._excluded = [os.path.realpath(path) for path in excluded if path]

    def entries(self) -> Iterator[DirectoryEntry]:
        """Yield files, links, empty directories, and whatever else has no files below it."""
        # With each directory the real paths of those that lead to it: links may lead round in a circle.
        waiting: deque[tuple[str, str, tuple[str, ...]]] = deque([("", self._top, (self._real_top,))])
        while waiting:
            prefix, folder, chain = waiting.popleft()
            try:
                with os.scandir(folder) as scanned:
                    found = sorted(islice(scanned, self._limit), key=lambda entry: entry.name)
            except OSError as error:
                if not prefix:
                    raise
                yield from _entry_now(prefix[:-1], folder, f"it cannot be read ({error.strerror})")
                continue
            if prefix and not found:
                yield from _entry_now(prefix[:-1], folder, is_directory=True)
            for entry in found:
                name, is_link = prefix + entry.name, entry.is_symlink()
                real = os.path.realpath(entry.path) if is_link else os.path.join(chain[-1], entry.name)
                problem = self._problem(real, chain) if is_link else ""
                if problem or not entry.is_dir():
                    problem = problem or ("" if entry.is_file() else "it is not a regular file")
                    yield from _entry_now(name, entry.path, problem, is_followed=is_link and not problem)
                elif self._is_walked(name, entry, real):
                    waiting.append((f"{name}/", entry.path, (*chain, real)))
                elif self._before is None:
                    yield from _entry_now(name, entry.path, is_directory=True)

    def _problem(self, real: str, chain: tuple[str, ...]) -> str:
        """Return why a link with this real path is not followed; "" where it is."""
        if not os.path.exists(real):
            return "it is a link that leads nowhere"
        if not _is_below(real, self._real_top):
            return f"it is a link out of the directory, to {real!r}"
        return "it is a link that leads back to itself" if real in chain else ""

    def _is_walked(self, name: str, entry: os.DirEntry[str], real: str) -> bool:
        """Return False for excluded entries, and for directories of tools. A hidden one that was there when the rank
        started,
        such as ``.git``, is taken for a tool's."""
        before = self._before
        if any(_is_below(real, excluded) for excluded in self._excluded):
            return False
        if before is not None and before.is_before_all:
            return True
        was_there = before is None or not before.is_complete or name in before.versions
        is_of_a_tool = entry.name in _OF_TOOLS or (entry.name.startswith(".") and was_there)
        return not is_of_a_tool and not os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))


def _entry_now(
    name: str, path: str, problem: str = "", *, is_directory: bool = False, is_followed: bool = False
) -> Iterator[DirectoryEntry]:
    """Yield an entry as it is now; nothing where it was removed meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        version = _version(os.lstat(path))
        if is_followed:
            target = _version(os.stat(path))
            version = Version(version.identity + target.identity, max(version.changed_ns, target.changed_ns))
        yield DirectoryEntry(name, Path(path), version, is_directory, problem)


def _version(found: os.stat_result) -> Version:
    return Version((found.st_ino, found.st_size, found.st_ctime_ns), found.st_ctime_ns)


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _is_ours(name: str) -> bool:
    """Return True for files of the run beside those of a downloaded checkpoint."""
    from powertrain.checkpoint.manifest import BOOKKEEPING_PREFIX

    return name.startswith(BOOKKEEPING_PREFIX) and "/" not in name


def _is_whole(path: Path) -> bool:
    """Return False for a file that is visibly cut: an archive, as torch.save writes, without its end."""
    with path.open("rb") as file:
        head = file.read(4)
    return head != b"PK\x03\x04" or zipfile.is_zipfile(path)
