"""What a training function can call: ``report``, ``get_context``, ``get_checkpoint`` and their kin.

All of it works on this process's :class:`Session`, which ``worker/main`` opens before the user's function and closes
after it. Outside a worker each function raises :class:`~powertrain.errors.OutsideWorkerError`.
"""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import msgspec

from powertrain import wire
from powertrain.errors import CollectiveError, OutsideWorkerError, ReportError
from powertrain.worker.progress import Boundaries, Gate, progress
from powertrain.worker.values import normalise

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.storage import Storage
    from powertrain.worker.service import Service

T = TypeVar("T")


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
    #: Committed checkpoint to go on from, as a path; "" for none.
    checkpoint: str = ""
    metadata: dict[str, Any] = {}
    resources: dict[str, float] = {}


class Session:
    """One rank's live state."""

    def __init__(self, place: Place, service: Service, gate: Gate) -> None:
        self.place = place
        self.service = service
        self.row = service.row = place.first_row - 1
        self.syncs = 0
        #: Names that this rank has given to checkpoints in this attempt.
        self.checkpoint_names: set[str] = set()
        self.boundaries = Boundaries(gate)
        self.context = TrainContext(place)

    def meet(self, kind: str, data: bytes = b"") -> bytes:
        """Arrive at the next collective and wait for all ranks."""
        self.syncs += 1
        opened = self.service.meet(wire.Arrived(sync=self.syncs, kind=kind, data=data))
        if opened.error:
            raise CollectiveError(opened.error)
        return opened.data


class TrainContext:
    """Facts about this rank and its run. Every getter of Ray Train's context is here."""

    def __init__(self, place: Place) -> None:
        self._place = place

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
        """The run's name."""
        return self._place.run_name

    def get_trial_name(self) -> str:
        """The run's name: a trial of a sweep is an ordinary run."""
        return self._place.run_name

    def get_trial_id(self) -> str:
        """The run's name, which is what identifies it."""
        return self._place.run_name

    def get_trial_resources(self) -> dict[str, float]:
        """What this worker was given, by resource name."""
        return dict(self._place.resources)

    def get_trial_dir(self) -> str:
        """The run's directory in storage."""
        return self._place.run_path

    def get_storage(self) -> str:
        """The storage path under which runs lie."""
        return self._place.storage_path

    def get_metadata(self) -> dict[str, Any]:
        """What was given as ``metadata=`` to the trainer."""
        return dict(self._place.metadata)

    def get_attempt(self) -> int:
        """How many times this run was started before, failures and resumes counted."""
        return self._place.attempt


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
    *,
    barrier: bool = False,
    solo: bool = False,
    **not_yet: Any,
) -> None:
    """Hand metrics, and maybe a checkpoint, to the run. Returns without waiting for the other ranks.

    The k-th report of every rank forms row k; a row's checkpoint is committed once every rank has made its report
    k. When this returns, the checkpoint's directory may be changed or deleted. ``barrier=True`` waits until the row
    is complete. ``solo=True`` keeps the metrics outside rows, for values that only some ranks have.
    """
    session = current("report")
    if not_yet:
        raise ReportError(_unknown_argument(next(iter(not_yet))))
    values = normalise(metrics)
    if solo:
        if checkpoint is not None or barrier:
            raise ReportError(
                "report(solo=True) stands outside rows, so it takes no checkpoint and no barrier."
            )
        session.service.post(wire.Point(row=0, at=time.time(), metrics=values, solo=True))
        return
    row = session.row + 1
    part = None
    if checkpoint is not None:
        part = _store(session, checkpoint, checkpoint_dir_name, row)
        session.checkpoint_names.add(part.checkpoint)
    elif checkpoint_dir_name is not None:
        raise ReportError("report(checkpoint_dir_name=...) names a checkpoint, but none was given.")
    session.row = session.service.row = row
    progress.reports += 1
    session.service.post(wire.Point(row=row, at=time.time(), metrics=values, barrier=barrier, part=part))
    if barrier:
        session.service.wait_for_row(row)
    session.boundaries.cross(can_checkpoint=False)


def should_checkpoint() -> bool:
    """True when the run wants a checkpoint now, because it is about to end. Ask once per step on every rank.

    A loop that asks gets the chance to save before a stop or an interrupt: save, ``report`` the checkpoint, and the
    run ends there.
    """
    return current("should_checkpoint").boundaries.cross(can_checkpoint=True)


def get_checkpoint() -> Checkpoint | None:
    """The checkpoint to go on from: this run's newest at the start of the attempt, or ``resume_from_checkpoint``."""
    path = current("get_checkpoint").place.checkpoint
    if not path:
        return None
    from powertrain.checkpoint.checkpoint import Checkpoint

    return Checkpoint(path)


def barrier() -> None:
    """Wait until every rank has called this."""
    current("collective.barrier").meet("barrier")


def broadcast_from_rank_zero(data: T) -> T:
    """Rank 0's ``data`` on every rank. All ranks must call it; what the others pass is ignored."""
    session = current("collective.broadcast_from_rank_zero")
    mine = session.place.rank == 0
    received = session.meet("broadcast_from_rank_zero", cloudpickle.dumps(data) if mine else b"")
    if mine:
        return data
    value: T = pickle.loads(received)
    return value


#: Arguments of Ray Train's ``report`` that this version does not have yet.
_NOT_YET = (
    "checkpoint_upload_mode",
    "delete_local_checkpoint_after_upload",
    "checkpoint_upload_fn",
    "validation",
)


def _unknown_argument(name: str) -> str:
    if name in _NOT_YET:
        return f"report({name}=...) is not supported yet by this version of Powertrain. Leave it out."
    return f"report() has no argument {name!r}. It takes metrics, checkpoint, checkpoint_dir_name, barrier and solo."


def _check_name(session: Session, storage: Storage, name: str) -> None:
    """A checkpoint's name is one plain directory name that this run has not used."""
    if "/" in name or name.startswith("."):
        raise ReportError(
            f"report(checkpoint_dir_name={name!r}) is not a plain name: it must not hold '/' or begin with '.'. Use "
            "something like 'epoch-3'."
        )
    manifest = storage.local_path(f"checkpoints/{name}/MANIFEST.json")
    if name in session.checkpoint_names or (manifest is not None and manifest.exists()):
        raise ReportError(
            f"report(checkpoint_dir_name={name!r}) names a checkpoint that this run has already. Give each its own "
            "name; Result.checkpoint is always the newest, and CheckpointConfig(num_to_keep=...) deletes old ones."
        )


def _store(session: Session, checkpoint: Checkpoint, name: str | None, row: int) -> wire.Part:
    from powertrain.checkpoint.commit import name_of_row, store_part
    from powertrain.storage import open_storage

    storage = open_storage(session.place.run_path)
    if name is not None:
        _check_name(session, storage, name)
    phase, progress.phase = progress.phase, "checkpoint"
    try:
        return store_part(storage, name or name_of_row(row), checkpoint.path)
    finally:
        progress.phase = phase
