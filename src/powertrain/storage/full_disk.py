"""Name the full file system of a failed write, whose ``OSError`` has only an error number."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from powertrain.storage import safety
from powertrain.text.errors import message_of

#: Errors of a write that found no room: the file system or the user's quota on it is used up.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
#: A file system with less than this part of it free counts as full when an error names none.
_SMALL_SHARE = 0.01


def is_full(error: object) -> bool:
    """Return True for an error of a write that found no room."""
    return isinstance(error, OSError) and error.errno in _FULL


def full_place(error: object, path: str | Path = "") -> str:
    """Return the mount point of the full file system that ``error`` is about; "" for any other error.

    Args:
        error: The exception of a write.
        path: The file or directory that was written to, for an error that does not name one.
    """
    if not is_full(error):
        return ""
    place = _file_of(error) or os.fspath(path)
    mount = safety.mount_of(place) if place else None
    return mount.point if mount is not None else place


def describe_write_error(error: object, path: str | Path = "") -> str:
    """Return the message of ``error``; for a full file system also its mount point, kind and size."""
    message = message_of(error)
    point = full_place(error, path)
    return f"{message} (the file system at {_describe_mount(point)} is full)" if point else message


def hint_about_room(error: BaseException) -> str:
    """Return " (the file system at ... is full)" for an error of the user's code that a full file system explains.

    Where the error names no file, as those of ``write()`` and ``torch.save`` do, the file systems of the working
    directory, of temporary files and of shared memory are looked at. "" for any other error.
    """
    point = full_place(error)
    if point:
        return f" (the file system at {_describe_mount(point)} is full)"
    if not is_full(error) and not _failed_in_torch_save(error):
        return ""
    found = find_full([os.curdir, tempfile.gettempdir(), "/dev/shm"])
    return f" (full file systems: {', '.join(found)})" if found else ""


def _failed_in_torch_save(error: BaseException) -> bool:
    """Return True for a write error of ``torch.save``: its text names a line of its own C++ source only."""
    text = message_of(error) if isinstance(error, RuntimeError) else ""
    return "inline_container" in text or "PytorchStreamWriter failed" in text


def find_full(paths: Iterable[str | Path]) -> list[str]:
    """Return descriptions of the file systems under ``paths`` that are full, each once."""
    found: dict[str, str] = {}
    for path in paths:
        try:
            usage = shutil.disk_usage(path)
            mount = safety.mount_of(path)
        except OSError:
            continue
        if mount is not None and usage.free < usage.total * _SMALL_SHARE:
            found.setdefault(mount.point, _describe_mount(mount.point))
    return list(found.values())


def _file_of(error: object) -> str:
    """Return the path that the error itself names; "" for none. Keys of a storage are not absolute and do not count."""
    for name in (getattr(error, "filename2", None), getattr(error, "filename", None)):
        if isinstance(name, (str, bytes)) and os.path.isabs(os.fsdecode(name)):
            return os.fsdecode(name)
    return ""


def _describe_mount(point: str) -> str:
    try:
        size = safety.size_text(shutil.disk_usage(point).total)
    except OSError:
        return repr(point)
    mount = safety.mount_of(point)
    return f"{point!r} ({mount.kind}, {size})" if mount is not None else f"{point!r} ({size})"
