"""Committed checkpoints of a run: list, verify, and record the result of a validation."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.cache import METADATA_NAME
from powertrain.checkpoint.checkpoint import Checkpoint, ReportedCheckpoint, ReportedCheckpointStatus
from powertrain.checkpoint.commit import is_something_else, keys_of_manifests
from powertrain.checkpoint.contents import TOP, read_manifest
from powertrain.checkpoint.elsewhere import MARK_NAME, checkpoint_at, require_known_place
from powertrain.checkpoint.manifest import (
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
from powertrain.text.loggers import module_logger
from powertrain.text.progress import ProgressBar

_logger = module_logger(__name__)


def committed(storage: Storage) -> list[Manifest]:
    """Return all checkpoints with a readable manifest, the oldest commit first; the others are warned about."""
    manifests = []
    for _, found in all_manifests(storage):
        if isinstance(found, Manifest):
            manifests.append(found)
        elif found is not None:
            _logger.warning("%s The checkpoint is left out.", found)
    return sorted(manifests, key=age)


def age(manifest: Manifest) -> tuple[int, int, int, int, float]:
    """Orders commits of one run; clocks come last, because they may be wrong."""
    return (manifest.link, manifest.lease, manifest.attempt, manifest.row, manifest.created)


def newest(storage: Storage) -> Manifest | None:
    """Return the checkpoint committed last, unverified."""
    return next(reversed(committed(storage)), None)


def all_manifests(storage: Storage) -> Iterator[tuple[str, Manifest | CheckpointError | None]]:
    """Yield every name with a manifest: the manifest, why it cannot be read, or None for a void one."""
    for name, key in keys_of_manifests(storage).items():
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
            if is_something_else(storage, key):
                yield name, CheckpointError(f"{where} is not a file: something else is in its place.")
            # else it was discarded while we looked
        except OSError as error:
            if _is_passing(storage, error):
                raise
            yield name, CheckpointError(f"{where} cannot be read: {error.strerror or error}.")


def _is_passing(storage: Storage, error: OSError) -> bool:
    """Return True where storage across a network may give a file later that it does not give now."""
    return storage.local_path("x") is None and error.errno != errno.EFBIG


def checkpoint_of(storage: Storage, manifest: Manifest) -> Checkpoint:
    """Return the committed checkpoint as a value."""
    if manifest.elsewhere:
        return checkpoint_at(storage, manifest.elsewhere)
    path = storage.local_path(f"{TOP}/{manifest.name}")
    if path is not None:
        return Checkpoint(path)
    filesystem = getattr(storage, "filesystem", None)
    return Checkpoint(storage.child(f"{TOP}/{manifest.name}").uri, filesystem)


def verify(storage: Storage, manifest: Manifest) -> None:
    """Read every file; raises :class:`CheckpointError` naming the first that is missing or has changed.

    Storage that does not answer is another matter, and its ``OSError`` passes through.
    """
    if manifest.elsewhere:
        _verify_elsewhere(storage, manifest)
        return
    base = f"{TOP}/{manifest.name}"
    found = {entry.key: entry.size for entry in storage.list(base)}
    with ProgressBar(f"verifying {manifest.name}", sum(file.size for file in manifest.files)) as bar:
        for file in manifest.files:
            if not file.name.endswith("/"):
                _verify_file(storage, manifest.name, file, found.get(f"{base}/{file.name}"))
                bar.advance(file.size)
                continue
            path = storage.local_path(f"{base}/{file.name[:-1]}")
            if path is not None and not path.is_dir():
                raise CheckpointError(
                    f"The directory {file.name!r} of checkpoint {manifest.name!r} is missing."
                )
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
    key = f"{TOP}/{checkpoint}/{file.name}"
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
    """Check that every file of a user's own upload exists with its size; there are no hashes to verify."""
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
    """Return the sizes of the wanted files. Not all files of a directory are looked at: a manifest may name a large
    one."""
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


def newest_verified(storage: Storage, warn: Callable[[str], None]) -> Manifest | None:
    """Return the newest checkpoint whose files are all as committed.

    ``warn`` is called for each that is not, and for the one that is used. Changes nothing. A controller that resumes
    from an older one calls :func:`set_aside_newer` next.
    """
    found = [result for _, result in all_manifests(storage)]
    troubles = [result for result in found if isinstance(result, CheckpointError)]
    for error in troubles:
        warn(f"{error} The checkpoint cannot be used.")
    for manifest in sorted(
        (result for result in found if isinstance(result, Manifest)), key=age, reverse=True
    ):
        try:
            verify(storage, manifest)
        except CheckpointError as error:
            troubles.append(error)
            warn(f"{error} The checkpoint cannot be used; the one before it is tried.")
            continue
        if troubles:
            warn(f"Checkpoint {manifest.name!r} (row {manifest.row}) is whole and is used instead.")
        return manifest
    if troubles:
        warn("No other checkpoint of the run is left, so there is none to resume from.")
    return None


def record_validation(storage: Storage, name: str, validation: Validation) -> None:
    """Store the result of validating a committed checkpoint, replacing an earlier one."""
    storage.put(f"{TOP}/{name}/{VALIDATION_NAME}", mf.encode_validation(validation))


def validations(storage: Storage, warn: Callable[[str], None] = _logger.warning) -> dict[str, Validation]:
    """Return the stored validation results, by checkpoint; ``warn`` is called for each unreadable one."""
    found = {}
    for entry in storage.list(TOP):
        parts = entry.key.split("/")
        if len(parts) == 3 and parts[2] == VALIDATION_NAME:
            where = f"The validation result {entry.key!r} of {without_secrets(storage.uri)!r}"
            try:
                found[parts[1]] = mf.decode_validation(
                    storage.get(entry.key, limit=LARGE_RECORD_BYTES_LIMIT), where
                )
            except CheckpointError as error:
                warn(f"{error} It is left out.")
            except FileNotFoundError:
                continue
            except OSError as error:
                if _is_passing(storage, error):
                    raise
                warn(f"{where} cannot be read: {error.strerror or error}. It is left out.")
    return found


def with_validations(manifests: Sequence[Manifest], results: Mapping[str, Validation]) -> list[Manifest]:
    """Return the manifests with the metrics of their validations among their own; of one name validation's counts.
    Pure."""
    return [
        msgspec.structs.replace(manifest, metrics={**manifest.metrics, **results[manifest.name].metrics})
        if manifest.name in results
        else manifest
        for manifest in manifests
    ]


def reported(storage: Storage) -> list[ReportedCheckpoint]:
    """Return every committed checkpoint with its metrics and its validation result, the oldest first."""
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


def refuse_other_versions(storage: Storage) -> None:
    """Raise :class:`OtherVersionError` where a checkpoint of the run is whole but not for this version to read."""
    for _, found in all_manifests(storage):
        if isinstance(found, OtherVersionError):
            raise found


def verify_alone(checkpoint: Checkpoint) -> None:
    """Verify a local checkpoint of any run by the manifest that lies in it; one without a manifest cannot be."""
    paths = [Path(checkpoint.path, name) for name in MANIFEST_NAMES]
    path = next((path for path in paths if path.is_file()), paths[0])
    if not path.is_file() or not mf.is_manifest(data := read_manifest(path)):
        return
    manifest = mf.decode(data, f"The manifest {str(path)!r}")
    storage = open_storage(checkpoint.path)
    found = {entry.key: entry.size for entry in storage.list()}
    with ProgressBar(f"verifying {manifest.name}", sum(file.size for file in manifest.files)) as bar:
        for file in manifest.files:
            if file.name.endswith("/") or manifest.elsewhere:
                continue
            if found.get(file.name) != file.size or storage.digest(file.name).xxh3 != file.xxh3:
                raise CheckpointError(
                    f"The file {file.name!r} of the checkpoint {checkpoint.path!r} is missing or has changed since it "
                    "was committed. Use another checkpoint."
                )
            bar.advance(file.size)
