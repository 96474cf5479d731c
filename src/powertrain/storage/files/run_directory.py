"""Checks of a run directory's owner and entries, before a run starts to read, write or delete there.

A link in a run directory could lead a run anywhere, and files of another user may hold anything. Links are always
refused; other owners are refused unless the user declares the storage as shared. Only the run directory and two levels
below it are checked: deeper down no link is followed, and files are verified against hashes. Files of committed
checkpoints, which users' code opens by name, are checked when a checkpoint is handed out.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from powertrain.errors import StorageError
from powertrain.storage.base import Storage

#: Levels of directories below the run directory whose entries are checked.
_LEVELS = 2


def refuse_links(storage: Storage) -> None:
    """Raise :class:`StorageError` where the run directory, or something in it, is a symbolic link."""
    for path, status in _entries(storage):
        if stat.S_ISLNK(status.st_mode):
            raise StorageError(
                f"{str(path)!r} is a symbolic link. Links in a run directory are not followed, because other users who "
                "can write there could lead the run to any file. Replace it by what it leads to, or choose another "
                "name or storage path."
            )


def refuse_other_owners(storage: Storage) -> None:
    """Raise :class:`StorageError` where the run directory, or something in it, belongs to another user.

    The user is known by the owner of a file that is written there: some network file systems show other uids.
    """
    if storage.local_path("x") is None:
        return
    own = _owner_of_new_files(storage)
    for path, status in _entries(storage):
        if status.st_uid != own:
            raise StorageError(
                f"{str(path)!r} belongs to another user (uid {status.st_uid}, and you write as uid {own}), who could "
                "change what the run reads. Choose another name or storage path; or, if you trust everybody who can "
                "write there, set RunConfig(shared_storage=True)."
            )


def _owner_of_new_files(storage: Storage) -> int:
    key = f".powertrain-owner-{secrets.token_hex(8)}"
    storage.put(key, b"")
    try:
        path = storage.local_path(key)
        assert path is not None
        return os.lstat(path).st_uid
    finally:
        storage.delete(key)


def _entries(storage: Storage) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the run directory and the entries of its upper levels, as they are themselves."""
    inside = storage.local_path("x")
    if inside is None:
        return
    try:
        status = os.lstat(inside.parent)
    except OSError:
        return
    yield inside.parent, status
    if stat.S_ISDIR(status.st_mode):
        yield from _below(inside.parent, _LEVELS)


def _below(directory: Path, levels: int) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in sorted(names):
        try:
            status = os.lstat(directory / name)
        except OSError:
            continue  # gone while we looked
        yield directory / name, status
        if levels > 1 and stat.S_ISDIR(status.st_mode):
            yield from _below(directory / name, levels - 1)
