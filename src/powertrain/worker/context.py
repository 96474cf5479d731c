"""What a training function can call: ``report``, ``get_context``, ``get_checkpoint`` and their kin.

All of it works on this process's :class:`Session`, which ``worker/main`` opens before the user's function and closes
after it. Outside a worker each function raises :class:`~powertrain.errors.OutsideWorkerError`.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import msgspec

from powertrain import wire
from powertrain.values.arguments import as_flag, as_seconds, shorten
from powertrain.config import CheckpointConsistencyMode, CheckpointUploadMode, ValidationTaskConfig
from powertrain.errors import (
    ArgumentError,
    CheckpointError,
    CollectiveError,
    OutsideWorkerError,
    ReportError,
)
from powertrain.text.redaction import strip_secrets
from powertrain.storage.boundaries import training_step
from powertrain.trace import recording
from powertrain.trace.recording.phases import COLLECTIVE, REPORT
from powertrain.worker.checkpoints import saving
from powertrain.worker.checkpoints.row_mark import RowMark
from powertrain.worker.progress import Boundaries, Gate, StopRun, progress
from powertrain.worker.data.shards import Shards
from powertrain.worker.checkpoints.shared_directory import listing_of
from powertrain.worker.checkpoints.storage_context import StorageContext
from powertrain.worker.values import DroppedValues, read

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint, ReportedCheckpoint
    from powertrain.checkpoint.saver import CheckpointDirectory, Staging
    from powertrain.data.shard import DataShard
    from powertrain.data.ray.shard import StreamedShard
    from powertrain.storage import Storage
    from powertrain.worker.data.batch_plan import BatchPlan
    from powertrain.worker.service.service import Service

T = TypeVar("T")
#: Bytes of a message beside the data that it carries.
_ROOM = 4096


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank this is, of which attempt of which run, and where things are."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    attempt: int = 0
    #: The first row this attempt will report.
    first_row: int = 1
    run_name: str = ""
    #: The run's directory: ``storage_path/name``.
    run_path: str = ""
    storage_path: str = ""
    #: Where the driver was started.
    launch_dir: str = ""
    #: Committed checkpoint to go on from, as a path or address; "" for none.
    checkpoint: str = ""
    #: The pickled filesystem that ``checkpoint`` is on, and that of the run, where the user gave one.
    checkpoint_filesystem: bytes = b""
    run_filesystem: bytes = b""
    #: Goes into the usual names of checkpoints.
    checkpoint_tag: str = ""
    #: Names given with ``checkpoint_dir_name`` that are committed already.
    checkpoint_names: list[str] = []
    #: Registered state is saved every so many rows; 0 for never.
    checkpoint_frequency: int = 0
    #: Where shares of checkpoints are staged on this node, and how many bytes may wait there (0: half of the disk).
    staging: str = ""
    staging_bytes: int = 0
    #: Where shared-memory segments go; "" where there are none.
    segments: str = ""
    #: The rank's working directory; "" for the launch directory. And the node's scratch directory, if it is that one.
    working_dir: str = ""
    scratch: str = ""
    #: Files that the driver's standard output and standard error go to.
    outputs: list[str] = []
    #: Where the rank marks how far it has come, and where its stacks go when they are asked for; "" for nowhere.
    mark: str = ""
    stacks: str = ""
    #: True when the trainer was given a validation function.
    validates: bool = False
    #: True when every report waits until all ranks have made it.
    report_barrier: bool = False
    #: Where decoded blocks of data are kept on this node, how many bytes of them (-1: a quarter of what is free), and
    #: how many bytes of memory this rank may use to read.
    data_cache: str = ""
    data_cache_bytes: int = -1
    data_memory_bytes: int = 2**29
    #: Orders shuffled data.
    data_seed: int = 0
    #: By dataset what it was when the run's driver looked at it: a rank that looks for itself must find the same.
    data_fingerprints: dict[str, str] = {}
    #: By dataset the state that ``checkpoint`` keeps, if that is of this run; and what happens if data have changed.
    data_positions: dict[str, dict[str, Any]] = {}
    on_data_change: str = "refuse"
    #: As ``DataConfig.resume``; and by dataset how many batches were drawn without a step before the checkpoint.
    data_resume: str = "batch"
    data_gaps: dict[str, int] = {}
    #: By dataset of Ray's that is streamed, the socket where this rank gets its rows; and those that are not split.
    data_feeds: dict[str, str] = {}
    data_feeds_whole: list[str] = []
    metadata: dict[str, Any] = {}
    #: Of a trial of a sweep: the sweep's name and the trial's id.
    sweep: str = ""
    trial_id: str = ""
    resources: dict[str, float] = {}


class Session:
    """One rank's live state."""

    def __init__(self, place: Place, service: Service, gate: Gate, datasets: bytes = b"") -> None:
        """``datasets`` is what :class:`~powertrain.worker.data.shards.Shards` takes."""
        self.place = place
        self.service = service
        #: What the launch directory held when this rank began, for checkpoints that are reported from it.
        self.before = listing_of(place.launch_dir)
        #: Names that were left out of such checkpoints with a warning, and those that had been waited for in vain.
        self.left_out: set[str] = set()
        self.unsettled: set[str] = set()
        #: Index of this rank's GPU among those visible to it; -1 for none.
        self.device = -1
        self.row = service.row = place.first_row - 1
        self.syncs = 0
        #: Names that checkpoints of this run have been given.
        self.checkpoint_names: set[str] = set(place.checkpoint_names)
        #: True once this rank has made a report with SYNC or a barrier: ``get_checkpoint`` then returns the newest one.
        self.sees_newest = False
        #: What ``register_state`` was given.
        self.registered: dict[str, Any] = {}
        self.mark = RowMark(place.mark)
        self.boundaries = Boundaries(gate, lambda: bool(self.registered), self._stands_at)
        self.context = TrainContext(self)
        self.data = Shards(self, datasets)
        self.dropped = DroppedValues(lambda message: service.post(wire.Noted(message=message, once=True)))
        service.describe_data = self.data.described
        #: Tells a program without boundaries that the run ends: see :meth:`Gate.deliver_stop`.
        self.deliver_stop = gate.deliver_stop

    def _stands_at(self, hold: int, boundary: int) -> None:
        self.service.say(wire.Reached(hold=hold, boundary=boundary, row=self.row))

    @cached_property
    def staging(self) -> Staging:
        """This rank's part of the node's staging area."""
        from powertrain.checkpoint.saver import Staging

        place = self.place
        staging = Staging(
            place.staging or os.path.join(os.getcwd(), ".staging"),
            place.attempt,
            place.rank,
            segments=place.segments,
            limit=place.staging_bytes,
            shared_by=place.local_world_size,
            full=lambda row, needed, limit: self.service.say(
                wire.StagingFull(row=row, needed=needed, limit=limit)
            ),
        )
        self.service.on_settled = lambda settled: staging.settled(settled.row)
        self.service.when_over(staging.close)
        return staging

    @cached_property
    def storage(self) -> Storage:
        """The run's storage, for looking at addresses; nothing is opened by this."""
        from powertrain.storage import open_storage

        return open_storage(self.place.run_path)

    @staticmethod
    def checkpoint_at(path: str, filesystem: bytes) -> Checkpoint:
        """The checkpoint at a path of a pickled filesystem, or at an address."""
        from powertrain.checkpoint.checkpoint import Checkpoint

        return Checkpoint(path, pickle.loads(filesystem) if filesystem and "://" not in path else None)

    def final_name(self, row: int, given: str | None) -> str:
        """The name that the checkpoint of ``row`` will have."""
        from powertrain.checkpoint.commit import final_name

        return final_name(row, given or "", self.place.checkpoint_tag)

    def close(self) -> None:
        self.data.close()
        self.mark.close()

    def meet(self, kind: str, data: bytes = b"") -> bytes:
        """Arrive at the next collective and wait for all ranks."""
        if len(data) > wire.MESSAGE_LIMIT - _ROOM:
            raise CollectiveError(
                f"{kind}() was given {len(data):,} bytes once pickled, and at most {wire.MESSAGE_LIMIT - _ROOM:,} can "
                "be sent to the other ranks. Put large data into a file or a dataset, and send its name."
            )
        self.syncs += 1
        with recording.phase(COLLECTIVE):
            opened = self.service.meet(wire.Arrived(sync=self.syncs, kind=kind, data=data))
        if opened.error:
            raise CollectiveError(opened.error)
        return opened.data


class TrainContext:
    """Facts about this rank and its run. Every getter of Ray Train's context is here."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._place = session.place

    def __repr__(self) -> str:
        p = self._place
        return (
            f"TrainContext(rank={p.rank}, world_size={p.world_size}, run={p.run_name!r}, attempt={p.attempt})"
        )

    @property
    def launch_dir(self) -> str:
        """The directory the driver was started in; it is on ``sys.path`` of every worker."""
        return self._place.launch_dir

    def get_world_rank(self) -> int:
        """This rank, from 0, over all nodes."""
        return self._place.rank

    def get_world_size(self) -> int:
        """How many ranks there are."""
        return self._place.world_size

    def get_local_rank(self) -> int:
        """This rank among those of its node; also the index of its GPU."""
        return self._place.local_rank

    def get_local_world_size(self) -> int:
        """How many ranks its node has."""
        return self._place.local_world_size

    def get_node_rank(self) -> int:
        """Which node this is, from 0."""
        return self._place.node_rank

    def get_experiment_name(self) -> str:
        """The run's name; in a trial of a sweep, that of the sweep."""
        return self._place.sweep or self._place.run_name

    def get_trial_name(self) -> str:
        """The run's name: a trial of a sweep is an ordinary run."""
        return self._place.run_name

    def get_trial_id(self) -> str:
        """The run's name, which is what identifies it; in a trial of a sweep, the id of the trial."""
        return self._place.trial_id or self._place.run_name

    def get_trial_resources(self) -> dict[str, float]:
        """What this worker was given, by resource name."""
        return dict(self._place.resources)

    def get_trial_dir(self) -> str:
        """The run's directory in storage, without credentials."""
        return strip_secrets(self._place.run_path)

    def get_storage(self) -> StorageContext:
        """The storage path under which runs lie, with its file system and the places of this run.

        It is the path as text. For a loop that uploads checkpoints by itself::

            path = get_context().get_storage().build_checkpoint_path_from_name(f"epoch-{epoch}")
            torch.distributed.checkpoint.save(state, checkpoint_id=path)
            report(metrics, Checkpoint(path), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
        """
        place = self._place
        return StorageContext(place.storage_path, place.run_name, place.run_filesystem)

    def get_metadata(self) -> dict[str, Any]:
        """What was given as ``metadata=`` to the trainer."""
        return dict(self._place.metadata)

    def get_attempt(self) -> int:
        """How many times this run was started before, failures and resumes counted."""
        return self._place.attempt

    def resize_pending(self) -> bool:
        """True when the run will go on with another number of workers after its next checkpoint.

        The same on every rank at the same place of its loop. A loop that saves rarely can save and report now; one
        whose state is registered, or that asks :func:`should_checkpoint`, need not care.
        """
        return self._session.boundaries.resize_to > 0

    def batch_plan(self, global_batch_size: int, max_micro_batch: int | None = None) -> BatchPlan:
        """This rank's part of each optimizer step, so that ``global_batch_size`` samples go into it at any world size.

        A model from ``prepare_model`` weighs this rank's gradient accordingly, by the plan that was made or iterated
        last: see :class:`BatchPlan`.
        """
        from powertrain.worker.data import batch_plan

        place = self._place
        found = batch_plan.plan(global_batch_size, place.rank, place.world_size, max_micro_batch)
        batch_plan.gradient_weight.set(found.weight)
        return replace(found, begin=batch_plan.gradient_weight.set)


_session: Session | None = None


def open_session(session: Session) -> None:
    """Make ``session`` this process's own."""
    global _session
    _session = session


def close_session() -> None:
    global _session
    _session = None


def in_worker() -> bool:
    """True inside a training function's process."""
    return _session is not None


def runtime_directory() -> str:
    """The run's directory for sockets and scratch files on this node, which only this user can enter."""
    directory = runtime_directory_of(current("runtime_directory").place)
    assert directory, "the engine made no directory for this rank"
    return directory


def runtime_directory_of(place: Place) -> str:
    """Return the run's directory for sockets and scratch files on the node of a rank; "" where it has none."""
    return os.path.dirname(os.path.dirname(place.mark))


def current(caller: str) -> Session:
    """This process's session; the error names ``caller``."""
    if _session is None:
        raise OutsideWorkerError(
            f"{caller}() was called outside a training worker. Call it inside the function that is given to a "
            "trainer, while trainer.fit() runs it."
        )
    return _session


def get_context() -> TrainContext:
    """Rank, world size, names and directories of this worker."""
    return current("get_context").context


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
    """Hand metrics, and maybe a checkpoint, to the run. Returns without waiting for the other ranks, unless the run has
    ``RunConfig(report_barrier=True)``.

    The k-th report of every rank forms row k; a row's checkpoint is committed once every rank has made its report
    k. When this returns, the checkpoint's directory may be changed or deleted, and the checkpoint will be committed
    even if this process dies. ``checkpoint_upload_mode`` SYNC also waits for the commit, and raises
    :class:`CheckpointError` should it fail; NO_UPLOAD says that the files are in a lasting place already.
    ``delete_local_checkpoint_after_upload`` gives the directory away, which spares a copy; so does a
    ``checkpoint_upload_mode`` of ASYNC that is asked for by name. Its files come back should the checkpoint fail.
    ``checkpoint_upload_fn(checkpoint, name)`` uploads instead of the run and returns the Checkpoint it made, or the one
    it was given where its files stay in their place.
    ``validation=True`` runs the trainer's validation function on the committed checkpoint.

    Metrics are numbers, text, dates, enums, paths, dataclasses, small tensors, and lists, sets and dicts of them; the
    run keeps plain forms. A value that cannot be kept is left out with one warning, and never ends the training.

    ``barrier=True`` waits until the row is complete. ``solo=True`` keeps the metrics outside rows, for values that
    only some ranks have.
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
    recorder = recording.recording()
    depth = recorder.enter(REPORT) if recorder is not None else recording.IGNORED
    try:
        if solo:
            _report_solo(session, metrics, checkpoint, barrier)
        else:
            _report(session, metrics, checkpoint, how, barrier)
            session.sees_newest |= saving.is_sync(checkpoint_upload_mode)
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
    session.service.post(wire.Point(row=0, at=time.time(), metrics=values, solo=True, originals=originals))


def _report(
    session: Session,
    metrics: dict[str, Any],
    checkpoint: Checkpoint | None,
    options: Callable[[], saving.SaveOptions],
    barrier: bool,
) -> None:
    values, originals = read(metrics, session.dropped, with_originals=session.place.rank == 0)
    barrier = barrier or session.place.report_barrier
    save_now = session.boundaries.enter_report()
    row = session.row + 1
    if checkpoint is None and session.registered:
        checkpoint = _automatic_checkpoint(session, row, save_now)
    if checkpoint is None:  # what is said about one is meant for ranks that have one
        point = wire.Point(row=row, at=time.time(), metrics=values, barrier=barrier, originals=originals)
        _post(session, point)
    else:
        how = options()
        part = saving.share(session, checkpoint, how, row)
        point = wire.Point(
            row=row, at=time.time(), metrics=values, barrier=barrier, part=part, originals=originals
        )
        _report_with_share(session, checkpoint, point, how)
    if barrier:
        with recording.phase(COLLECTIVE):
            session.service.wait_for_row(row)
        session.sees_newest = True
        if session.service.stop_at_row:
            raise StopRun(session.service.stop_at_row)
    session.boundaries.leave_report()


def _post(session: Session, point: wire.Point) -> None:
    """The report is made: from here on the rank's death does not undo it."""
    if session.service.refusal:
        session.service.check_heard()
    training_step("report", progress.reports + 1)
    session.row = session.service.row = point.row
    session.mark.set(point.row)
    progress.report()
    session.service.post(point)


def _report_with_share(
    session: Session, checkpoint: Checkpoint, point: wire.Point, how: saving.SaveOptions
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
    """A new directory for a checkpoint's files. To ``report`` it costs a rename, whatever its size.

    It is a path, and also a context that removes what was not reported::

        with powertrain.checkpoint_dir() as directory:
            torch.save(model.state_dict(), os.path.join(directory, "model.pt"))
            powertrain.report(metrics, Checkpoint.from_directory(directory))
    """
    directory = current("checkpoint_dir").staging.new_directory()
    phase = progress.phase
    depths: list[int] = []

    def begun() -> None:
        progress.enter("checkpoint")
        if (recorder := recording.recording()) is not None:
            depths.append(recorder.enter(REPORT))

    def done() -> None:
        progress.enter(phase)
        if depths and (recorder := recording.recording()) is not None:
            recorder.leave(depths.pop())

    directory.begun, directory.done = begun, done
    return directory


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | None = None,
) -> list[ReportedCheckpoint]:
    """Every kept checkpoint of this run with its metrics and whether it was validated, oldest first.

    Waits until all that this rank has reported so far are committed and, in the default mode, validated; at most
    ``timeout_s`` seconds.
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
    with recording.phase(REPORT):
        answer = session.service.ask_checkpoints(session.row, validated, -1.0 if limit is None else limit)
    return [
        ReportedCheckpoint(
            session.checkpoint_at(found.path, session.place.run_filesystem),
            dict(found.metrics),
            ReportedCheckpointStatus(found.status),
        )
        for found in answer
    ]


def should_checkpoint() -> bool:
    """True when the run wants a checkpoint now: it is about to end, to lose workers or to get more. Ask once per step
    on every rank; all get the same answer.

    A loop that asks gets the chance to save before that: save, ``report`` the checkpoint, and the function ends there.
    """
    return current("should_checkpoint").boundaries.ask()


@dataclass(frozen=True)
class PreemptionInfo:
    """Ranks that are about to be taken away."""

    #: Unix milliseconds at which the first of them goes; None where nobody said.
    deadline_ms: int | None
    #: Ranks by the node that they are on.
    preempted_node_to_ranks: dict[str, list[int]]

    @property
    def preempted_node_ids(self) -> list[str]:
        """The nodes, sorted."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """The ranks on all of them, sorted."""
        return sorted({rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks})


def get_preemption_info() -> PreemptionInfo | None:
    """What is known of an end that this run, or some of its ranks, must come to soon; ``None`` while nothing is.

    Ask as often on every rank, once per step: all get the same answer at the same place, without waiting for each
    other. Save and ``report`` a checkpoint when it is not ``None``: the function ends at that report, and the run goes
    on from there, now with fewer workers or when it is started again.
    """
    known = current("get_preemption_info").boundaries.look()
    return PreemptionInfo(known.deadline_ms, dict(known.ranks)) if known is not None else None


def get_checkpoint() -> Checkpoint | None:
    """The checkpoint to go on from: this run's newest at the start of the attempt, or ``resume_from_checkpoint``.

    From then on the shards of this run's datasets go on where that checkpoint found them.

    After a report of this rank with a wait (``checkpoint_upload_mode`` SYNC, ``barrier=True``, or
    ``RunConfig(report_barrier=True)``), it is the newest checkpoint that was reported; it is committed when this
    returns.
    """
    session = current("get_checkpoint")
    if session.sees_newest and (newest := _newest_reported(session)) is not None:
        return newest
    session.data.checkpoint_was_asked_for()
    place = session.place
    return session.checkpoint_at(place.checkpoint, place.checkpoint_filesystem) if place.checkpoint else None


def _newest_reported(session: Session) -> Checkpoint | None:
    """The newest kept checkpoint of this run, once those of all reports so far are settled; None for none."""
    with recording.phase(REPORT):
        found = session.service.ask_checkpoints(session.row, False, -1.0)
    return session.checkpoint_at(found[-1].path, session.place.run_filesystem) if found else None


def get_dataset_shard(
    dataset_name: str = "train", state_dict: Mapping[str, Any] | None = None
) -> DataShard | StreamedShard:
    """This rank's part of a dataset that the trainer was given, to be iterated once per epoch.

    After a restart it gives what the next iteration would have given, once the loop has asked for its checkpoint.
    ``state_dict`` puts it where ``shard.state_dict()`` once said it was.
    """
    session = current("get_dataset_shard")
    if not isinstance(dataset_name, str):
        raise ArgumentError(
            f"get_dataset_shard(dataset_name=...) was given {shorten(dataset_name)}. Give the name of a dataset of the "
            "trainer, a string."
        )
    return session.data.shard(dataset_name, state_dict)


def barrier() -> None:
    """Wait until every rank has called this."""
    current("collective.barrier").meet("barrier")


def broadcast_from_rank_zero(data: T) -> T:
    """Rank 0's ``data`` on every rank. All ranks must call it; what the others pass is ignored."""
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
