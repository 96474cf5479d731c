"""Functions for training functions: ``report``, ``get_context``, ``get_checkpoint`` and related ones.

All of it works on this process's :class:`Session`, which ``worker/main`` opens before the user's function and closes
after it. Outside a worker each function raises :class:`~powertrain.errors.OutsideWorkerError`.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from powertrain.config.checkpoint import CheckpointConsistencyMode, CheckpointUploadMode
from powertrain.config.validation import ValidationTaskConfig
from powertrain.errors import ArgumentError, CheckpointError, CollectiveError, ReportError
from powertrain.storage.boundaries import training_step
from powertrain.trace.recording import current as recording_current
from powertrain.trace.recording import marks
from powertrain.trace.recording.phases import COLLECTIVE, REPORT
from powertrain.values.arguments import as_flag, as_seconds, shorten
from powertrain.wire.values import Point
from powertrain.worker.checkpoints import saving
from powertrain.worker.progress import StopRun, progress
from powertrain.worker.session import checkpoint_to_resume_from, current
from powertrain.worker.values import is_pending, read

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint, ReportedCheckpoint
    from powertrain.checkpoint.staging import CheckpointDirectory
    from powertrain.data.ray.shard import StreamedShard
    from powertrain.data.shard import DataShard
    from powertrain.worker.place import Place
    from powertrain.worker.session import Session
    from powertrain.worker.train_context import TrainContext


T = TypeVar("T")


def runtime_directory() -> str:
    """Return the run's directory for sockets and scratch files on this node, which only this user can enter."""
    directory = runtime_directory_of(current("runtime_directory").place)
    assert directory, "the engine made no directory for this rank"
    return directory


def runtime_directory_of(place: Place) -> str:
    """Return the run's directory for sockets and scratch files on the node of a rank; "" where it has none."""
    return os.path.dirname(os.path.dirname(place.files.mark))


def get_context() -> TrainContext:
    """Return rank, world size, names and directories of this worker.

    Returns:
        The context, the same object in every call.

    Raises:
        OutsideWorkerError: It was called outside a training function.

    Example::

        if powertrain.get_context().get_world_rank() == 0:
            print("this is rank 0")
    """
    return current("get_context").context


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint to resume from.

    It is this run's newest at the start of the attempt, or ``resume_from_checkpoint``. From then on the shards of this
    run's datasets continue from the position in that checkpoint.

    After a report of this rank with a wait (``checkpoint_upload_mode`` SYNC, ``barrier=True``, or
    ``RunConfig(report_barrier=True)``), it is the newest checkpoint that was reported; it is committed when this
    returns.

    Returns:
        The checkpoint; None at the start of a new run.

    Raises:
        OutsideWorkerError: It was called outside a training function.

    Example::

        checkpoint = powertrain.get_checkpoint()
        if checkpoint is not None:
            with checkpoint.as_directory() as directory:
                model.load_state_dict(torch.load(os.path.join(directory, "model.pt")))
    """
    return checkpoint_to_resume_from(current("get_checkpoint"))


def report(
    metrics: dict[str, Any],
    checkpoint: Checkpoint | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode | str | None = None,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: saving.UploadFunction | None = None,
    validation: bool | ValidationTaskConfig = False,
    *,
    barrier: bool = False,
    solo: bool = False,
) -> None:
    """Hand metrics, and maybe a checkpoint, to the run.

    Returns without waiting for the other ranks, unless the run has ``RunConfig(report_barrier=True)``. The k-th report
    of every rank forms row k; a row's checkpoint is committed once every rank has made its report k. When this returns,
    the checkpoint's directory may be changed or deleted, and the checkpoint will be committed even if this process
    dies.

    Args:
        metrics: Numbers, text, dates, enums, paths, dataclasses, small tensors, and lists, sets and dicts of them; the
            run keeps plain forms. A value that cannot be kept is left out with one warning, and never ends the
            training.
        checkpoint: The checkpoint of this rank; None for a row without one, or where the state is registered.
        checkpoint_dir_name: The name of the checkpoint's directory in the run's directory; by default of its row.
        checkpoint_upload_mode: SYNC also waits for the commit; NO_UPLOAD means that the files are in a lasting place
            already. ASYNC, the default, does not wait; given explicitly it gives the directory away, as the next
            argument.
        delete_local_checkpoint_after_upload: True gives the directory away, which spares a copy. Its files come back
            should the checkpoint fail.
        checkpoint_upload_fn: ``checkpoint_upload_fn(checkpoint, name)`` uploads instead of the run, and returns the
            Checkpoint it made, or the one it was given where its files stay in their place.
        validation: True runs the trainer's validation function on the committed checkpoint; a ``ValidationTaskConfig``
            also gives it arguments.
        barrier: True waits until the row is complete.
        solo: True keeps the metrics outside rows, for values that only some ranks have.

    Raises:
        ReportError: An argument has a wrong value.
        CheckpointError: The checkpoint cannot be saved; with SYNC also: it was not committed.
        OutsideWorkerError: It was called outside a training function.

    Example::

        with powertrain.checkpoint_dir() as directory:
            torch.save(model.state_dict(), os.path.join(directory, "model.pt"))
            powertrain.report({"loss": loss}, Checkpoint.from_directory(directory))
    """
    session = current("report")
    if barrier is not False:
        barrier = as_flag(barrier, "report(barrier=...)", ReportError)
    if solo is not False:
        solo = as_flag(solo, "report(solo=...)", ReportError)
    if validation is not False:
        validation = saving.check_validation(session, validation)
    how = partial(
        saving.options,
        checkpoint_dir_name,
        checkpoint_upload_mode,
        delete_local_checkpoint_after_upload,
        checkpoint_upload_fn,
        validation,
    )
    recorder = recording_current.recording()
    depth = recorder.enter(REPORT) if recorder is not None else marks.IGNORED
    try:
        if solo:
            _report_solo(session, metrics, checkpoint, barrier)
        else:
            is_sync = saving.is_sync(checkpoint_upload_mode)
            _report(session, metrics, checkpoint, how, barrier, is_sync)
            session.sees_newest |= is_sync
    finally:
        if recorder is not None:
            recorder.leave(depth)
            recorder.reported()


def _report_solo(
    session: Session, metrics: dict[str, Any], checkpoint: Checkpoint | None, barrier: bool
) -> None:
    values, originals = read(metrics, session.dropped, with_originals=session.place.rank == 0)
    if checkpoint is not None or barrier:
        raise ReportError(
            "report(solo=True) belongs to no row, so checkpoint= and barrier=True cannot be used. Leave solo out."
        )
    session.service.post(Point(row=0, at=time.time(), metrics=values, solo=True, originals=originals))


def _report(
    session: Session,
    metrics: dict[str, Any],
    checkpoint: Checkpoint | None,
    options: Callable[[], saving.SaveOptions],
    barrier: bool,
    is_sync: bool,
) -> None:
    values, originals = read(metrics, session.dropped, with_originals=session.place.rank == 0)
    barrier = barrier or session.place.report_barrier
    save_now = session.boundaries.enter_report()
    row = session.row + 1
    if checkpoint is None and session.registered:
        checkpoint = _automatic_checkpoint(session, row, save_now)
    if checkpoint is None:  # its options are for ranks that have one
        point = Point(row=row, at=time.time(), metrics=values, barrier=barrier, originals=originals)
        _post(session, point, is_awaited=is_sync)  # by the rank that has the checkpoint
    else:
        how = options()
        part = saving.share(session, checkpoint, how, row)
        point = Point(
            row=row, at=time.time(), metrics=values, barrier=barrier, part=part, originals=originals
        )
        _report_with_share(session, checkpoint, point, how)
    if barrier:
        with recording_current.phase(COLLECTIVE):
            session.service.wait_for_row(row)
        session.sees_newest = True
        if session.service.stop_at_row:
            raise StopRun(session.service.stop_at_row)
    session.boundaries.leave_report()


def _post(session: Session, point: Point, *, is_awaited: bool = False) -> None:
    """Post the report: from here on the rank's death does not undo it. One that another rank awaits is sent at once."""
    if session.service.refusal:
        session.service.check_refusal()
    training_step("report", progress.reports + 1)
    session.row = session.service.row = point.row
    is_safe = session.newest_reports.add(point, is_pending=is_pending(point.metrics))
    progress.report()
    session.service.post(point, may_wait=is_safe and not (is_awaited or session.place.judges_reports))


def _report_with_share(
    session: Session, checkpoint: Checkpoint, point: Point, how: saving.SaveOptions
) -> None:
    point = saving.sealed(session, point)
    assert point.part is not None
    if how.mode is CheckpointUploadMode.SYNC:
        session.service.expect_settled(point.row)
    _post(session, point)
    if point.part.pending:
        saving.upload_beside(session, checkpoint, point.part, how, point.row)
    if how.mode is CheckpointUploadMode.SYNC:
        settled = session.service.wait_settled(point.row)
        if settled is not None and settled.error:
            raise CheckpointError(f"The checkpoint of row {point.row} was not committed: {settled.error}")


def _automatic_checkpoint(session: Session, row: int, save_now: bool) -> Checkpoint | None:
    from powertrain.worker.checkpoints.state import automatic_checkpoint

    return automatic_checkpoint(session, row, save_now)


def checkpoint_dir() -> CheckpointDirectory:
    """Return a new directory for a checkpoint's files. To ``report`` it costs a rename, whatever its size.

    Returns:
        A path, which is also a context that removes a directory that was not reported.

    Raises:
        OutsideWorkerError: It was called outside a training function.

    Example::

        with powertrain.checkpoint_dir() as directory:
            torch.save(model.state_dict(), os.path.join(directory, "model.pt"))
            powertrain.report(metrics, Checkpoint.from_directory(directory))
    """
    directory = current("checkpoint_dir").staging.new_directory()
    phase = progress.phase
    depths: list[int] = []

    def begun() -> None:
        progress.enter("checkpoint")
        if (recorder := recording_current.recording()) is not None:
            depths.append(recorder.enter(REPORT))

    def done() -> None:
        progress.enter(phase)
        if depths and (recorder := recording_current.recording()) is not None:
            recorder.leave(depths.pop())

    directory.begun, directory.done = begun, done
    return directory


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """Return every kept checkpoint of this run with its metrics and validation status, oldest first.

    Waits until all that this rank has reported so far are committed and, in the default mode, validated.

    Args:
        consistency_mode: Whether to wait for validations too.
        timeout_s: Seconds to wait, at most; None for no limit.

    Returns:
        The checkpoints.

    Raises:
        ReportError: An argument has a wrong value.
        OutsideWorkerError: It was called outside a training function.

    Example::

        for reported in powertrain.get_all_reported_checkpoints(timeout_s=60):
            print(reported.checkpoint.path, reported.metrics, reported.status)
    """
    session = current("get_all_reported_checkpoints")
    from powertrain.checkpoint.checkpoint import ReportedCheckpoint, ReportedCheckpointStatus

    if not isinstance(consistency_mode, CheckpointConsistencyMode):
        raise ReportError(
            f"consistency_mode={shorten(consistency_mode)} is not valid. Use CheckpointConsistencyMode.COMMITTED or "
            ".VALIDATED."
        )
    validated = consistency_mode is CheckpointConsistencyMode.VALIDATED
    limit = as_seconds(timeout_s, "get_all_reported_checkpoints(timeout_s=...)", ReportError)
    with recording_current.phase(REPORT):
        answer = session.service.query_checkpoints(session.row, validated, -1.0 if limit is None else limit)
    return [
        ReportedCheckpoint(
            session.checkpoint_at(found.path, session.place.run.filesystem),
            dict(found.metrics),
            ReportedCheckpointStatus(found.status),
        )
        for found in answer
    ]


def should_checkpoint() -> bool:
    """Return True when the run wants a checkpoint now: it is about to end, to lose workers or to get more.

    Call it once per step on every rank; all get the same value. A loop that calls it can save before that: save,
    ``report`` the checkpoint, and the function ends there.

    Returns:
        Whether to save and report a checkpoint now.

    Raises:
        OutsideWorkerError: It was called outside a training function.

    Example::

        if step % 1000 == 0 or powertrain.should_checkpoint():
            powertrain.report(metrics, powertrain.save_state(model=model, optimizer=optimizer))
    """
    return current("should_checkpoint").boundaries.check_save()


@dataclass(frozen=True)
class PreemptionInfo:
    """Ranks that are about to be taken away.

    Attributes:
        deadline_ms: Unix milliseconds at which the first of them goes; None where unknown.
        preempted_node_to_ranks: Ranks by the node that they are on.
    """

    deadline_ms: int | None
    preempted_node_to_ranks: dict[str, list[int]]

    @property
    def preempted_node_ids(self) -> list[str]:
        """Return the nodes, sorted."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """Return the ranks on all of them, sorted."""
        return sorted({rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks})


def get_preemption_info() -> PreemptionInfo | None:
    """Return the announced preemption of this run, or of some of its ranks; ``None`` while there is none.

    Call it equally often on every rank, once per step: all get the same value at the same place, without waiting for
    each other. Save and ``report`` a checkpoint when it is not ``None``: the function ends at that report, and the run
    resumes from there, now with fewer workers or when it is started again.

    Returns:
        The ranks that will go, and when.

    Raises:
        OutsideWorkerError: It was called outside a training function.

    Example::

        if powertrain.get_preemption_info() is not None:
            powertrain.report(metrics, powertrain.save_state(model=model))
    """
    known = current("get_preemption_info").boundaries.check_preemption()
    return PreemptionInfo(known.deadline_ms, dict(known.ranks)) if known is not None else None


def get_dataset_shard(
    dataset_name: str = "train", state_dict: Mapping[str, Any] | None = None
) -> DataShard | StreamedShard:
    """Return this rank's shard of a dataset of the trainer, to be iterated once per epoch.

    After a restart it continues with the next batch, once the loop has called ``get_checkpoint``.

    Args:
        dataset_name: The name in ``datasets=`` of the trainer.
        state_dict: A position that ``shard.state_dict()`` returned, to continue from.

    Returns:
        The shard, the same object in every call with this name.

    Raises:
        ArgumentError: ``dataset_name`` is not a string.
        ConfigError: The trainer has no such dataset.
        DataError: ``state_dict`` is not a position in the dataset.
        OutsideWorkerError: It was called outside a training function.

    Example::

        shard = powertrain.get_dataset_shard("train")
        for batch in shard.iter_torch_batches(batch_size=32):
            ...
    """
    session = current("get_dataset_shard")
    if not isinstance(dataset_name, str):
        raise ArgumentError(
            f"get_dataset_shard(dataset_name=...) was given {shorten(dataset_name)}. Give the name of a dataset of the "
            "trainer, a string."
        )
    return session.data.shard(dataset_name, state_dict)


def barrier() -> None:
    """Wait until every rank has called this.

    Raises:
        CollectiveError: The ranks called different functions, or a rank has ended.

    Example::

        if get_context().get_world_rank() == 0:
            download()
        powertrain.collective.barrier()
    """
    current("collective.barrier").meet("barrier")


def broadcast_from_rank_zero(data: T) -> T:
    """Return rank 0's data on every rank. All ranks must call it.

    Args:
        data: The value to send; the arguments of other ranks are ignored.

    Returns:
        The value of rank 0.

    Raises:
        CollectiveError: The data cannot be pickled or is too large, or the ranks called different functions.

    Example::

        seed = powertrain.collective.broadcast_from_rank_zero(random.getrandbits(32))
    """
    session = current("collective.broadcast_from_rank_zero")
    mine = session.place.rank == 0
    received = session.meet("broadcast_from_rank_zero", _pickled(data) if mine else b"")
    if mine:
        return data
    try:
        value: T = pickle.loads(received)
    except Exception as error:
        raise CollectiveError(
            f"The data of rank 0 cannot be unpickled in this rank: {type(error).__name__}: {error}. Send plain data, "
            "or objects of a module that every rank can import."
        ) from error
    return value


def _pickled(data: Any) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(data)
    except Exception as error:
        raise CollectiveError(
            f"broadcast_from_rank_zero() was given a {type(data).__name__} that cannot be pickled: "
            f"{type(error).__name__}: {error}. Send plain data."
        ) from error
    return pickled
