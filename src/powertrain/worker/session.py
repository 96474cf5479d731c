"""The session of this process: one training function and everything it may call."""

from __future__ import annotations

import os
import pickle
from functools import cached_property
from typing import TYPE_CHECKING, Any

from powertrain.errors import CollectiveError, OutsideWorkerError
from powertrain.trace.recording import current as recording_current
from powertrain.trace.recording.phases import COLLECTIVE, REPORT
from powertrain.wire import limits
from powertrain.wire.from_worker import Arrived, Noted, Reached, StagingFull
from powertrain.worker.checkpoints.newest_reports import NewestReports
from powertrain.worker.checkpoints.shared_directory import listing_of
from powertrain.worker.data.shards import Shards
from powertrain.worker.progress import Boundaries, Gate
from powertrain.worker.train_context import TrainContext
from powertrain.worker.values import DroppedValues

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.checkpoint.staging import Staging
    from powertrain.storage import Storage
    from powertrain.worker.place import Place
    from powertrain.worker.service.service import Service

#: Bytes of a message beside its data.
_ROOM = 4096


class Session:
    """One rank's live state."""

    def __init__(self, place: Place, service: Service, gate: Gate, datasets: bytes = b"") -> None:
        """``datasets`` is passed to :class:`~powertrain.worker.data.shards.Shards`."""
        self.place = place
        self.service = service
        #: The listing of the launch directory when this rank began, for checkpoints that are reported from it.
        self.before = listing_of(place.run.launch_dir)
        #: Names that were left out of such checkpoints with a warning, and those that did not come to rest in time.
        self.left_out: set[str] = set()
        self.changing_files: set[str] = set()
        #: Index of this rank's GPU among those visible to it; -1 for none.
        self.device = -1
        self.row = service.row = place.first_row - 1
        self.syncs = 0
        #: Names that checkpoints of this run have been given.
        self.checkpoint_names: set[str] = set(place.start.names)
        #: True once this rank has made a report with SYNC or a barrier: ``get_checkpoint`` then returns the newest one.
        self.sees_newest = False
        #: The training function; None before it is loaded.
        self.function: Any = None
        #: Objects given to ``register_state``.
        self.registered: dict[str, Any] = {}
        self.newest_reports = NewestReports(place.files.mark)
        self.boundaries = Boundaries(gate, lambda: bool(self.registered), self._stands_at)
        self.context = TrainContext(place, self.boundaries)
        self.data = Shards(self, datasets)
        self.dropped = DroppedValues(lambda message: service.post(Noted(message=message, once=True)))
        service.describe_data = self.data.described
        #: Notifies a program without boundaries that the run ends: see :meth:`Gate.deliver_stop`.
        self.deliver_stop = gate.deliver_stop

    def _stands_at(self, hold: int, boundary: int) -> None:
        self.service.send_now(Reached(hold=hold, boundary=boundary, row=self.row))

    @cached_property
    def is_saving_state(self) -> bool:
        """True where the training function calls ``save_state``."""
        from powertrain.worker.scripts.mentions import mentions

        return self.function is not None and mentions(self.function, "save_state")

    @cached_property
    def staging(self) -> Staging:
        """Return this rank's part of the node's staging area."""
        from powertrain.checkpoint.staging import Staging

        place = self.place
        staging = Staging(
            place.saving.staging or os.path.join(os.getcwd(), ".staging"),
            place.attempt,
            place.rank,
            segments=place.saving.segments,
            limit=place.saving.staging_bytes,
            shared_by=place.local_world_size,
            full=lambda row, needed, limit: self.service.send_now(
                StagingFull(row=row, needed=needed, limit=limit)
            ),
        )
        self.service.on_share_freed = lambda message: staging.free_share(message.row)
        self.service.when_over(staging.close)
        return staging

    @cached_property
    def storage(self) -> Storage:
        """Return the run's storage, for its addresses; nothing is opened by this."""
        from powertrain.storage import open_storage

        return open_storage(self.place.run.path)

    @staticmethod
    def checkpoint_at(path: str, filesystem: bytes) -> Checkpoint:
        """Return the checkpoint at a path of a pickled filesystem, or at an address."""
        from powertrain.checkpoint.checkpoint import Checkpoint

        return Checkpoint(path, pickle.loads(filesystem) if filesystem and "://" not in path else None)

    def final_name(self, row: int, given: str | None) -> str:
        """Return the name that the checkpoint of ``row`` will have."""
        from powertrain.checkpoint.contents import final_name

        return final_name(row, given or "", self.place.saving.tag)

    def close(self) -> None:
        """Close the datasets and the file of the newest reports."""
        self.data.close()
        self.newest_reports.close()

    def meet(self, kind: str, data: bytes = b"") -> bytes:
        """Arrive at the next collective and wait for all ranks."""
        most = limits.MESSAGE_LIMIT - _ROOM
        if len(data) > most:
            raise CollectiveError(
                f"{kind}() was given {len(data):,} bytes once pickled, and at most {most:,} can "
                "be sent to the other ranks. Put large data into a file or a dataset, and send its name."
            )
        self.syncs += 1
        with recording_current.phase(COLLECTIVE):
            opened = self.service.meet(Arrived(sync=self.syncs, kind=kind, data=data))
        if opened.error:
            raise CollectiveError(opened.error)
        return opened.data


_session: Session | None = None


def open_session(session: Session) -> None:
    """Make ``session`` this process's own."""
    global _session
    _session = session


def close_session() -> None:
    """End this process's session."""
    global _session
    _session = None


def in_worker() -> bool:
    """Return True inside a training function's process."""
    return _session is not None


def current(caller: str) -> Session:
    """Return this process's session; the error names ``caller``."""
    if _session is None:
        raise OutsideWorkerError(
            f"{caller}() was called outside a training worker. Call it inside the function that is given to a "
            "trainer, while trainer.fit() runs it."
        )
    return _session


def checkpoint_to_resume_from(session: Session) -> Checkpoint | None:
    """Return the checkpoint that ``get_checkpoint`` documents; None at the start of a new run."""
    if session.sees_newest and (newest := _newest_reported(session)) is not None:
        return newest
    session.data.on_checkpoint_requested()
    place = session.place
    return (
        session.checkpoint_at(place.start.checkpoint, place.start.filesystem)
        if place.start.checkpoint
        else None
    )


def _newest_reported(session: Session) -> Checkpoint | None:
    """Return the newest kept checkpoint of this run, once those of all reports so far are settled; None for none."""
    with recording_current.phase(REPORT):
        found = session.service.query_checkpoints(session.row, False, -1.0)
    return session.checkpoint_at(found[-1].path, session.place.run.filesystem) if found else None
