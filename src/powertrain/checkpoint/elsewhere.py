"""Checkpoints whose files the training function keeps outside the run, and the places that a manifest may name.

A manifest is read from storage, and other people may be able to write there. An address may lead only to servers that
the user has chosen (:mod:`powertrain.storage.servers`). A directory of this machine must be one that this user has
reported as a checkpoint before: then :func:`mark` has left a file in it. Otherwise a forged manifest could make a
checkpoint of any directory that the user can read, and have its files copied to where others can read them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.errors import CheckpointError, PowertrainError, StorageError
from powertrain.storage import Storage, open_storage
from powertrain.storage.files.ownership import trusted_owners
from powertrain.storage.servers import require_known_server
from powertrain.wire.values import FilePart

#: In a directory of this machine that was reported as a checkpoint and stays where it is.
MARK_NAME = f"{mf.BOOKKEEPING_PREFIX}uploaded.json"
#: Environment variable with directories, joined as in PATH, below which a manifest may name any directory.
TRUSTED_VARIABLE = "POWERTRAIN_TRUSTED_CHECKPOINT_DIRS"


def mark(place: Storage) -> str:
    """Mark a directory of this machine as a checkpoint of this user; leave other places as they are.

    Returns:
        Why a manifest that names the directory will be refused, as a sentence; "" when it will not.
    """
    path = place.local_path(MARK_NAME)
    if path is None:
        return ""
    try:
        place.put(MARK_NAME, mf.seal({"schema": mf.SCHEMA}))
    except (OSError, StorageError) as error:
        return (
            f"The checkpoint directory {str(path.parent)!r} cannot be marked as yours ({error}), so a later start will "
            f"not use it. Make it writable, or set {TRUSTED_VARIABLE} to it."
        )
    return ""


def checkpoint_at(storage: Storage, elsewhere: str) -> Checkpoint:
    """Return the checkpoint whose files are at ``elsewhere`` according to a manifest in ``storage``."""
    return Checkpoint(elsewhere, None if "://" in elsewhere else getattr(storage, "filesystem", None))


def files_at(place: Storage) -> list[FilePart]:
    """Return the files that the training function keeps at a place, with their sizes now."""
    return [
        FilePart(name=entry.key, size=entry.size)
        for entry in place.list()
        if entry.key not in mf.MANIFEST_NAMES and not entry.key.startswith(mf.BOOKKEEPING_PREFIX)
    ]


def require_server(storage: Storage, elsewhere: str, where: str) -> None:
    """Check that files are on a server of the user's: reading them sends this user's credentials there.

    Args:
        storage: The run's storage.
        elsewhere: The address or path of the files; "" passes.
        where: Names the manifest, for the error.

    Raises:
        CheckpointError: ``elsewhere`` names another server or account than the storage and the environment do, or
            has credentials.
    """
    if not elsewhere:
        return
    try:
        require_known_server(elsewhere, storage.uri, os.environ)
    except StorageError as error:
        raise CheckpointError(f"{where} cannot be used: {error}") from error


def require_known_place(storage: Storage, elsewhere: str, where: str) -> None:
    """Check where the files of a checkpoint are, as :func:`require_server` does, and for directories of this machine.

    A directory passes if it is in the run's own directory or below one of :data:`TRUSTED_VARIABLE`, if it has the mark
    and both belong to this user, or if this machine does not have it.

    Raises:
        CheckpointError: ``elsewhere`` is a server, an account or a directory that only the manifest names.
    """
    require_server(storage, elsewhere, where)
    if not elsewhere or ("://" in elsewhere and not elsewhere.lower().startswith("file://")):
        return
    try:
        checkpoint = checkpoint_at(storage, elsewhere)
        marked = open_storage(checkpoint.address, filesystem=checkpoint.given_filesystem).local_path(
            MARK_NAME
        )
        is_known = marked is None or _is_known(storage, marked)
    except (OSError, ValueError, PowertrainError) as error:
        raise CheckpointError(f"{where} cannot be used: its files cannot be reached: {error}") from error
    if not is_known:
        raise CheckpointError(
            f"{where} cannot be used: it names the directory {elsewhere!r} as the place of its files, which no run of "
            "yours has reported, and which may be private. If you trust the manifest, set "
            f"{TRUSTED_VARIABLE} to that directory or one above it."
        )


def _is_known(storage: Storage, marked: Path) -> bool:
    try:
        directory = os.stat(marked.parent)
    except (FileNotFoundError, NotADirectoryError):
        return True  # nothing to hand out; verifying the checkpoint reports the missing files
    own = storage.local_path(MARK_NAME)
    roots = [one for one in os.environ.get(TRUSTED_VARIABLE, "").split(os.pathsep) if os.path.isabs(one)]
    if own is not None:
        roots.append(str(own.parent))
    if any(_is_below(marked.parent, root) for root in roots):
        return True
    try:
        status = os.lstat(marked)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and {status.st_uid, directory.st_uid} <= trusted_owners()


def _is_below(path: Path, root: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))
