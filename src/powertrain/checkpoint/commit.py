"""How a checkpoint becomes one, and how the newest good one is found.

A rank's directory is looked at first (:func:`refuse_directory`, :func:`contents`). When every rank has reported,
:func:`merge` says whose file counts for each name; those are carried to ``checkpoints/{name}/`` and hashed on
their way. Then :func:`commit` checks that all are there, and puts the manifest, which names every file with
its size and hash. Only a checkpoint with a manifest exists; whatever else lies there is left over from a crash.

Everything here works on any storage; what only a file system has (empty directories) is made where it can be.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.cache import METADATA_NAME
from powertrain.checkpoint.chain import Chain, already_committed, manifest_key, old_manifest_key
from powertrain.checkpoint.checkpoint import Checkpoint, ReportedCheckpoint, ReportedCheckpointStatus
from powertrain.checkpoint.elsewhere import MARK_NAME, checkpoint_at, require_known_place, require_server
from powertrain.checkpoint.manifest import (
    BOOKKEEPING_PREFIX,
    LATER_METADATA_NAME,
    MANIFEST_NAMES,
    VALIDATION_NAME,
    Manifest,
    ManifestFile,
    Validation,
)
from powertrain.errors import CheckpointError, OtherVersionError, StorageError
from powertrain.storage import Storage, open_storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import LARGE_RECORD_BYTES_LIMIT
from powertrain.storage.local import LocalStorage
from powertrain.wire import Part

_TOP = "checkpoints"
_logger = logging.getLogger("powertrain")


def final_name(row: int, given: str, tag: str) -> str:
    """The name of the checkpoint of ``row``: what ``report`` was given, or the usual one, with the lease's tag."""
    return (f"{given}-{tag}" if tag else given) if given else name_of_row(row, tag)


def name_of_row(row: int, tag: str = "") -> str:
    """The usual name of the checkpoint of a row. For ``tag`` see :func:`powertrain.checkpoint.chain.tag_for`."""
    return f"checkpoint_{row:06d}-{tag}" if tag else f"checkpoint_{row:06d}"


# --------------------------------------------------------------------------- what a rank reports


def refuse_directory(
    storage: Storage,
    directory: str | Path,
    *,
    launch_dir: str | Path = "",
    staging: str | Path = "",
) -> None:
    """Raises :class:`CheckpointError` for a directory that cannot be a checkpoint, whatever is in it.

    ``staging`` is where checkpoints of the node wait for their upload.
    """
    top = Path(os.path.abspath(directory))
    if not top.is_dir():
        found = "is a file" if top.exists() else "does not exist"
        raise CheckpointError(
            f"The checkpoint directory {str(top)!r} {found}. Give report a directory: "
            "Checkpoint.from_directory(path)."
        )
    if _holds(top, storage.local_path(_TOP)):
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
    """True when ``inner`` is ``top`` or lies in it, links followed; False for no path."""
    if not inner or not str(inner):
        return False
    real_top, real_inner = Path(os.path.realpath(top)), Path(os.path.realpath(inner))
    return real_top == real_inner or real_top in real_inner.parents


def contents(directory: str | Path, *, segments: str | Path = "") -> tuple[list[tuple[str, Path]], list[str]]:
    """All files below ``directory`` as (name, path), and the names of its empty directories, both sorted.

    Metadata and files of ours are left out. Links inside the directory are followed, and so are those into
    ``segments``, where state waits in shared memory. Raises :class:`CheckpointError` for what cannot be kept.
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
            elif name != METADATA_NAME and not _is_bookkeeping(name, path):
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


def _is_bookkeeping(name: str, path: Path) -> bool:
    """True for the manifest, and what lies beside it, of a checkpoint of ours that is being reported again."""
    if name not in MANIFEST_NAMES and not ("/" not in name and name.startswith(BOOKKEEPING_PREFIX)):
        return False
    for manifest in (path.parent / name for name in MANIFEST_NAMES):
        if manifest.is_file() and mf.is_manifest(_read_manifest(manifest)):
            return True
    raise CheckpointError(
        f"The checkpoint holds a file named {name!r}, a name that Powertrain needs for its own files. "
        "Give that file another name."
    )


def _read_manifest(path: Path) -> bytes:
    if path.stat().st_size > LARGE_RECORD_BYTES_LIMIT:
        raise CheckpointError(
            f"The manifest {str(path)!r} cannot be read: it has more than {LARGE_RECORD_BYTES_LIMIT:,} bytes, so it is "
            "not what was written. Use another checkpoint."
        )
    return path.read_bytes()


# --------------------------------------------------------------------------- all ranks together


@dataclass
class Merged:
    """The shares of all ranks as one."""

    #: Hashes are "" for what has not been carried yet. An empty directory's name ends in "/".
    files: list[ManifestFile] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    #: One sentence for each thing that ranks brought differently.
    clashes: list[str] = field(default_factory=list)
    #: Where the user put the files himself; "" for nowhere.
    elsewhere: str = ""
    #: Why a rank has no share, by rank.
    errors: dict[int, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """True where no rank brought a file, a directory or metadata."""
        return not (self.files or self.metadata or self.elsewhere)


def merge(parts: Mapping[int, Part]) -> Merged:
    """What the parts add up to: of anything that ranks brought twice the lowest rank's counts. Pure."""
    merged = Merged(errors={rank: part.error for rank, part in sorted(parts.items()) if part.error})
    chosen = _Chosen(merged.clashes)
    whose = 0
    for rank, part in sorted(parts.items()):
        if part.error:
            continue
        merged.metadata = {**part.metadata, **merged.metadata}
        merged.extras = {**part.extras, **merged.extras}
        if part.elsewhere and not merged.elsewhere:
            merged.elsewhere, whose = part.elsewhere, rank
        elif part.elsewhere and part.elsewhere != merged.elsewhere:
            merged.clashes.append(
                f"Ranks {whose} and {rank} uploaded one checkpoint to {merged.elsewhere!r} and to "
                f"{part.elsewhere!r}; the first is kept. Upload all its files to one place."
            )
        if part.elsewhere and rank != whose:
            continue  # the same place again, or one that is not kept
        for file in part.files:
            chosen.add(ManifestFile(name=file.name, size=file.size, xxh3=file.xxh3, rank=rank))
    merged.files = chosen.files()
    return merged


class _Chosen:
    """Files by name, the first that came under each; ``clashes`` gets a sentence for what had to stay out."""

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
        """What was chosen already and needs ``name`` as a directory, or a directory of ``name`` as a file."""
        above = [self._files[directory[:-1]] for directory in _parents(name) if directory[:-1] in self._files]
        same = self._files.get(name[:-1] if name.endswith("/") else f"{name}/")
        return next(iter(above), None) or same or self._filled.get(f"{name}/")


def _parents(name: str) -> Iterator[str]:
    """The directories above a name, each ending in "/"."""
    bare = name.removesuffix("/")
    for position, letter in enumerate(bare):
        if letter == "/":
            yield bare[: position + 1]


# --------------------------------------------------------------------------- committing


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
    found = {entry.key: entry.size for entry in storage.list(f"{_TOP}/{name}")}
    text = json.dumps(dict(metadata)).encode() if metadata else b""
    listed = [*files, *_metadata_file(text)]
    if manifest_key(name) not in found and old_manifest_key(name) not in found:
        _leave_exactly(storage, f"{_TOP}/{name}", () if elsewhere else files, found, text)
    elif (
        chain.unfinished != name
    ):  # else this is another try, and the chain finds out what became of the first
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


def _leave_exactly(
    storage: Storage, base: str, files: Sequence[ManifestFile], found: Mapping[str, int], metadata: bytes
) -> None:
    """Of what was ``found`` below ``base`` leave ``files``, all of which must be there, and put the metadata."""
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


# --------------------------------------------------------------------------- finding


def committed(storage: Storage) -> list[Manifest]:
    """All checkpoints with a readable manifest, the oldest commit first; the others are warned about."""
    manifests = []
    for _, found in _manifests(storage):
        if isinstance(found, Manifest):
            manifests.append(found)
        elif found is not None:
            _logger.warning("%s The checkpoint is left out.", found)
    return sorted(manifests, key=_age)


def _age(manifest: Manifest) -> tuple[int, int, int, int, float]:
    """Orders commits of one run; clocks come last, because they may be wrong."""
    return (manifest.link, manifest.lease, manifest.attempt, manifest.row, manifest.created)


def newest(storage: Storage) -> Manifest | None:
    """The checkpoint committed last, unverified."""
    return next(reversed(committed(storage)), None)


def _manifests(storage: Storage) -> Iterator[tuple[str, Manifest | CheckpointError | None]]:
    """Every name with a manifest: the manifest, why it cannot be read, or None for a void one."""
    for name, key in _keys_of_manifests(storage).items():
        where = f"The manifest {key!r} of {without_secrets(storage.uri)!r}"
        try:
            data = storage.get(key, limit=LARGE_RECORD_BYTES_LIMIT)
            manifest = None if mf.is_void(data) else mf.decode(data, where)
            if manifest is not None and manifest.name != name:
                raise CheckpointError(
                    f"{where} is that of another checkpoint, {manifest.name!r}: it was copied."
                )
            if manifest is not None:
                require_known_place(storage, manifest.elsewhere, where)
            yield name, manifest
        except CheckpointError as error:
            yield name, error
        except FileNotFoundError:
            if _is_something_else(storage, key):
                yield name, CheckpointError(f"{where} is not a file: something else is in its place.")
            # else it was discarded while we looked
        except OSError as error:
            if _is_passing(storage, error):
                raise
            yield name, CheckpointError(f"{where} cannot be read: {error.strerror or error}.")


def _is_passing(storage: Storage, error: OSError) -> bool:
    """True where storage across a network may give a file later that it does not give now."""
    return storage.local_path("x") is None and error.errno != errno.EFBIG


def _keys_of_manifests(storage: Storage) -> dict[str, str]:
    """The keys of all manifests by checkpoint, also where one is no file any more: it protects the other files."""
    keys = [entry.key.split("/") for entry in storage.list(_TOP)]
    names = dict.fromkeys(parts[1] for parts in keys if len(parts) >= 3)
    there = {"/".join(parts) for parts in keys if len(parts) == 3}
    found: dict[str, str] = {}
    for name in names:
        for key in (manifest_key(name), old_manifest_key(name)):
            if key in there or _is_something_else(storage, key):
                found[name] = key
                break
    return found


def _is_something_else(storage: Storage, key: str) -> bool:
    """True when a directory, a pipe or the like is in the place of a file of real storage."""
    path = storage.local_path(key)
    return path is not None and os.path.lexists(path) and not path.is_file()


def checkpoint_of(storage: Storage, manifest: Manifest) -> Checkpoint:
    """The committed checkpoint as a value."""
    if manifest.elsewhere:
        return checkpoint_at(storage, manifest.elsewhere)
    path = storage.local_path(f"{_TOP}/{manifest.name}")
    if path is not None:
        return Checkpoint(path)
    filesystem = getattr(storage, "filesystem", None)
    return Checkpoint(storage.child(f"{_TOP}/{manifest.name}").uri, filesystem)


# --------------------------------------------------------------------------- verifying


def verify(storage: Storage, manifest: Manifest) -> None:
    """Read every file; raises :class:`CheckpointError` naming the first that is missing or has changed.

    Storage that does not answer is another matter, and its ``OSError`` passes through.
    """
    if manifest.elsewhere:
        _verify_elsewhere(storage, manifest)
        return
    base = f"{_TOP}/{manifest.name}"
    found = {entry.key: entry.size for entry in storage.list(base)}
    for file in manifest.files:
        if file.name.endswith("/"):
            path = storage.local_path(f"{base}/{file.name[:-1]}")
            if path is not None and not path.is_dir():
                raise CheckpointError(
                    f"The directory {file.name!r} of checkpoint {manifest.name!r} is missing."
                )
        else:
            _verify_file(storage, manifest.name, file, found.get(f"{base}/{file.name}"))
    later = f"{base}/{LATER_METADATA_NAME}"
    if later in found:
        which = f"The file {LATER_METADATA_NAME!r} of checkpoint {manifest.name!r}"
        try:
            mf.unseal(storage.get(later, limit=LARGE_RECORD_BYTES_LIMIT), which)
        except OSError as error:
            if _is_passing(storage, error):
                raise
            raise CheckpointError(f"{which} cannot be read: {error.strerror or error}.") from error


def _verify_file(storage: Storage, checkpoint: str, file: ManifestFile, size: int | None) -> None:
    which = f"The file {file.name!r} of checkpoint {checkpoint!r}"
    if size is None:
        raise CheckpointError(f"{which} is missing.")
    if size != file.size:
        raise CheckpointError(f"{which} has {size} bytes; {file.size} were committed.")
    key = f"{_TOP}/{checkpoint}/{file.name}"
    try:
        digest = storage.digest(key)
    except OSError as error:
        if storage.local_path(key) is None and not isinstance(error, FileNotFoundError):
            raise
        raise CheckpointError(f"{which} cannot be read: {error.strerror or error}.") from error
    if digest.xxh3 != file.xxh3:
        raise CheckpointError(
            f"{which} has other content than was committed (xxh3 {digest.xxh3}, not {file.xxh3})."
        )


def _verify_elsewhere(storage: Storage, manifest: Manifest) -> None:
    """The user's own upload has no hashes of ours: that every file is there with its size is all that can be said."""
    require_known_place(storage, manifest.elsewhere, f"The checkpoint {manifest.name!r}")
    checkpoint = checkpoint_of(storage, manifest)
    wanted = {file.name: file.size for file in manifest.files if file.name != METADATA_NAME}
    try:
        there = open_storage(checkpoint.address, filesystem=checkpoint.given_filesystem)
        found = _sizes(there, wanted)
    except StorageError as error:
        raise CheckpointError(
            f"The files of checkpoint {manifest.name!r}, which the training function uploaded, cannot be reached: "
            f"{error}"
        ) from error
    damaged = sorted(name for name, size in wanted.items() if found.get(name) != size)
    if damaged or not found:
        what = f"{damaged[0]!r} is missing or has another size" if damaged else "they are no longer there"
        raise CheckpointError(
            f"The files of checkpoint {manifest.name!r}, which the training function uploaded to "
            f"{manifest.elsewhere!r}, are not as they were: {what}."
        )


def _sizes(there: Storage, wanted: Iterable[str]) -> dict[str, int]:
    """The sizes of the wanted files. Not all files of a directory are looked at: a manifest may name a large one."""
    top = there.local_path("x")
    if top is None:
        return {entry.key: entry.size for entry in there.list()}
    found = {}
    for name in wanted:
        try:
            status = os.stat(top.parent / name)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found[name] = status.st_size
    if found or not top.parent.is_dir():
        return found
    with os.scandir(top.parent) as entries:
        return {"": 0} if any(entry.name != MARK_NAME for entry in entries) else {}


def newest_verified(storage: Storage, tell: Callable[[str], None]) -> Manifest | None:
    """Return the newest checkpoint whose files are all as committed.

    ``tell`` is called for each that is not, and for the one that is used. Changes nothing. A controller that
    goes on from an older one calls :func:`set_aside_newer` next.
    """
    found = [result for _, result in _manifests(storage)]
    troubles = [result for result in found if isinstance(result, CheckpointError)]
    for error in troubles:
        tell(f"{error} The checkpoint cannot be used.")
    for manifest in sorted(
        (result for result in found if isinstance(result, Manifest)), key=_age, reverse=True
    ):
        try:
            verify(storage, manifest)
        except CheckpointError as error:
            troubles.append(error)
            tell(f"{error} The checkpoint cannot be used; the one before it is tried.")
            continue
        if troubles:
            tell(f"Checkpoint {manifest.name!r} (row {manifest.row}) is whole and is used instead.")
        return manifest
    if troubles:
        tell("No other checkpoint of the run is left, so there is none to go on from.")
    return None


# --------------------------------------------------------------------------- validation


def record_validation(storage: Storage, name: str, validation: Validation) -> None:
    """Keep what validating a committed checkpoint came to, replacing what was kept before."""
    storage.put(f"{_TOP}/{name}/{VALIDATION_NAME}", mf.encode_validation(validation))


def validations(storage: Storage, tell: Callable[[str], None] = _logger.warning) -> dict[str, Validation]:
    """What is kept about validations, by checkpoint; ``tell`` is called for each that cannot be read."""
    found = {}
    for entry in storage.list(_TOP):
        parts = entry.key.split("/")
        if len(parts) == 3 and parts[2] == VALIDATION_NAME:
            where = f"The validation result {entry.key!r} of {without_secrets(storage.uri)!r}"
            try:
                found[parts[1]] = mf.decode_validation(
                    storage.get(entry.key, limit=LARGE_RECORD_BYTES_LIMIT), where
                )
            except CheckpointError as error:
                tell(f"{error} It is left out.")
            except FileNotFoundError:
                continue
            except OSError as error:
                if _is_passing(storage, error):
                    raise
                tell(f"{where} cannot be read: {error.strerror or error}. It is left out.")
    return found


def with_validations(manifests: Sequence[Manifest], results: Mapping[str, Validation]) -> list[Manifest]:
    """The manifests with the metrics of their validations among their own; of one name validation's counts. Pure."""
    return [
        msgspec.structs.replace(manifest, metrics={**manifest.metrics, **results[manifest.name].metrics})
        if manifest.name in results
        else manifest
        for manifest in manifests
    ]


def reported(storage: Storage) -> list[ReportedCheckpoint]:
    """Every committed checkpoint with its metrics and what became of its validation, the oldest first."""
    results = validations(storage)
    return [
        ReportedCheckpoint(
            checkpoint=checkpoint_of(storage, manifest),
            metrics=dict(manifest.metrics),
            status=_status(results.get(manifest.name)),
        )
        for manifest in with_validations(committed(storage), results)
    ]


def _status(validation: Validation | None) -> ReportedCheckpointStatus:
    if validation is None:
        return ReportedCheckpointStatus.COMMITTED
    return ReportedCheckpointStatus.__members__.get(validation.status, ReportedCheckpointStatus.COMMITTED)


# --------------------------------------------------------------------------- removing


def discard(storage: Storage, name: str) -> None:
    """Remove a checkpoint, its manifest first: cut short, this leaves leftovers and no broken checkpoint.

    Files that the user uploaded elsewhere are his, and stay. A void manifest stays for ever: it is what keeps a
    controller that was frozen from committing.
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
        _leave_exactly(storage, f"{_TOP}/{name}", (), _files_beside_manifest(storage, name), b"")
    else:
        storage.delete(manifest_key(name))
        storage.delete(old_manifest_key(name))
        storage.delete_tree(f"{_TOP}/{name}")


def _files_beside_manifest(storage: Storage, name: str) -> dict[str, int]:
    entries = storage.list(f"{_TOP}/{name}")
    manifests = (manifest_key(name), old_manifest_key(name))
    return {entry.key: entry.size for entry in entries if entry.key not in manifests}


def void_names(storage: Storage) -> list[str]:
    """Names that can never be committed, because a run was taken over while they were being committed."""
    return [name for name, found in _manifests(storage) if found is None]


def refuse_other_versions(storage: Storage) -> None:
    """Raise :class:`OtherVersionError` where a checkpoint of the run is whole but not for this version to read."""
    for _, found in _manifests(storage):
        if isinstance(found, OtherVersionError):
            raise found


def verify_alone(checkpoint: Checkpoint) -> None:
    """Verify a local checkpoint of any run by the manifest that lies in it; one without a manifest cannot be."""
    paths = [Path(checkpoint.path, name) for name in MANIFEST_NAMES]
    path = next((path for path in paths if path.is_file()), paths[0])
    if not path.is_file() or not mf.is_manifest(data := _read_manifest(path)):
        return
    manifest = mf.decode(data, f"The manifest {str(path)!r}")
    storage = open_storage(checkpoint.path)
    found = {entry.key: entry.size for entry in storage.list()}
    for file in manifest.files:
        if file.name.endswith("/") or manifest.elsewhere:
            continue
        if found.get(file.name) != file.size or storage.digest(file.name).xxh3 != file.xxh3:
            raise CheckpointError(
                f"The file {file.name!r} of the checkpoint {checkpoint.path!r} is missing or has changed since it was "
                "committed. Use another checkpoint."
            )


def sweep_uncommitted(storage: Storage) -> list[str]:
    """Remove what lies in ``checkpoints/`` without a manifest; returns the names.

    Only while nothing of the run is alive: unfinished checkpoints look the same. A manifest that cannot be read
    protects its checkpoint, because another version may have written it; a void one stays, without its files.
    """
    names = {entry.key.split("/")[1] for entry in storage.list(_TOP) if entry.key.count("/") >= 2}
    with_manifest = dict(_manifests(storage))
    left_over = sorted(names - with_manifest.keys())
    for name in left_over:
        storage.delete_tree(f"{_TOP}/{name}")
    for name in [name for name, found in with_manifest.items() if found is None]:
        extra = list(_files_beside_manifest(storage, name))
        for key in extra:
            storage.delete(key)
        left_over += [name] if extra else []
    return left_over


def set_aside_newer(storage: Storage, kept: Manifest | None) -> list[str]:
    """Move every checkpoint that is not ``kept`` or older to ``broken/``; returns the new places.

    A run that goes on from an older checkpoint will come to the same rows, and so the same names, again.
    Nothing happens when ``kept`` is the newest and every manifest can be read.
    """
    places = []
    keys = _keys_of_manifests(storage)
    for name, found in list(_manifests(storage)):
        older = isinstance(found, Manifest) and kept is not None and _age(found) <= _age(kept)
        if older or found is None:
            continue
        place = _free_place(storage, name)
        storage.move(keys[name], f"{place}/{keys[name].rpartition('/')[2]}")
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
