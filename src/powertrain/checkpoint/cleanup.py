"""Remove checkpoints: those that retention drops, and files of unfinished commits."""

from __future__ import annotations

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.chain import manifest_key, old_manifest_key
from powertrain.checkpoint.commit import keys_of_manifests, leave_exactly
from powertrain.checkpoint.committed import age, all_manifests
from powertrain.checkpoint.contents import TOP
from powertrain.checkpoint.manifest import Manifest
from powertrain.storage import Storage
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT


def discard(storage: Storage, name: str) -> None:
    """Remove a checkpoint, its manifest first: an interruption leaves files without a manifest, and no broken
    checkpoint.

    Files that the user uploaded elsewhere stay. A void manifest stays for ever: it keeps a frozen controller from
    committing.
    """
    try:
        try:
            data = storage.get(manifest_key(name), limit=LARGE_RECORD_BYTES_LIMIT)
        except FileNotFoundError:
            data = storage.get(old_manifest_key(name), limit=LARGE_RECORD_BYTES_LIMIT)
        void = mf.is_void(data)
    except FileNotFoundError:
        void = False
    if void:
        leave_exactly(storage, f"{TOP}/{name}", (), _files_beside_manifest(storage, name), b"")
    else:
        storage.delete(manifest_key(name))
        storage.delete(old_manifest_key(name))
        storage.delete_tree(f"{TOP}/{name}")


def _files_beside_manifest(storage: Storage, name: str) -> dict[str, int]:
    entries = storage.list(f"{TOP}/{name}")
    manifests = (manifest_key(name), old_manifest_key(name))
    return {entry.key: entry.size for entry in entries if entry.key not in manifests}


def void_names(storage: Storage) -> list[str]:
    """Return names that can never be committed, because a run was taken over while they were being committed."""
    return [name for name, found in all_manifests(storage) if found is None]


def sweep_uncommitted(storage: Storage) -> list[str]:
    """Remove checkpoints without a manifest from ``checkpoints/``; return their names.

    Only while nothing of the run is alive: unfinished checkpoints look the same. A manifest that cannot be read
    protects its checkpoint, because another version may have written it; a void one stays, without its files.
    """
    names = {entry.key.split("/")[1] for entry in storage.list(TOP) if entry.key.count("/") >= 2}
    with_manifest = dict(all_manifests(storage))
    left_over = sorted(names - with_manifest.keys())
    for name in left_over:
        storage.delete_tree(f"{TOP}/{name}")
    for name in [name for name, found in with_manifest.items() if found is None]:
        extra = list(_files_beside_manifest(storage, name))
        for key in extra:
            storage.delete(key)
        left_over += [name] if extra else []
    return left_over


def set_aside_newer(storage: Storage, kept: Manifest | None) -> list[str]:
    """Move every checkpoint that is not ``kept`` or older to ``broken/``; returns the new places.

    A run that resumes from an older checkpoint will come to the same rows, and so the same names, again.
    Nothing happens when ``kept`` is the newest and every manifest can be read.
    """
    places = []
    keys = keys_of_manifests(storage)
    for name, found in list(all_manifests(storage)):
        older = isinstance(found, Manifest) and kept is not None and age(found) <= age(kept)
        if older or found is None:
            continue
        place = _free_place(storage, name)
        storage.move(keys[name], f"{place}/{keys[name].rpartition('/')[2]}")
        for entry in storage.list(f"{TOP}/{name}"):
            storage.move(entry.key, place + entry.key.removeprefix(f"{TOP}/{name}"))
        storage.delete_tree(f"{TOP}/{name}")
        places.append(place)
    return places


def _free_place(storage: Storage, name: str) -> str:
    taken = {entry.key.split("/")[1] for entry in storage.list("broken")}
    number = 1
    while f"{name}-{number}" in taken:
        number += 1
    return f"broken/{name}-{number}"
