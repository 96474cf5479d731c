"""Staging of reported directories, so that training continues during the upload to storage.

A rank's shares lie on its node, one directory per row, until the node's uploader has stored them::

    {root}/attempt-0/rank-00003/
      open-k2x9/                a directory from ``checkpoint_dir()``
      row-00000012/files/…      a staged share
      row-00000012/part.json    put last, by rename: the share is complete, with the rank's report

``part.json`` repeats the rank's report. A rank that is killed right after ``report`` returned may not have sent it;
then the controller finds it here. Nothing is flushed to disk at this stage: a share has to survive the death of the
process, and only a committed checkpoint survives the death of the machine.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from powertrain.checkpoint import contents
from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.storage import boundaries
from powertrain.storage.files.private_roots import make_private, root_above
from powertrain.storage.local import copy_file
from powertrain.wire import frames
from powertrain.wire.values import CheckpointPart, FilePart, Point

_FILES, _SEAL = "files", "part.json"
#: The errors of a full disk.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class CheckpointDirectory(str):
    """A directory to write a checkpoint's files to. It is a plain path; as a context it is removed if unused.

    ``begun`` and ``done`` are called when the context is entered and left.
    """

    begun: Callable[[], None] = staticmethod(lambda: None)
    done: Callable[[], None] = staticmethod(lambda: None)

    def __enter__(self) -> CheckpointDirectory:
        self.begun()
        return self

    def __exit__(self, *_: object) -> None:
        self.done()
        shutil.rmtree(self, ignore_errors=True)


class Staging:
    """One rank's part of the staging area. Everything but :meth:`free_share` belongs to the training thread."""

    def __init__(
        self,
        root: str,
        attempt: int,
        rank: int,
        *,
        segments: str = "",
        limit: int = 0,
        shared_by: int = 1,
        full: Callable[[int, int, int], None] = lambda _row, _needed, _limit: None,
    ) -> None:
        """Create a staging area. ``limit`` is in bytes, 0 for half of the free space, divided among the ``shared_by``
        ranks of the node. ``full`` is called with (row, needed, limit) when staging must wait for an upload."""
        self._root, self._own = Path(root), Path(share_directory(root, attempt, rank))
        self._limit, self._shared_by, self._full = limit, shared_by, full
        #: Where shared-memory segments go that outlive this process; "" where there can be none.
        self.segments = segments
        self._changed = threading.Condition()
        self._outstanding: dict[int, int] = {}
        self._closed = False

    def new_directory(self) -> CheckpointDirectory:
        """Return a fresh directory that :meth:`stage` takes over without copying."""
        self._make_own()
        return CheckpointDirectory(tempfile.mkdtemp(prefix="open-", dir=self._own))

    def stage(self, row: int, directory: str, *, take: bool = False) -> CheckpointPart:
        """Make the content of ``directory`` the share of ``row``; afterwards the caller may change or delete it.

        With ``take`` it is moved rather than copied where possible: :func:`give_back` restores it. Raises
        :class:`CheckpointError` for an invalid directory, ``OSError`` when it cannot be staged; no part of it stays
        staged then, and the directory still exists.
        """
        files, empty = contents.contents(directory, segments=self.segments)
        parts = [FilePart(name=name, size=path.stat().st_size) for name, path in files]
        parts += [FilePart(name=f"{name}/", size=0) for name in empty]
        metadata = Checkpoint(directory).get_metadata()
        size = sum(part.size for part in parts)
        self._make_room(row, size)
        try:
            staged = self._bring_in(row, directory, files, empty, take)
        except OSError as error:
            if error.errno not in FULL or not self._wait_for_one(row, size):
                raise
            staged = self._bring_in(row, directory, files, empty, take)
        with self._changed:
            self._outstanding[row] = size
        return CheckpointPart(checkpoint="", files=parts, metadata=metadata, staged=str(staged))

    def seal(self, point: Point) -> None:
        """Mark the share of this report as complete. Until then it does not count."""
        assert point.part is not None
        directory = Path(point.part.staged)
        boundaries.crossing("write", str(directory / _SEAL))
        unfinished = directory / f"{_SEAL}.unfinished"
        unfinished.write_bytes(frames.encode_messages([point]))
        boundaries.crossing("rename", str(directory / _SEAL))
        os.rename(unfinished, directory / _SEAL)

    def discard(self, row: int, taken: str = "") -> None:
        """Give up a share that could not be sealed; its files go back to the directory ``taken``."""
        staged = str(self._staged(row))
        if taken:
            give_back(staged, taken)
        else:
            remove_share(staged)
        self.free_share(row)

    def free_share(self, row: int) -> None:
        """Note that the share of ``row`` has been uploaded. Any thread."""
        with self._changed:
            self._outstanding.pop(row, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop waiting for room: no further upload will free any. Any thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _make_own(self) -> None:
        """Make this rank's directory, in a staging area that other users cannot read."""
        if (root := root_above(self._root)) is not None:
            make_private(root)  # a cleaner of temporary files may have removed it since the run began
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._own.mkdir(parents=True, exist_ok=True)

    # -- room

    def _make_room(self, row: int, needed: int) -> None:
        """Wait until ``needed`` more bytes are allowed. A single share is allowed whatever its size.

        Requests room once, and again whenever an upload was not enough.
        """
        while True:
            with self._changed:
                waiting, limit = set(self._outstanding), self._allowed()
                if self._closed or not waiting or sum(self._outstanding.values()) + needed <= limit:
                    return
            self._full(row, needed, limit)
            self._wait_until_one_has_left(waiting)

    def _wait_until_one_has_left(self, waiting: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not waiting <= self._outstanding.keys())

    def _wait_for_one(self, row: int, needed: int) -> bool:
        """Wait on a full disk for an upload of this rank; return False where none is pending."""
        with self._changed:
            before = dict(self._outstanding)
        if not before or shutil.disk_usage(self._own).free + sum(before.values()) < needed:
            return False  # it would not fit even if all of them went
        self._full(row, needed, sum(before.values()))
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._outstanding.keys() < before.keys())
            return not self._closed

    def _allowed(self) -> int:
        if self._limit:
            return self._limit // self._shared_by
        self._make_own()
        free = shutil.disk_usage(self._own).free + sum(self._outstanding.values())
        return free // 2 // self._shared_by

    # -- bringing in

    def _bring_in(
        self, row: int, directory: str, files: list[tuple[str, Path]], empty: list[str], take: bool
    ) -> Path:
        staged = self._staged(row)
        shutil.rmtree(staged, ignore_errors=True)  # of an earlier try, which was reported as failed
        self._make_own()
        staged.mkdir()
        try:
            if not (self.is_ours(directory) or take) or not _moved(directory, staged / _FILES, files):
                _copy_all(staged / _FILES, files, empty)
                if take:
                    shutil.rmtree(directory, ignore_errors=True)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return staged

    def _staged(self, row: int) -> Path:
        return self._own / f"row-{row:08d}"

    def is_ours(self, directory: str) -> bool:
        """Return True for a directory from :meth:`new_directory`."""
        path = Path(os.path.realpath(directory))
        return path.name.startswith("open-") and path.parent == Path(os.path.realpath(self._own))


def share_directory(root: str, attempt: int, rank: int) -> str:
    """Return the directory with the shares of one rank of one attempt."""
    return os.path.join(root, f"attempt-{attempt}", f"rank-{rank:05d}")


def remove_earlier_shares(root: str, attempt: int) -> None:
    """Remove the shares of earlier attempts: a new one begins after their last possible commit."""
    for directory in Path(root).glob("attempt-*"):
        number = directory.name.partition("-")[2]
        if number.isdigit() and int(number) < attempt:
            shutil.rmtree(directory, ignore_errors=True)


def sealed_reports(root: str, attempt: int, rank: int) -> dict[int, Point]:
    """Return the reports of a rank whose shares are whole and still staged, by row."""
    found: dict[int, Point] = {}
    for seal in Path(share_directory(root, attempt, rank)).glob(f"row-*/{_SEAL}"):
        try:
            point = _decode_seal(seal.read_bytes())[0]
        except (OSError, msgspec.DecodeError):
            continue  # uploaded and removed since the directory was listed
        if re.fullmatch(r"row-0*" + str(point.row), seal.parent.name):
            found[point.row] = point
    return found


_decode_seal: Callable[[bytes], list[Any]] = msgspec.msgpack.Decoder(list[Point]).decode


def remove_share(staged: str) -> None:
    """Remove a staged share; one that is gone already is fine."""
    shutil.rmtree(staged, ignore_errors=True)


def give_back(staged: str, directory: str) -> str:
    """Move the files of a share to ``directory``, from which they were taken, and remove the share.

    Returns their new place: beside ``directory`` where that name exists again. Where they cannot be moved
    they stay in the staging area. "" for a share that is gone.
    """
    files = Path(staged, _FILES)
    if not files.is_dir():
        return ""
    target, number = directory, 0
    try:
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        while os.path.lexists(target):
            number += 1
            target = f"{directory}.unsaved-{number}"
        shutil.move(files, target)
    except OSError:
        return str(files) if files.is_dir() else target
    remove_share(staged)
    return target


def source_of(staged: str, name: str) -> Path:
    """Return the file of a staged share."""
    return Path(staged, _FILES, name)


def _moved(directory: str, target: Path, files: list[tuple[str, Path]]) -> bool:
    """Return True when the directory could be renamed: on the same file system, and without links that would break."""
    linked = any(stat.S_ISLNK(os.lstat(path).st_mode) and not _is_absolute_link(path) for _, path in files)
    if linked or os.path.islink(directory) or os.path.ismount(directory):
        return False
    boundaries.crossing("rename", str(target))
    try:
        os.rename(directory, target)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EACCES, errno.EPERM, errno.EBUSY):
            return False
        raise
    return True


def _is_absolute_link(path: Path) -> bool:
    """Return True for a link that holds wherever it is moved to. One into the directory itself would not."""
    target = os.readlink(path)
    return os.path.isabs(target) and not os.path.realpath(path).startswith(
        os.path.realpath(path.parent) + os.sep
    )


def _copy_all(target: Path, files: list[tuple[str, Path]], empty: list[str]) -> None:
    target.mkdir()
    for name, path in files:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        boundaries.crossing("write", str(copy))
        copy_file(path, copy)
    for name in empty:
        (target / name).mkdir(parents=True, exist_ok=True)
