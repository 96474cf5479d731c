"""Where a run keeps what is not in its storage yet."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from powertrain.config import CheckpointConfig, DataConfig
from powertrain.storage import Storage
from powertrain.storage.safety import is_network_file_system

#: A directory on disk that survives a restart, by convention.
_LASTING = "/var/tmp"
#: The staging area beside local storage, and what marks a start's part of it as still needed.
_BESIDE, _KEPT = ".staging", "KEPT"


def staging_directory(storage: Storage, config: CheckpointConfig, unique: str) -> str:
    """Where checkpoints wait until they are in ``storage``; ``unique`` tells this start from all others.

    On storage that is a local disk they wait on the disk itself: then a rename brings them in. Each start has a
    directory of its own, because what a killed one leaves may be removed while the next one runs.
    """
    name = _hashed(unique)
    if config.staging_dir is not None:
        return os.path.join(config.staging_dir, name)
    beside = storage.local_path("staging")
    if beside is not None and not is_network_file_system(beside):
        return str(beside.parent / _BESIDE / name)
    return os.path.join(_lasting_root(), "staging", name)


def sweep_staging(storage: Storage) -> list[str]:
    """Remove what earlier starts have left to wait beside local storage. The holder of the lease only.

    Returns what stays: shares that storage did not take, of which the user was told where they are.
    """
    beside = storage.local_path("staging")
    if beside is None:
        return []
    kept = []
    for directory in sorted((beside.parent / _BESIDE).glob("*")):
        if (directory / _KEPT).exists():
            kept.append(str(directory))
        else:
            shutil.rmtree(directory, ignore_errors=True)
    return kept


def spool_directory(storage: Storage) -> str:
    """Where files that grow are kept for storage that cannot append: the same at every start of the run here."""
    return os.path.join(_lasting_root(), "spool", _hashed(storage.uri))


def data_cache_directory(storage: Storage, config: DataConfig, unique: str) -> str:
    """Where decoded blocks of data are kept on a node; ``unique`` tells this start from all others."""
    root = config.cache_dir or os.path.join(_lasting_root(), "data")
    return os.path.join(root, f"powertrain-{_hashed(storage.uri)}", _hashed(unique))


def own_data_cache(directory: str) -> int:
    """Make the directory of :func:`data_cache_directory`, and remove those of processes that are dead.

    Returns a descriptor: as long as this process has it open nobody removes the directory.
    """
    from powertrain.data import scratch

    sweep_data_caches(directory)
    scratch.sweep(Path(directory).parents[1])
    return scratch.make_owned(directory)


def sweep_data_caches(directory: str) -> None:
    """Remove what earlier starts of the same run have left beside ``directory`` on this node."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(os.path.dirname(directory)):
            if entry.path != directory:
                shutil.rmtree(entry.path, ignore_errors=True)


def remove_data_cache(directory: str) -> None:
    """Remove a directory of :func:`data_cache_directory` and what is empty without it."""
    if not directory:
        return
    shutil.rmtree(directory, ignore_errors=True)
    of_run, root, own = Path(directory).parents[:3]
    ours = (of_run, root, own) if own.name == f"powertrain-{os.getuid()}" else (of_run,)
    for parent in ours:
        with contextlib.suppress(OSError):  # another run is in it
            parent.rmdir()


def _lasting_root() -> str:
    root = os.environ.get("TMPDIR") or (_LASTING if os.access(_LASTING, os.W_OK) else tempfile.gettempdir())
    own = os.path.join(root, f"powertrain-{os.getuid()}")
    os.makedirs(own, mode=0o700, exist_ok=True)
    return own


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def remove_unless_needed(path: str, needed: Sequence[str]) -> None:
    """Remove a directory at the end of a run, but for what storage did not take; see ``RunOutcome.left``."""
    if not path:
        return
    if any(Path(path) in Path(kept).parents for kept in needed):
        with contextlib.suppress(OSError):
            Path(path, _KEPT).touch()
        return
    shutil.rmtree(path, ignore_errors=True)
    for parent in Path(path).parents[:2]:
        if parent.name in ("staging", _BESIDE, f"powertrain-{os.getuid()}"):
            with contextlib.suppress(OSError):  # another run is in it
                parent.rmdir()
