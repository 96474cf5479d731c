"""How a checkpoint becomes one, and how the newest good one is found.

Two phases. First each rank stores its files under ``checkpoints/{name}/`` (:func:`store_part`) and says so.
When all have, the controller puts ``MANIFEST.json`` (:func:`commit`), which names every file with its size
and hash. Only a checkpoint with a manifest exists; whatever else lies there is left over from a crash.

Files go straight to their final names. When a name is taken, by another rank or by the leftovers of an
earlier try, the file is kept aside under its hash; ``commit`` then puts the lowest rank's file in place. So
the ranks need not agree on anything, and a latecomer can never change a committed file.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.checkpoint import METADATA_NAME, Checkpoint
from powertrain.checkpoint.manifest import MANIFEST_NAME, Manifest, ManifestFile
from powertrain.errors import CheckpointError, StorageError
from powertrain.storage import Storage
from powertrain.storage.local import digest_of
from powertrain.wire import FilePart, Part

_TOP = "checkpoints"
#: Below a checkpoint: files whose final name was taken, as ``{xxh3}/{name}``.
_ASIDE = ".powertrain-aside"
_logger = logging.getLogger("powertrain")


def name_of_row(row: int) -> str:
    """The usual name of the checkpoint of a row."""
    return f"checkpoint_{row:06d}"


# --------------------------------------------------------------------------- phase one: in the worker


def store_part(storage: Storage, checkpoint_name: str, directory: str | Path) -> Part:
    """Copy every file of ``directory`` into the checkpoint; on return they are durable, but not committed.

    The caller may delete or change the directory afterwards. Raises :class:`CheckpointError` for a directory
    that cannot be a checkpoint, before anything is copied.
    """
    top = Path(os.path.abspath(directory))
    _refuse_directory(storage, top)
    files, empty = _contents(top)
    if not files and not empty:
        raise CheckpointError(
            f"The checkpoint directory {str(top)!r} is empty. Write its files before report."
        )
    base = f"{_TOP}/{checkpoint_name}"
    parts = [_store_file(storage, base, name, path) for name, path in files if name != METADATA_NAME]
    for name in empty:
        real = storage.local_path(f"{base}/{name}")
        if real is not None:
            real.mkdir(parents=True, exist_ok=True)
        parts.append(FilePart(name=f"{name}/", size=0, xxh3=""))
    return Part(checkpoint=checkpoint_name, files=parts, metadata=Checkpoint(top).get_metadata())


def _store_file(storage: Storage, base: str, name: str, path: Path) -> FilePart:
    digest = storage.put_file_if_absent(f"{base}/{name}", path)
    if digest is None:
        digest = digest_of(path)
        storage.put_file(f"{base}/{_ASIDE}/{digest.xxh3}/{name}", path)
    return FilePart(name=name, size=digest.size, xxh3=digest.xxh3)


def _refuse_directory(storage: Storage, top: Path) -> None:
    if not top.is_dir():
        found = "is a file" if top.exists() else "does not exist"
        raise CheckpointError(
            f"The checkpoint directory {str(top)!r} {found}. Give report a directory: "
            "Checkpoint.from_directory(path)."
        )
    checkpoints = storage.local_path(_TOP)
    if checkpoints is not None and Path(os.path.realpath(top)) in Path(os.path.realpath(checkpoints)).parents:
        raise CheckpointError(
            f"The checkpoint directory {str(top)!r} contains the run's own storage {storage.uri!r}, so it "
            "would be copied into itself. Write the checkpoint's files to a directory of their own."
        )


def _contents(top: Path) -> tuple[list[tuple[str, Path]], list[str]]:
    """All files below ``top`` as (name, real path), and the names of its empty directories."""
    files: list[tuple[str, Path]] = []
    empty: list[str] = []
    inside = Path(os.path.realpath(top))
    waiting = [("", top)]
    while waiting:
        prefix, directory = waiting.pop()
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        if prefix and not entries:
            empty.append(prefix.removesuffix("/"))
        for entry in entries:
            name, path = prefix + entry.name, Path(entry.path)
            if entry.is_symlink():
                _refuse_link(name, path, inside)
            mode = path.stat().st_mode
            if stat.S_ISDIR(mode):
                waiting.append((f"{name}/", path))
            elif not stat.S_ISREG(mode):
                raise CheckpointError(f"The checkpoint holds {name!r}, which is no ordinary file. Remove it.")
            elif not _is_our_manifest(name, path):
                mf.check_file_name(name, f"the checkpoint directory {str(top)!r}")
                files.append((name, path))
    return sorted(files), sorted(empty)


def _refuse_link(name: str, path: Path, inside: Path) -> None:
    """Raises for a symbolic link that leads out of the directory ``inside``, nowhere, or round in a circle."""
    target, here = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
    if not target.exists():
        raise CheckpointError(f"The checkpoint holds the symbolic link {name!r}, which leads nowhere.")
    if inside not in target.parents:
        raise CheckpointError(
            f"The checkpoint holds the symbolic link {name!r}, which leads out of it to {str(target)!r}. "
            "Copy the file there instead of linking to it."
        )
    if target == here or target in here.parents:
        raise CheckpointError(f"The checkpoint holds the symbolic link {name!r}, which leads back to itself.")


def _is_our_manifest(name: str, path: Path) -> bool:
    """True for the manifest of a checkpoint of ours that is being reported again."""
    if name != MANIFEST_NAME:
        return False
    if mf.is_manifest(path.read_bytes()):
        return True
    raise CheckpointError(
        f"The checkpoint holds a file named {MANIFEST_NAME}, a name that Powertrain needs for its own list "
        "of files. Give that file another name."
    )


# --------------------------------------------------------------------------- phase two: in the controller


@dataclass
class Merged:
    """The files of all ranks as one list, and what was said twice."""

    files: list[ManifestFile] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    #: One sentence for each name that ranks brought with different content.
    clashes: list[str] = field(default_factory=list)


def merge(parts: Mapping[int, Part]) -> Merged:
    """What the parts add up to: of files with one name the lowest rank's counts, so with metadata. Pure."""
    merged = Merged()
    chosen: dict[str, ManifestFile] = {}
    for rank, part in sorted(parts.items()):
        merged.metadata = {**part.metadata, **merged.metadata}
        for file in part.files:
            first = chosen.get(file.name)
            if first is None:
                mf.check_file_name(file.name, f"rank {rank}")
                chosen[file.name] = ManifestFile(name=file.name, size=file.size, xxh3=file.xxh3, rank=rank)
            elif first.xxh3 != file.xxh3:
                merged.clashes.append(
                    f"Ranks {first.rank} and {rank} both reported a checkpoint file {file.name!r} with "
                    f"different content; that of rank {first.rank} is kept. Put the rank into the name to keep both."
                )
    merged.files = [chosen[name] for name in sorted(chosen)]
    return merged


def commit(
    storage: Storage,
    *,
    name: str,
    row: int,
    attempt: int,
    parts: Mapping[int, Part],
    metrics: Mapping[str, Any],
    world_size: int,
    lease: int,
    parent: str = "",
    extras: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] = _logger.warning,
) -> Manifest:
    """Make the stored parts a checkpoint. ``tell`` hears of each clash of names (see :func:`merge`).

    Raises :class:`CheckpointError` when a file is missing or the name is committed already; nothing is
    committed then.
    """
    merged = merge(parts)
    if not merged.files:
        raise CheckpointError(f"The checkpoint {name!r} cannot be committed: no rank brought a file.")
    for clash in merged.clashes:
        tell(clash)
    if any(entry.key == f"{_TOP}/{name}/{MANIFEST_NAME}" for entry in storage.list(f"{_TOP}/{name}")):
        raise _already_committed(storage, name)
    _put_in_place(storage, f"{_TOP}/{name}", merged)
    manifest = Manifest(
        name=name,
        row=row,
        attempt=attempt,
        metrics=dict(metrics),
        world_size=world_size,
        lease=lease,
        parent=parent,
        created=time.time(),
        files=merged.files,
        extras=dict(extras or {}),
        metadata=merged.metadata,
    )
    if not storage.put_if_absent(f"{_TOP}/{name}/{MANIFEST_NAME}", mf.encode(manifest)):
        raise _already_committed(storage, name)
    return manifest


def _already_committed(storage: Storage, name: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {name!r} of {storage.uri!r} is committed already and stays as it is. Set it aside or "
        "discard it before committing another under that name."
    )


def _put_in_place(storage: Storage, base: str, merged: Merged) -> None:
    """Leave below ``base`` exactly the merged files, each under its name."""
    found = {entry.key: entry.size for entry in storage.list(base)}
    wanted = {f"{base}/{file.name}" for file in merged.files}
    for file in merged.files:
        aside = f"{base}/{_ASIDE}/{file.xxh3}/{file.name}"
        if aside in found:
            storage.move(aside, f"{base}/{file.name}")
            found[f"{base}/{file.name}"] = found.pop(aside)
    for file in merged.files:
        if not file.name.endswith("/") and found.get(f"{base}/{file.name}") != file.size:
            raise CheckpointError(
                f"The file {file.name!r} of rank {file.rank} is not whole in {storage.uri!r} below {base!r}, "
                "so the checkpoint was not committed. Check whether something else writes or deletes there."
            )
    storage.delete_tree(f"{base}/{_ASIDE}")
    for key in found.keys() - wanted:
        storage.delete(key)
    if merged.metadata:
        storage.put(f"{base}/{METADATA_NAME}", json.dumps(merged.metadata).encode())


# --------------------------------------------------------------------------- finding


def committed(storage: Storage) -> list[Manifest]:
    """All checkpoints with a readable manifest, the oldest commit first."""
    manifests = []
    for key in _manifest_keys(storage):
        try:
            manifests.append(mf.decode(storage.get(key), key))
        except (CheckpointError, FileNotFoundError):
            continue
    return sorted(manifests, key=_age)


def _age(manifest: Manifest) -> tuple[int, int, int, float]:
    """Orders commits of one run; clocks come last, because they may be wrong."""
    return (manifest.lease, manifest.attempt, manifest.row, manifest.created)


def newest(storage: Storage) -> Manifest | None:
    """The checkpoint committed last, unverified."""
    return next(reversed(committed(storage)), None)


def verify(storage: Storage, manifest: Manifest) -> None:
    """Read every file; raises :class:`CheckpointError` naming the first that is missing or has changed."""
    base = f"{_TOP}/{manifest.name}"
    for file in manifest.files:
        path = storage.local_path(f"{base}/{file.name.removesuffix('/')}")
        if path is None:
            raise _needs_real_files(storage)
        if file.name.endswith("/"):
            if not path.is_dir():
                raise CheckpointError(f"The directory {file.name!r} of {manifest.name!r} is missing.")
            continue
        try:
            size = path.stat().st_size
            if size != file.size:
                raise CheckpointError(
                    f"The file {file.name!r} of checkpoint {manifest.name!r} has {size} bytes; "
                    f"{file.size} were committed."
                )
            digest = digest_of(path)
        except OSError as error:
            raise CheckpointError(
                f"The file {file.name!r} of checkpoint {manifest.name!r} cannot be read: {error.strerror}."
            ) from error
        if digest.xxh3 != file.xxh3:
            raise CheckpointError(
                f"The file {file.name!r} of checkpoint {manifest.name!r} has other content than was committed "
                f"(xxh3 {digest.xxh3}, not {file.xxh3})."
            )


def newest_verified(storage: Storage, tell: Callable[[str], None]) -> Manifest | None:
    """The newest checkpoint whose files are all as committed; ``tell`` hears of each that is not.

    Changes nothing. A controller that goes on from an older one calls :func:`set_aside_newer` next.
    """
    _tell_unreadable(storage, tell)
    for manifest in reversed(committed(storage)):
        try:
            verify(storage, manifest)
            return manifest
        except CheckpointError as error:
            tell(f"{error} The checkpoint cannot be used; the one before it is tried.")
    return None


def _tell_unreadable(storage: Storage, tell: Callable[[str], None]) -> None:
    for key in _manifest_keys(storage):
        try:
            mf.decode(storage.get(key), f"The manifest {key!r} of {storage.uri!r}")
        except CheckpointError as error:
            tell(f"{error} The checkpoint cannot be used.")
        except FileNotFoundError:
            continue


def checkpoint_of(storage: Storage, manifest: Manifest) -> Checkpoint:
    """The committed checkpoint as a value."""
    path = storage.local_path(f"{_TOP}/{manifest.name}")
    if path is None:
        raise _needs_real_files(storage)
    return Checkpoint(path)


def _needs_real_files(storage: Storage) -> StorageError:
    return StorageError(
        f"Checkpoints at {storage.uri!r} cannot be read: this version needs real files. "
        "Use a local or mounted path."
    )


def _manifest_keys(storage: Storage) -> list[str]:
    return [
        entry.key
        for entry in storage.list(_TOP)
        if entry.key.count("/") == 2 and entry.key.endswith(f"/{MANIFEST_NAME}")
    ]


# --------------------------------------------------------------------------- removing


def discard(storage: Storage, name: str) -> None:
    """Remove a checkpoint, its manifest first: cut short, this leaves leftovers and no broken checkpoint."""
    storage.delete(f"{_TOP}/{name}/{MANIFEST_NAME}")
    storage.delete_tree(f"{_TOP}/{name}")


def sweep_uncommitted(storage: Storage) -> list[str]:
    """Remove what lies in ``checkpoints/`` without a manifest; returns the names.

    Only while no worker of the run is alive: their unfinished parts look the same. A manifest that cannot be
    read protects its checkpoint, because another version may have written it.
    """
    names = {entry.key.split("/")[1] for entry in storage.list(_TOP) if entry.key.count("/") >= 2}
    left_over = sorted(names - {key.split("/")[1] for key in _manifest_keys(storage)})
    for name in left_over:
        storage.delete_tree(f"{_TOP}/{name}")
    return left_over


def set_aside_newer(storage: Storage, kept: Manifest | None) -> list[str]:
    """Move every checkpoint that is not ``kept`` or older to ``broken/``; returns the new places.

    A run that goes on from an older checkpoint will come to the same rows, and so the same names, again.
    Nothing happens when ``kept`` is the newest and every manifest can be read.
    """
    older = {m.name for m in committed(storage) if kept is not None and _age(m) <= _age(kept)}
    places = []
    for key in _manifest_keys(storage):
        name = key.split("/")[1]
        if name in older:
            continue
        place = _free_place(storage, name)
        storage.move(key, f"{place}/{MANIFEST_NAME}")
        for entry in storage.list(f"{_TOP}/{name}"):
            storage.move(entry.key, place + entry.key.removeprefix(f"{_TOP}/{name}"))
        storage.delete_tree(f"{_TOP}/{name}")
        places.append(place)
    return places


def _free_place(storage: Storage, name: str) -> str:
    taken = {entry.key.split("/")[1] for entry in storage.list("broken")}
    number = 1
    while f"{name}-{number}" in taken:
        number += 1
    return f"broken/{name}-{number}"
