"""The checkpoint of a ``report``: staged, or recorded at the place where the user has put it."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from powertrain.config.checkpoint import CheckpointUploadMode
from powertrain.config.validation import ValidationTaskConfig
from powertrain.errors import CheckpointError, ReportError
from powertrain.text.errors import describe_error
from powertrain.values.arguments import as_flag, has_attribute, plain_scalar, shorten
from powertrain.wire.from_worker import Noted, ShareUploaded
from powertrain.wire.values import CheckpointPart, Point, ValidationRequest
from powertrain.worker.checkpoints.shared_directory import (
    BEFORE_ALL,
    copy_new_entries,
    is_same_directory,
    output_files,
)
from powertrain.worker.progress import progress
from powertrain.worker.values import is_pending, resolve

if TYPE_CHECKING:
    from msgspec import Struct

    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.worker.session import Session

S = TypeVar("S", bound="Struct")

#: A file system's limit is 255 bytes; some are for what is added after a start that was cut off.
_LONGEST_NAME = 200
#: So many files are named in a warning.
_NAMED = 10
UploadFunction = Callable[["Checkpoint", str], "Checkpoint"]


@dataclass(frozen=True)
class SaveOptions:
    """How one checkpoint is kept: the arguments of ``report`` besides the checkpoint itself."""

    name: str | None = None
    mode: CheckpointUploadMode = CheckpointUploadMode.ASYNC
    #: True when the directory need not stay where it is.
    take: bool = False
    upload: UploadFunction | None = None
    validation: ValidationRequest | None = None


def options(
    name: str | None,
    mode: CheckpointUploadMode | str | None,
    delete_local: bool | None,
    upload: UploadFunction | None,
    validation: bool | ValidationTaskConfig,
) -> SaveOptions:
    """Check and return the arguments of ``report``; raises :class:`ReportError` for invalid ones."""
    chosen = CheckpointUploadMode.ASYNC if mode is None else mode
    if isinstance(chosen, str) and chosen.upper() in CheckpointUploadMode.__members__:
        chosen = CheckpointUploadMode[chosen.upper()]
    if not isinstance(chosen, CheckpointUploadMode):
        raise ReportError(
            f"report(checkpoint_upload_mode={shorten(mode)}) is not a mode. Use CheckpointUploadMode.ASYNC, .SYNC or "
            ".NO_UPLOAD."
        )
    if upload is not None and not callable(upload):
        raise ReportError("report(checkpoint_upload_fn=...) must be a function of (checkpoint, name).")
    if delete_local is None:
        # As in Ray: a loop that asks for ASYNC makes a new directory for each checkpoint and removes none.
        delete_local = mode is not None and chosen is CheckpointUploadMode.ASYNC
    delete_local = as_flag(delete_local, "report(delete_local_checkpoint_after_upload=...)", ReportError)
    if chosen is CheckpointUploadMode.NO_UPLOAD and (upload is not None or delete_local):
        raise ReportError(
            "report(checkpoint_upload_mode=NO_UPLOAD) says that the files are in their place already, so there is "
            "nothing for checkpoint_upload_fn or delete_local_checkpoint_after_upload to do. Leave those out."
        )
    return SaveOptions(name, chosen, delete_local, upload, _validation(validation))


def is_sync(mode: CheckpointUploadMode | str | None) -> bool:
    """Return True for the mode in which ``report`` waits for the commit; also for a rank that reports no checkpoint."""
    return mode is CheckpointUploadMode.SYNC or (isinstance(mode, str) and mode.upper() == "SYNC")


def _validation(value: bool | ValidationTaskConfig) -> ValidationRequest | None:
    if isinstance(value, ValidationTaskConfig):
        return ValidationRequest(arguments=dict(value.fn_kwargs or {}), timeout=value.timeout_s or 0.0)
    return ValidationRequest() if value else None


def check_validation(session: Session, value: Any) -> bool | ValidationTaskConfig:
    """Return the argument of ``report(validation=...)``. Raises :class:`ReportError` for another type, and where the
    trainer was given no validation function."""
    plain = plain_scalar(value)
    if not isinstance(plain, (bool, ValidationTaskConfig)):
        raise ReportError(
            f"report(validation={shorten(value)}) must be True, False or a ValidationTaskConfig with the function's "
            "arguments."
        )
    if isinstance(plain, ValidationTaskConfig):
        _refuse_what_cannot_be_kept(plain)
    if plain is not False:
        _refuse_validation(session)
    return plain


def _refuse_what_cannot_be_kept(value: ValidationTaskConfig) -> None:
    """Raise for arguments that cannot be kept with the checkpoint, for a validation by a later process: nothing is
    unpickled there."""
    try:
        json.dumps(dict(value.fn_kwargs))
    except (TypeError, ValueError, RecursionError) as error:
        raise ReportError(
            f"report(validation=ValidationTaskConfig(fn_kwargs=...)) cannot be kept with the checkpoint: it cannot be "
            f"written as JSON ({error}). Give numbers, strings, lists and dicts here, and the rest to the trainer: "
            "ValidationConfig(task_config=ValidationTaskConfig(fn_kwargs=...))."
        ) from None


def _refuse_validation(session: Session) -> None:
    """Raise :class:`ReportError` where the trainer was given no validation function."""
    if not session.place.saving.validates:
        raise ReportError(
            "report(validation=...) needs a validation function, and the trainer has none. Give it "
            "validation_config=ValidationConfig(fn=...), or leave validation out."
        )


def share(session: Session, checkpoint: Checkpoint, how: SaveOptions, row: int) -> CheckpointPart:
    """Return this rank's share of the checkpoint of ``row``. On return the caller may change or delete the directory.

    Raises :class:`ReportError` or :class:`CheckpointError` for anything that cannot be a checkpoint. A full disk raises
    nothing: it is reported to the run, and training continues.
    """
    if not _is_checkpoint(checkpoint):
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


def _is_checkpoint(value: Any) -> bool:
    """Return True for an object with a path and a file system, as a Checkpoint has."""
    return (
        has_attribute(value, "path")
        and isinstance(value.path, str)
        and has_attribute(value, "given_filesystem")
    )


def sealed(session: Session, point: Point) -> Point:
    """Return the report with its staged share sealed, so that it survives this process; without one where sealing
    fails."""
    part = point.part
    if part is None or not part.staged:
        return point
    metrics = resolve(point.metrics) if is_pending(point.metrics) else point.metrics
    try:
        session.staging.seal(_with(point, metrics=metrics))
    except OSError as error:
        session.staging.discard(point.row, part.taken)
        return _with(point, part=_unstaged(session, error, checkpoint=part.checkpoint))
    return point


def _unstaged(session: Session, error: OSError, checkpoint: str = "") -> CheckpointPart:
    """Return the share that reports a failure to stage."""
    from powertrain.storage.full_disk import describe_write_error, full_place

    staging = session.place.saving.staging or os.getcwd()
    reason = f"rank {session.place.rank} could not stage it: {describe_write_error(error, staging)}"
    place = full_place(error, staging) or staging
    return CheckpointPart(checkpoint=checkpoint, files=[], error=reason, error_place=place)


def upload_beside(
    session: Session, checkpoint: Checkpoint, part: CheckpointPart, how: SaveOptions, row: int
) -> None:
    """Run the user's own upload function on a thread, and send its outcome to the run.

    The function gets the staged copy, so that the caller may change or delete the directory; or ``checkpoint`` itself
    where nothing was staged.
    """
    assert how.upload is not None
    upload, name = how.upload, session.final_name(row, how.name)

    def work() -> None:
        place = session.place
        result = ShareUploaded(attempt=place.attempt, row=row, rank=place.rank)
        try:
            result = _with(result, **_uploaded(upload, checkpoint, part, name))
        except BaseException as error:  # also SystemExit, which would end this thread silently
            result = _with(
                result,
                error=f"checkpoint_upload_fn raised {describe_error(error)}",
                error_place=f"checkpoint_upload_fn of rank {place.rank}",
            )
        session.service.post(result)

    threading.Thread(target=work, name=f"powertrain-upload-{row}", daemon=True).start()


def _uploaded(
    upload: UploadFunction, reported: Checkpoint, part: CheckpointPart, name: str
) -> dict[str, Any]:
    import shutil

    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.checkpoint.staging import source_of

    given = Checkpoint(str(source_of(part.staged, ""))) if part.staged else reported
    kept = upload(given, name)
    if not _is_checkpoint(kept):
        raise ReportError(f"it returned a {type(kept).__name__}, not the Checkpoint where it put the files")
    if part.staged and kept == given:  # returned as it is: the files stay where they were reported
        kept = reported
    found = _kept_elsewhere(kept)
    if (part.files or not part.staged) and not found.files:
        raise CheckpointError(
            f"it returned {kept!r}, which holds no file. Return the place that it uploaded to."
        )
    if part.staged and not part.taken:
        shutil.rmtree(part.staged, ignore_errors=True)
    return {"files": found.files, "elsewhere": found.elsewhere}


def _staged(session: Session, checkpoint: Checkpoint, how: SaveOptions, row: int) -> CheckpointPart:
    from powertrain.checkpoint.contents import refuse_directory

    place, is_shared_directory, is_users = session.place, False, False
    if how.upload is not None and _is_in_place(session, checkpoint):
        return CheckpointPart(checkpoint="", files=[], pending=True)
    if "://" in checkpoint.path or checkpoint.given_filesystem is not None:
        directory, take = checkpoint.to_directory(session.staging.new_directory()), True
    else:
        directory, take = checkpoint.path, how.take and not _is_of_a_run(session, checkpoint.path)
        # One of ours, new and below the staging area, can neither be nor contain any of these directories.
        is_ours = session.staging.is_ours(directory) and os.path.isdir(directory)
        if is_shared_directory := not is_ours and _is_worked_in(session, directory):
            take = False
        else:
            is_users = not is_ours
        if not is_ours and not is_same_directory(directory, place.run.launch_dir):
            refuse_directory(
                session.storage, directory, launch_dir=place.run.launch_dir, staging=place.saving.staging
            )
    try:
        if is_shared_directory:
            directory, take = _copied_from_shared(session, directory), True
        part = session.staging.stage(row, directory, take=take)
    except OSError as error:
        return _unstaged(session, error)
    return _with(
        part, pending=how.upload is not None, taken=_taken(session, directory, row) if is_users else ""
    )


def _taken(session: Session, directory: str, row: int) -> str:
    """Return where a directory of the user's goes back to should its checkpoint fail; "" where it is still there."""
    place, path = session.place, os.path.abspath(directory)
    if os.path.lexists(path):
        return ""
    if place.files.scratch and _is_below(path, place.files.scratch):  # which is removed at the end
        return os.path.join(place.saving.staging, "unsaved", f"row-{row:08d}-rank-{place.rank:05d}")
    return path


def _is_worked_in(session: Session, directory: str) -> bool:
    """Return True for a directory that ranks work in: the launch directory, the scratch directory, or one that was
    named."""
    place = session.place
    return any(is_same_directory(directory, one) for one in (place.files.working_dir, place.run.launch_dir))


def _copied_from_shared(session: Session, directory: str) -> str:
    """Return a copy of the files that the ranks have written to their working directory."""
    place = session.place
    if place.local_world_size > 1:
        message = (
            f"Several ranks report {directory!r}, the directory that all ranks of a node work in. A file that two of "
            "them write at the same time may be damaged: let one rank write it, or use powertrain.checkpoint_dir()."
        )
        session.service.post(Noted(message=message, once=True))
    target = session.staging.new_directory()
    run = session.storage.local_path("x")
    is_launch_dir = is_same_directory(directory, place.run.launch_dir)
    copied = copy_new_entries(
        directory,
        target,
        before=session.before if is_launch_dir else BEFORE_ALL,
        excluded=[str(run.parent) if run is not None else "", os.path.join(target, *[os.pardir] * 3)],
        outputs={*place.files.outputs, *output_files()},
        # The ranks of other nodes may have the launch directory as well; never the scratch directory.
        is_shared=place.local_world_size > 1 or (place.world_size > 1 and not place.files.scratch),
        hopeless=session.changing_files,
    )
    session.changing_files |= copied.changing
    _warn_of_left_out(session, directory, copied.left_out)
    return target


def _warn_of_left_out(session: Session, directory: str, left_out: Mapping[str, str]) -> None:
    """Warn of files that cannot be part of a checkpoint, of each once."""
    new = sorted(left_out.keys() - session.left_out)
    if not new:
        return
    session.left_out.update(new)
    named = "; ".join(f"{name!r}, because {left_out[name]}" for name in new[:_NAMED])
    more = f"; and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
    message = (
        f"Left out of checkpoints of {directory!r}: {named}{more}. To keep them, write the checkpoint's files to "
        "powertrain.checkpoint_dir() and report that."
    )
    session.service.post(Noted(message=message, once=True))


def _is_in_place(session: Session, checkpoint: Checkpoint) -> bool:
    """Return True for a checkpoint of which an upload function needs no copy: it is not a directory of this machine,
    lies in the run's own directory, or is not there yet because something else still writes it."""
    if "://" in checkpoint.path or checkpoint.given_filesystem is not None:
        return True
    run = session.storage.local_path("x")
    real, staging = (
        os.path.realpath(checkpoint.path),
        os.path.realpath(session.place.saving.staging or "/nowhere"),
    )
    is_in_run = run is not None and _is_below(real, os.path.realpath(run.parent))
    return (is_in_run and not _is_below(real, staging)) or not os.path.exists(real)


def _is_of_a_run(session: Session, directory: str) -> bool:
    """Return True for a directory that a run keeps: a committed checkpoint is always copied."""
    from powertrain.checkpoint.manifest import MANIFEST_NAMES

    run = session.storage.local_path("x")
    real, staging = os.path.realpath(directory), os.path.realpath(session.place.saving.staging or "/nowhere")
    inside = (
        run is not None and _is_below(real, os.path.realpath(run.parent)) and not _is_below(real, staging)
    )
    return inside or any(os.path.exists(os.path.join(directory, name)) for name in MANIFEST_NAMES)


def _is_below(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def _kept_elsewhere(checkpoint: Checkpoint) -> CheckpointPart:
    """Return a share that lies where the user has put it: its current names and sizes."""
    from powertrain.checkpoint.elsewhere import files_at, mark
    from powertrain.storage import open_storage
    from powertrain.storage.addresses import has_secrets

    address = getattr(checkpoint, "address", checkpoint.path)
    storage = open_storage(address, filesystem=checkpoint.given_filesystem)
    files = files_at(storage)
    if has_secrets(address):
        raise CheckpointError(
            f"{checkpoint!r} has a password or key in its address, which would be kept with the run. Give it in the "
            "environment instead."
        )
    if not files:  # this rank has no files; the run warns where no rank has any
        return CheckpointPart(checkpoint="", files=[])
    if trouble := mark(storage):
        warnings.warn(trouble, stacklevel=2)
    return CheckpointPart(checkpoint="", files=files, elsewhere=address)


def _check_name(session: Session, name: str) -> None:
    """Raise unless the name is one plain directory name that this run has not used."""
    plain = isinstance(name, str) and name.isprintable() and "/" not in name and not name.startswith(".")
    if not plain or not 0 < len(name.encode()) <= _LONGEST_NAME:
        raise ReportError(
            f"report(checkpoint_dir_name={shorten(name)}) is not a plain name: it must be printable text of at most "
            f"{_LONGEST_NAME} bytes, without '/', and not begin with '.'. Use something like 'epoch-3'."
        )
    if name in session.checkpoint_names:
        raise ReportError(
            f"report(checkpoint_dir_name={name!r}) names a checkpoint that this run has already. Give each its own "
            "name; Result.checkpoint is always the newest, and CheckpointConfig(num_to_keep=...) deletes old ones."
        )


def _with(struct: S, **changes: Any) -> S:
    import msgspec

    return msgspec.structs.replace(struct, **changes)
