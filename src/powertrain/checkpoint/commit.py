"""The commit of a checkpoint.

A rank's directory is checked first (:func:`refuse_directory`, :func:`contents`). When every rank has reported,
:func:`merge` chooses a rank's file for each name; those are uploaded to ``checkpoints/{name}/`` and hashed on their
way. Then :func:`commit` checks that all are there, and puts the manifest, which names every file with its size and
hash. Only a checkpoint with a manifest exists; other files there are left over from a crash.

Everything here works on any storage; empty directories, which only file systems have, are made where possible.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import xxhash

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.cache import METADATA_NAME
from powertrain.checkpoint.chain import Chain, already_committed, manifest_key, old_manifest_key
from powertrain.checkpoint.contents import TOP
from powertrain.checkpoint.elsewhere import require_server
from powertrain.checkpoint.listing import PlaceListings
from powertrain.checkpoint.manifest import Manifest, ManifestFile
from powertrain.errors import CheckpointError
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.local import LocalStorage
from powertrain.wire.values import CheckpointPart, FilePart


@dataclass
class Merged:
    """The shares of all ranks as one."""

    #: Hashes are "" for files that are not uploaded yet. An empty directory's name ends in "/".
    files: list[ManifestFile] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    #: One sentence for each thing that ranks brought differently.
    clashes: list[str] = field(default_factory=list)
    #: Where the user put the files himself; "" for nowhere.
    elsewhere: str = ""
    #: True where ranks have listed that place and found different files: each lists it when its own upload is done.
    is_listed_differently: bool = False
    #: Why a rank has no share, by rank.
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True where no rank brought a file, a directory or metadata."""
        return not (self.files or self.metadata or self.elsewhere)


def merge(parts: Mapping[int, CheckpointPart]) -> Merged:
    """Merge the ranks' parts: of duplicate names the lowest rank's counts. Pure."""
    merged = Merged(errors={rank: part.error for rank, part in sorted(parts.items()) if part.error})
    good = {rank: part for rank, part in sorted(parts.items()) if not part.error}
    chosen = _Chosen(merged.clashes)
    uploader = next((rank for rank, part in good.items() if part.elsewhere), -1)
    merged.elsewhere = good[uploader].elsewhere if uploader >= 0 else ""
    listings = [
        part.files for part in good.values() if merged.elsewhere and part.elsewhere == merged.elsewhere
    ]
    merged.is_listed_differently = any(_sizes(one) != _sizes(listings[0]) for one in listings[1:])
    for rank, part in good.items():
        merged.metadata = {**part.metadata, **merged.metadata}
        merged.extras = {**part.extras, **merged.extras}
        files: Iterable[FilePart] = part.files
        if rank == uploader:
            files = _largest(listings)
        elif part.elsewhere:
            if part.elsewhere != merged.elsewhere:
                merged.clashes.append(
                    f"Ranks {uploader} and {rank} uploaded one checkpoint to {merged.elsewhere!r} and to "
                    f"{part.elsewhere!r}; the first is kept. Upload all its files to one place."
                )
            continue
        for file in files:
            chosen.add(ManifestFile(name=file.name, size=file.size, xxh3=file.xxh3, rank=rank))
    merged.files = chosen.files()
    return merged


def merge_when_complete(parts: Mapping[int, CheckpointPart], listings: PlaceListings) -> Merged:
    """Merge the ranks' parts after all uploads; list the user's own place again where ranks found different files.

    Where this process cannot list it, all files that ranks have listed count, and a sentence among the clashes states
    it.
    """
    merged = merge(parts)
    if not merged.is_listed_differently:
        return merged
    now, problem = listings.files(merged.elsewhere)
    if now:
        listed = {
            rank: msgspec.structs.replace(part, files=now) if part.elsewhere == merged.elsewhere else part
            for rank, part in parts.items()
        }
        return merge(listed)
    merged.clashes.append(
        f"Ranks listed {without_secrets(merged.elsewhere)!r} while others were still uploading to it, and the driver "
        f"cannot list it ({problem}). All files that any rank has seen are recorded; if one was temporary, the "
        "checkpoint will count as damaged. Upload from one rank, or to a place that the driver can read."
    )
    return merged


def _sizes(files: Iterable[FilePart]) -> dict[str, int]:
    return {file.name: file.size for file in files}


def _largest(listings: Iterable[Iterable[FilePart]]) -> list[FilePart]:
    """Return the files of all listings, each as the listing has it in which it is largest: uploads grow."""
    found: dict[str, FilePart] = {}
    for listing in listings:
        for file in listing:
            if file.name not in found or file.size > found[file.name].size:
                found[file.name] = file
    return list(found.values())


class _Chosen:
    """The first file under each name; ``clashes`` gets a sentence for each omitted file."""

    def __init__(self, clashes: list[str]) -> None:
        self._clashes = clashes
        self._files: dict[str, ManifestFile] = {}
        #: Directories, ending in "/", with the first file below each.
        self._filled: dict[str, ManifestFile] = {}

    def files(self) -> list[ManifestFile]:
        """In the order of their names; a directory that is empty on one rank only is not in it."""
        return [file for name, file in sorted(self._files.items()) if name not in self._filled]

    def add(self, file: ManifestFile) -> None:
        mf.check_file_name(file.name, f"rank {file.rank}")
        if first := self._files.get(file.name):
            if not file.name.endswith("/") and (not file.xxh3 or file.xxh3 != first.xxh3):
                self._clashes.append(
                    f"Ranks {first.rank} and {file.rank} both reported a checkpoint file {file.name!r}; that of "
                    f"rank {first.rank} is kept. Put the rank into the name to keep both."
                )
        elif blocking := self._in_the_way_of(file.name):
            self._clashes.append(
                f"The checkpoint file {file.name!r} of rank {file.rank} is left out, because rank {blocking.rank} "
                f"reported {blocking.name!r}, and one name cannot be both a file and a directory."
            )
        else:
            self._files[file.name] = file
            for directory in _parents(file.name):
                self._filled.setdefault(directory, file)

    def _in_the_way_of(self, name: str) -> ManifestFile | None:
        """Return a chosen file that needs ``name`` as a directory, or a directory of ``name`` as a file."""
        above = [self._files[directory[:-1]] for directory in _parents(name) if directory[:-1] in self._files]
        same = self._files.get(name[:-1] if name.endswith("/") else f"{name}/")
        return next(iter(above), None) or same or self._filled.get(f"{name}/")


def _parents(name: str) -> Iterator[str]:
    """Yield the directories above a name, each ending in "/"."""
    bare = name.removesuffix("/")
    for position, letter in enumerate(bare):
        if letter == "/":
            yield bare[: position + 1]


def commit(
    storage: Storage,
    chain: Chain,
    *,
    name: str,
    row: int,
    attempt: int,
    files: Sequence[ManifestFile],
    metrics: Mapping[str, Any],
    world_size: int,
    parent: str = "",
    metadata: Mapping[str, Any] | None = None,
    extras: Mapping[str, Any] | None = None,
    elsewhere: str = "",
) -> Manifest:
    """Make files that lie durably below ``checkpoints/{name}/``, with their hashes, a checkpoint.

    With ``elsewhere`` the user has put them there himself, and they need no hashes. Raises
    :class:`CheckpointError` when a file is missing or the name is taken and
    :class:`~powertrain.errors.FencedError` when another controller has the run; nothing is committed then.
    After an ``OSError`` the same call may be made again.
    """
    require_server(storage, elsewhere, f"The checkpoint {name!r}")
    mf.check_file_name(name, "The run")
    found = {entry.key: entry.size for entry in storage.list(f"{TOP}/{name}")}
    text = json.dumps(dict(metadata)).encode() if metadata else b""
    listed = [*files, *_metadata_file(text)]
    if manifest_key(name) not in found and old_manifest_key(name) not in found:
        leave_exactly(storage, f"{TOP}/{name}", () if elsewhere else files, found, text)
    elif chain.unfinished != name:  # else this is a retry, and the chain resolves the first try
        raise already_committed(storage, name)
    return chain.commit(
        Manifest(
            name=name,
            row=row,
            attempt=attempt,
            metrics=dict(metrics),
            world_size=world_size,
            lease=chain.lease,
            parent=parent,
            created=time.time(),
            files=sorted(listed, key=lambda file: file.name),
            extras=dict(extras or {}),
            metadata=dict(metadata or {}),
            elsewhere=elsewhere,
        )
    )


def _metadata_file(text: bytes) -> list[ManifestFile]:
    if not text:
        return []
    digest = xxhash.xxh3_128_hexdigest(text)
    return [ManifestFile(name=METADATA_NAME, size=len(text), xxh3=digest, rank=0)]


def leave_exactly(
    storage: Storage, base: str, files: Sequence[ManifestFile], found: Mapping[str, int], metadata: bytes
) -> None:
    """Keep only ``files``, which must all exist, of the entries ``found`` below ``base``, and put the metadata."""
    for file in files:
        if file.name.endswith("/"):
            _make_directory(storage, f"{base}/{file.name[:-1]}")
        elif found.get(f"{base}/{file.name}") != file.size or not file.xxh3:
            raise CheckpointError(
                f"The file {file.name!r} of rank {file.rank} is not whole in {without_secrets(storage.uri)!r} below "
                f"{base!r}, "
                "so the checkpoint was not committed. Check whether something else writes or deletes there."
            )
    for key in found.keys() - {f"{base}/{file.name}" for file in files}:
        storage.delete(key)
    if metadata:
        storage.put(f"{base}/{METADATA_NAME}", metadata)


def _make_directory(storage: Storage, key: str) -> None:
    """Make an empty directory that survives a crash of the machine; an object store needs none."""
    if isinstance(storage, LocalStorage):
        storage.make_directory(key)


def keys_of_manifests(storage: Storage) -> dict[str, str]:
    """Return the keys of all manifests by checkpoint, also where one is no file any more: it protects the other
    files."""
    keys = [entry.key.split("/") for entry in storage.list(TOP)]
    names = dict.fromkeys(parts[1] for parts in keys if len(parts) >= 3)
    there = {"/".join(parts) for parts in keys if len(parts) == 3}
    found: dict[str, str] = {}
    for name in names:
        for key in (manifest_key(name), old_manifest_key(name)):
            if key in there or is_something_else(storage, key):
                found[name] = key
                break
    return found


def is_something_else(storage: Storage, key: str) -> bool:
    """Return True when a directory, a pipe or the like is in the place of a file of real storage."""
    path = storage.local_path(key)
    return path is not None and os.path.lexists(path) and not path.is_file()
