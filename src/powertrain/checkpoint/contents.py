"""Files of a checkpoint before it is committed: names, and directories that cannot be one. Effects: reads only."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.cache import METADATA_NAME
from powertrain.checkpoint.manifest import BOOKKEEPING_PREFIX, MANIFEST_NAMES
from powertrain.errors import CheckpointError
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT

TOP = "checkpoints"


def final_name(row: int, given: str, tag: str) -> str:
    """Return the name of the checkpoint of ``row``: the name given to ``report``, or the default, with the lease's
    tag."""
    return (f"{given}-{tag}" if tag else given) if given else name_of_row(row, tag)


def name_of_row(row: int, tag: str = "") -> str:
    """Return the usual name of the checkpoint of a row. For ``tag`` see :func:`powertrain.checkpoint.chain.tag_for`."""
    return f"checkpoint_{row:06d}-{tag}" if tag else f"checkpoint_{row:06d}"


def refuse_directory(
    storage: Storage,
    directory: str | Path,
    *,
    launch_dir: str | Path = "",
    staging: str | Path = "",
) -> None:
    """Raise :class:`CheckpointError` for a directory that cannot be a checkpoint, regardless of its content.

    ``staging`` is the directory in which checkpoints of the node wait for their upload.
    """
    top = Path(os.path.abspath(directory))
    if not top.is_dir():
        found = "is a file" if top.exists() else "does not exist"
        raise CheckpointError(
            f"The checkpoint directory {str(top)!r} {found}. Give report a directory: "
            "Checkpoint.from_directory(path)."
        )
    if _holds(top, storage.local_path(TOP)):
        raise CheckpointError(
            f"The checkpoint directory {str(top)!r} contains the run's own storage {without_secrets(storage.uri)!r}, "
            "so it "
            "would be copied into itself. Write the checkpoint's files to a directory of their own."
        )
    if _holds(top, staging):
        raise CheckpointError(
            f"The checkpoint directory {str(top)!r} contains {str(staging)!r}, where checkpoints wait for their "
            "upload, so it would be copied into itself. Write the checkpoint's files to a directory of their own."
        )
    if _holds(top, launch_dir):
        raise CheckpointError(
            f"The checkpoint directory {str(top)!r} is or contains the directory {str(launch_dir)!r} that the run "
            "was launched from, so every file there would become part of the checkpoint. Write the checkpoint's "
            "files to a directory of their own, such as powertrain.checkpoint_dir(), or work in a scratch directory: "
            "RunConfig(working_dir='scratch')."
        )


def _holds(top: Path, inner: str | Path | None) -> bool:
    """Return True when ``inner`` is ``top`` or lies in it, links followed; False for no path."""
    if not inner or not str(inner):
        return False
    real_top, real_inner = Path(os.path.realpath(top)), Path(os.path.realpath(inner))
    return real_top == real_inner or real_top in real_inner.parents


def contents(directory: str | Path, *, segments: str | Path = "") -> tuple[list[tuple[str, Path]], list[str]]:
    """Return all files below ``directory`` as (name, path), and the names of its empty directories, both sorted.

    Metadata and files of ours are left out. Links inside the directory are followed, and so are those into
    ``segments``, where state waits in shared memory. Raises :class:`CheckpointError` for entries that cannot be stored.
    """
    top = Path(os.path.abspath(directory))
    inside = [Path(os.path.realpath(place)) for place in (top, segments) if str(place)]
    files: list[tuple[str, Path]] = []
    empty: list[str] = []
    waiting = [("", top)]
    while waiting:
        prefix, folder = waiting.pop()
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        if prefix and not entries:
            empty.append(prefix.removesuffix("/"))
        for entry in entries:
            name, path = prefix + entry.name, Path(entry.path)
            mf.check_file_name(name, f"The checkpoint directory {str(top)!r}")
            if entry.is_symlink():
                _refuse_link(name, path, inside)
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                waiting.append((f"{name}/", path))
            elif not stat.S_ISREG(mode):
                raise CheckpointError(
                    f"The checkpoint holds {name!r}, which is not a regular file. Remove it from the directory."
                )
            elif name != METADATA_NAME and not is_bookkeeping(name, path):
                files.append((name, path))
    return sorted(files), sorted(empty)


def _refuse_link(name: str, path: Path, inside: Sequence[Path]) -> None:
    """Raises for a symbolic link that leads out of all directories ``inside``, nowhere, or round in a circle."""
    target, here = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    if not target.exists():
        raise CheckpointError(f"The checkpoint holds the symbolic link {name!r}, which leads nowhere.")
    if not any(directory in target.parents for directory in inside):
        raise CheckpointError(
            f"The checkpoint holds the symbolic link {name!r}, which leads out of it to {str(target)!r}. "
            "Copy the file there instead of linking to it."
        )
    if target == here or target in here.parents:
        raise CheckpointError(f"The checkpoint holds the symbolic link {name!r}, which leads back to itself.")


def is_bookkeeping(name: str, path: Path) -> bool:
    """Return True for the manifest and its side files of a committed checkpoint that is being reported again."""
    if name not in MANIFEST_NAMES and not ("/" not in name and name.startswith(BOOKKEEPING_PREFIX)):
        return False
    for manifest in (path.parent / name for name in MANIFEST_NAMES):
        if manifest.is_file() and mf.is_manifest(read_manifest(manifest)):
            return True
    raise CheckpointError(
        f"The checkpoint holds a file named {name!r}, a name that Powertrain needs for its own files. "
        "Give that file another name."
    )


def read_manifest(path: Path) -> bytes:
    if path.stat().st_size > LARGE_RECORD_BYTES_LIMIT:
        raise CheckpointError(
            f"The manifest {str(path)!r} cannot be read: it has more than {LARGE_RECORD_BYTES_LIMIT:,} bytes, so it "
            "was changed or damaged. Use another checkpoint."
        )
    return path.read_bytes()
