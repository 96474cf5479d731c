"""XGBoost's collective: a tracker in rank 0, and a communicator in every rank.

A communicator belongs to the thread that made it. Backends call workers in their main thread, which also calls the
user's function.
"""

from __future__ import annotations

from typing import Any

from powertrain.backend import Backend, BackendConfig, WorkerGroup
from powertrain.errors import EngineError
from powertrain.frameworks.joining import await_joined, leave_all
from powertrain.frameworks.ports import addresses
from powertrain.text.loggers import module_logger
from powertrain.xgboost.library import XGBOOST

logger = module_logger(__name__)


class XGBoostBackend(Backend):
    """Connects the workers before the user's function is called. One worker alone needs no connection."""

    def on_training_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Bring every worker into the communicator. Raises the first worker's error."""
        size = len(worker_group)
        if size == 1:
            return
        host = addresses(worker_group.workers)[0] or "127.0.0.1"
        tracker = worker_group.execute_single(0, _open_tracker, size, host)
        await_joined(
            [
                worker_group.execute_single_async(worker.rank, _join, tracker, worker.rank, size)
                for worker in worker_group.workers
            ]
        )

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Take the communicator of every worker that still answers down. Never raises, never hangs."""
        if len(worker_group) > 1:
            leave_all(worker_group, _leave)


# --------------------------------------------------------------------------- in each worker


class _Membership:
    """The membership of this process in its group: one instance per process."""

    def __init__(self) -> None:
        self.tracker: Any = None
        self.has_joined = False


_membership = _Membership()


def _open_tracker(world_size: int, host: str) -> dict[str, Any]:
    """Rank 0: begin to serve the tracker; returns how to reach it."""
    library = XGBOOST.load("XGBoostTrainer")
    # Sorted by task, whose names have the ranks: rank k of the run is rank k of XGBoost.
    _membership.tracker = library.RabitTracker(n_workers=world_size, host_ip=host, sortby="task")
    _membership.tracker.start()
    found: dict[str, Any] = _membership.tracker.worker_args()
    return found


def _join(tracker: dict[str, Any], rank: int, world_size: int) -> None:
    """Bring this worker into the communicator."""
    XGBOOST.load("XGBoostTrainer")
    from xgboost import collective

    try:
        collective.init(**tracker, dmlc_communicator="rabit", dmlc_task_id=f"rank-{rank:08}")
    except Exception as error:
        where = f"{tracker['dmlc_tracker_uri']}:{tracker['dmlc_tracker_port']}"
        raise EngineError(
            f"Rank {rank} of {world_size} could not join XGBoost's communicator at {where}: "
            f"{type(error).__name__}: {error}. Check that every node can reach that address, that no firewall lies "
            "between, and that no other rank failed first."
        ) from error
    _membership.has_joined = True


def _leave(seconds: float) -> None:
    """Leave the communicator if this process has joined one; rank 0 then ends the tracker.

    In the main thread: in another one there is no communicator to leave.
    """
    if _membership.has_joined:
        from xgboost import collective

        _membership.has_joined = False
        collective.finalize()
    tracker, _membership.tracker = _membership.tracker, None
    if tracker is not None:
        try:
            tracker.wait_for(timeout=int(seconds))
            tracker.free()
        except Exception as error:
            logger.debug("XGBoost's tracker did not end by itself: %s", error)
