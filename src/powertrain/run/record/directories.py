"""Directories of a run for files that are not in its storage yet."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from powertrain.config.checkpoint import CheckpointConfig
from powertrain.config.data import DataConfig
from powertrain.storage import Storage
from powertrain.storage.files.descriptors import open_directory, remove_quietly, remove_tree_at
from powertrain.storage.files.ownership import why_not_private
from powertrain.storage.files.private_roots import (
    KEPT,
    lasting_root,
    make_private,
    note,
    remove_empty_parents,
    root_above,
)
from powertrain.storage.safety import is_network_file_system

#: The staging area beside local storage.
_BESIDE = ".staging"


def staging_directory(
    storage: Storage, config: CheckpointConfig, unique: str, root: Callable[[], Path] = lasting_root
) -> str:
    """Return where checkpoints wait until they are in ``storage``; ``unique`` identifies this start of the run.

    On storage that is a local disk they wait on the disk itself, so that a rename brings them in; unless other users
    can write to it, who could put files of their choice there. Each start has a directory of its own, because remains
    of a killed one may be removed while the next one runs. ``root`` gives the root for lasting files, where needed.
    """
    name = _hashed(unique)
    if config.staging_dir is not None:
        return os.path.join(config.staging_dir, name)
    beside = storage.local_path("staging")
    if beside is not None and not is_network_file_system(beside) and not why_not_private(beside.parent):
        return str(beside.parent / _BESIDE / name)
    return str(make_private(root()) / "staging" / name)


def sweep_staging(storage: Storage) -> list[str]:
    """Remove the staging areas of earlier starts beside local storage. The holder of the lease only.

    Returns the directories that stay: shares that storage did not take, which the user was given the path of. Links and
    directories of other users are left alone.
    """
    beside = storage.local_path("staging")
    if beside is None:
        return []
    kept = []
    with contextlib.suppress(OSError), open_directory(beside.parent, [_BESIDE]) as staging:
        for name in sorted(os.listdir(staging)):
            if _exists(staging, f"{name}/{KEPT}"):
                kept.append(str(beside.parent / _BESIDE / name))
            else:
                with contextlib.suppress(OSError):
                    remove_tree_at(staging, name, owner=os.fstat(staging).st_uid)
    return kept


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def spool_directory(storage: Storage) -> str:
    """Return where files that grow are kept for storage that cannot append: the same at every start of the run."""
    return str(make_private(lasting_root()) / "spool" / _hashed(storage.uri))


def data_cache_directory(
    storage: Storage, config: DataConfig, unique: str, root: Callable[[], Path] = lasting_root
) -> str:
    """Return where decoded blocks of data are kept on a node; ``unique`` identifies this start of the run.

    ``root`` gives the root for lasting files, where needed. A directory that was asked for is passed over where another
    user has taken the run's name in it.
    """
    own = Path(f"powertrain-{_hashed(storage.uri)}", _hashed(unique))
    reason = ""
    if config.cache_dir is not None:
        reason = why_taken(Path(config.cache_dir, own.parent))
        if not reason:
            return str(Path(config.cache_dir, own))
    usual = root() / "data"
    if reason:
        note(reason, usual)
    return str(usual / own)


def why_taken(directory: Path) -> str:
    """Return why ``directory`` itself, wherever it lies, is not this user's; "" where it is, or does not exist."""
    try:
        status = directory.lstat()
    except OSError:
        return ""
    if not stat.S_ISDIR(status.st_mode):
        return f"{str(directory)!r} is a symbolic link or a file"
    return "" if status.st_uid == os.geteuid() else f"{str(directory)!r} belongs to uid {status.st_uid}"


def own_data_cache(directory: str) -> int:
    """Make the directory of :func:`data_cache_directory`, and remove those of processes that are dead.

    Returns a descriptor: as long as this process has it open no other process removes the directory.
    """
    from powertrain.data.loading import scratch

    if (root := root_above(directory)) is not None:
        make_private(root)
    scratch.sweep_beside(directory)
    scratch.sweep(Path(directory).parents[1])
    return scratch.make_owned(directory)


def sweep_data_caches(directory: str) -> None:
    """Remove data caches of earlier starts of the same run beside ``directory`` on this node."""
    from powertrain.data.loading import scratch

    scratch.sweep_beside(directory)


def remove_data_cache(directory: str) -> None:
    """Remove a directory of :func:`data_cache_directory` and parents that are empty without it."""
    if not directory:
        return
    remove_quietly(directory)
    with contextlib.suppress(OSError):  # another start is in it
        Path(directory).parent.rmdir()
    remove_empty_parents(Path(directory).parent)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def remove_unless_needed(path: str, needed: Sequence[str]) -> None:
    """Remove a directory at the end of a run, except shares that storage did not take; see ``RunOutcome.left``."""
    if not path:
        return
    if any(Path(path) in Path(kept).parents for kept in needed):
        with contextlib.suppress(OSError):
            Path(path, KEPT).touch()
        return
    remove_quietly(path)
    if Path(path).parent.name == _BESIDE:
        with contextlib.suppress(OSError):  # another start is in it
            Path(path).parent.rmdir()
    else:
        remove_empty_parents(path)
