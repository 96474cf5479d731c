"""What ``report`` does with a checkpoint: stage it, or note where the user has put it himself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powertrain import wire
from powertrain.config import CheckpointUploadMode, ValidationTaskConfig
from powertrain.errors import CheckpointError, ReportError
from powertrain.worker.progress import progress
from powertrain.worker.values import is_pending, resolve

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.worker.context import Session

#: A file system's limit is 255 bytes; some are for what is added after a start that was cut off.
_LONGEST_NAME = 200
UploadFunction = Callable[["Checkpoint", str], "Checkpoint"]


@dataclass(frozen=True)
class SaveOptions:
    """How one checkpoint is to be kept: what ``report`` was told besides the checkpoint itself."""

    name: str | None = None
    mode: CheckpointUploadMode = CheckpointUploadMode.ASYNC
    #: True when the directory need not stay where it is.
    take: bool = False
    upload: UploadFunction | None = None
    validation: wire.Validation | None = None


def options(
    name: str | None,
    mode: CheckpointUploadMode | str | None,
    delete_local: bool | None,
    upload: UploadFunction | None,
    validation: bool | ValidationTaskConfig,
) -> SaveOptions:
    """The arguments of ``report``, checked; raises :class:`ReportError` for what cannot be."""
    chosen = CheckpointUploadMode.ASYNC if mode is None else mode
    if isinstance(chosen, str) and chosen.upper() in CheckpointUploadMode.__members__:
        chosen = CheckpointUploadMode[chosen.upper()]
    if not isinstance(chosen, CheckpointUploadMode):
        raise ReportError(
            f"report(checkpoint_upload_mode={mode!r}) is not a mode. Use CheckpointUploadMode.ASYNC, .SYNC or "
            ".NO_UPLOAD."
        )
    if upload is not None and not callable(upload):
        raise ReportError("report(checkpoint_upload_fn=...) must be a function of (checkpoint, name).")
    if chosen is CheckpointUploadMode.NO_UPLOAD and (upload is not None or delete_local):
        raise ReportError(
            "report(checkpoint_upload_mode=NO_UPLOAD) says that the files are in their place already, so there is "
            "nothing for checkpoint_upload_fn or delete_local_checkpoint_after_upload to do. Leave those out."
        )
    return SaveOptions(name, chosen, bool(delete_local), upload, _validation(validation))


def _validation(asked: bool | ValidationTaskConfig) -> wire.Validation | None:
    if isinstance(asked, ValidationTaskConfig):
        return wire.Validation(arguments=dict(asked.fn_kwargs or {}), timeout=asked.timeout_s or 0.0)
    if not isinstance(asked, bool):
        raise ReportError(
            f"report(validation={asked!r}) must be True, False or a ValidationTaskConfig with the function's arguments."
        )
    return wire.Validation() if asked else None


def refuse_validation(session: Session) -> None:
    """Raise :class:`ReportError` where the trainer was given no validation function."""
    if not session.place.validates:
        raise ReportError(
            "report(validation=...) asks for a validation, but the trainer was given no function for it. Give it "
            "validation_config=ValidationConfig(fn=...), or leave validation out."
        )


def share(session: Session, checkpoint: Checkpoint, how: SaveOptions, row: int) -> wire.Part:
    """This rank's share of the checkpoint of ``row``. On return the caller may change or delete the directory.

    Raises :class:`ReportError` or :class:`CheckpointError` for what cannot be a checkpoint. A disk that is full
    raises nothing: it is told to the run, and training goes on.
    """
    if not hasattr(checkpoint, "path"):
        raise ReportError(
            f"report(checkpoint=...) was given a {type(checkpoint).__name__}. Give a Checkpoint, such as "
            "Checkpoint.from_directory(path)."
        )
    if how.name is not None:
        _check_name(session, how.name)
    phase, progress.phase = progress.phase, "checkpoint"
    try:
        if how.mode is CheckpointUploadMode.NO_UPLOAD:
            part = _kept_elsewhere(checkpoint)
        else:
            part = _staged(session, checkpoint, how, row)
    finally:
        progress.phase = phase
    if how.name is not None:
        session.checkpoint_names.add(how.name)
    extras = {**part.extras, **session.data.extras_of(checkpoint)}
    return _with(part, checkpoint=how.name or "", validation=how.validation, extras=extras)


def sealed(session: Session, point: wire.Point) -> wire.Point:
    """The report, whose staged share now counts even if this process dies; where it cannot be sealed, without one."""
    part = point.part
    if part is None or not part.staged:
        return point
    metrics = resolve(point.metrics) if is_pending(point.metrics) else point.metrics
    try:
        session.staging.seal(_with(point, metrics=metrics))
    except OSError as error:
        session.staging.discard(point.row)
        return _with(point, part=_unstaged(session, error, checkpoint=part.checkpoint))
    return point


def _unstaged(session: Session, error: OSError, checkpoint: str = "") -> wire.Part:
    """What the run is told of a share that could not be staged."""
    reason = f"rank {session.place.rank} could not stage it: {error}"
    return wire.Part(checkpoint=checkpoint, files=[], error=reason)


def upload_beside(session: Session, part: wire.Part, how: SaveOptions, row: int) -> None:
    """Run the user's own upload function on a thread; how it ends is told to the run."""
    assert how.upload is not None
    upload, name = how.upload, session.final_name(row, how.name)

    def work() -> None:
        place = session.place
        told = wire.Carried(attempt=place.attempt, row=row, rank=place.rank)
        try:
            told = _with(told, **_uploaded(upload, part.staged, name))
        except Exception as error:
            told = _with(told, error=f"checkpoint_upload_fn raised {type(error).__name__}: {error}")
        session.service.post(told)

    threading.Thread(target=work, name=f"powertrain-upload-{row}", daemon=True).start()


def _uploaded(upload: UploadFunction, staged: str, name: str) -> dict[str, Any]:
    import shutil

    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.checkpoint.saver import source_of

    kept = upload(Checkpoint(str(source_of(staged, ""))), name)
    if not hasattr(kept, "path"):
        raise ReportError(f"it returned a {type(kept).__name__}, not the Checkpoint where it put the files")
    found = _kept_elsewhere(kept)
    shutil.rmtree(staged, ignore_errors=True)
    return {"files": found.files, "elsewhere": found.elsewhere}


def _staged(session: Session, checkpoint: Checkpoint, how: SaveOptions, row: int) -> wire.Part:
    from powertrain.checkpoint.commit import refuse_directory

    place = session.place
    if "://" in checkpoint.path or checkpoint.given_filesystem is not None:
        directory, take = checkpoint.to_directory(session.staging.new_directory()), True
    else:
        directory, take = checkpoint.path, how.take and not _is_of_a_run(session, checkpoint.path)
        refuse_directory(
            session.storage,
            directory,
            launch_dir=place.launch_dir,
            scratch=place.scratch,
            staging=place.staging,
        )
    try:
        part = session.staging.stage(row, directory, take=take)
    except OSError as error:
        return _unstaged(session, error)
    return _with(part, pending=how.upload is not None)


def _is_of_a_run(session: Session, directory: str) -> bool:
    """True for what a run keeps: a committed checkpoint is copied, whatever the caller wants to happen to it."""
    from powertrain.checkpoint.manifest import MANIFEST_NAME

    run = session.storage.local_path("x")
    real, staging = os.path.realpath(directory), os.path.realpath(session.place.staging or "/nowhere")
    inside = (
        run is not None and _is_below(real, os.path.realpath(run.parent)) and not _is_below(real, staging)
    )
    return inside or os.path.exists(os.path.join(directory, MANIFEST_NAME))


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _kept_elsewhere(checkpoint: Checkpoint) -> wire.Part:
    """A share that lies where the user has put it: its names and sizes, as they are there now."""
    from powertrain.checkpoint.manifest import BOOKKEEPING_PREFIX, MANIFEST_NAME
    from powertrain.storage import open_storage
    from powertrain.storage.addresses import has_secrets

    storage = open_storage(checkpoint.path, filesystem=checkpoint.given_filesystem)
    files = [
        wire.FilePart(name=entry.key, size=entry.size)
        for entry in storage.list()
        if entry.key != MANIFEST_NAME and not entry.key.startswith(BOOKKEEPING_PREFIX)
    ]
    if not files:
        raise CheckpointError(
            f"{checkpoint!r} holds no file, so it cannot be a checkpoint. Check the place that you uploaded it to."
        )
    if has_secrets(checkpoint.path):
        raise CheckpointError(
            f"{checkpoint!r} has a password or key in its address, which would be kept with the run. Give it in the "
            "environment instead."
        )
    return wire.Part(checkpoint="", files=files, elsewhere=checkpoint.path)


def _check_name(session: Session, name: str) -> None:
    """A checkpoint's name is one plain directory name that this run has not used."""
    plain = isinstance(name, str) and name.isprintable() and "/" not in name and not name.startswith(".")
    if not plain or not 0 < len(name.encode()) <= _LONGEST_NAME:
        raise ReportError(
            f"report(checkpoint_dir_name={name!r}) is not a plain name: it must be printable text of at most "
            f"{_LONGEST_NAME} bytes, without '/', and not begin with '.'. Use something like 'epoch-3'."
        )
    if name in session.checkpoint_names:
        raise ReportError(
            f"report(checkpoint_dir_name={name!r}) names a checkpoint that this run has already. Give each its own "
            "name; Result.checkpoint is always the newest, and CheckpointConfig(num_to_keep=...) deletes old ones."
        )


def _with(struct: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(struct, **changes)
