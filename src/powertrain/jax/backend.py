"""``jax.distributed``: a coordinator in rank 0, and every rank one process of the group."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from powertrain.backend import Backend, BackendConfig, Worker, WorkerGroup
from powertrain.errors import EngineError
from powertrain.frameworks.joining import await_joined, leave_all, within
from powertrain.frameworks.ports import ReservedPort, addresses, joined
from powertrain.jax.library import JAX
from powertrain.text.loggers import module_logger

logger = module_logger(__name__)


@dataclass(frozen=True)
class JaxWorkerInfo:
    """All one worker must know to join."""

    rank: int
    world_size: int
    #: "host:port" of the coordinator; "" for a worker that is alone.
    coordinator: str
    uses_gpu: bool
    #: Its GPUs, as indexes among those that it sees.
    devices: tuple[int, ...]


@runtime_checkable
class PlatformSettings(Protocol):
    """Settings of a backend config about the devices: :class:`powertrain.jax.JaxConfig`."""

    @property
    def use_gpu(self) -> bool:
        """True to compute on GPUs."""


class JaxBackend(Backend):
    """Connects the processes before the user's function is called. One worker alone needs no coordinator."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Bring every worker into the group. Raises the first worker's error."""
        assert isinstance(backend_config, PlatformSettings)
        workers = worker_group.workers
        coordinator = ""
        if len(workers) > 1:
            coordinator = worker_group.execute_single(0, _reserve, addresses(workers)[0])
        await_joined(
            [
                worker_group.execute_single_async(
                    worker.rank, _join, _seat(worker, workers, coordinator, backend_config.use_gpu)
                )
                for worker in workers
            ]
        )

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Take every worker that still answers out of the group. Never raises, never hangs."""
        leave_all(worker_group, _leave)


def _seat(worker: Worker, workers: Sequence[Worker], coordinator: str, uses_gpu: bool) -> JaxWorkerInfo:
    # Every worker sees all GPUs of the run on its node, in the order of the ranks.
    node = worker.metadata.node_id
    visible = list(
        dict.fromkeys(gpu for one in workers if one.metadata.node_id == node for gpu in one.metadata.gpu_ids)
    )
    devices = tuple(visible.index(gpu) for gpu in worker.metadata.gpu_ids)
    return JaxWorkerInfo(worker.rank, len(workers), coordinator, uses_gpu, devices)


# --------------------------------------------------------------------------- in each worker


class _Membership:
    """The membership of this process in its group: one instance per process."""

    def __init__(self) -> None:
        self.port = ReservedPort()
        self.has_joined = False


_membership = _Membership()


def _reserve(address: str) -> str:
    """Rank 0: choose the coordinator's port. gRPC shares it, so that it stays reserved until the end."""
    return joined(*_membership.port.open(address, listens=False))


def _join(seat: JaxWorkerInfo) -> None:
    """Bring this worker into the group."""
    if seat.uses_gpu:
        os.environ.setdefault("JAX_PLATFORMS", "cuda")
    jax = JAX.load("JaxTrainer")
    if not seat.coordinator:
        return
    began = time.monotonic()
    try:
        jax.distributed.initialize(
            seat.coordinator,
            seat.world_size,
            seat.rank,
            local_device_ids=list(seat.devices) if seat.uses_gpu and seat.devices else None,
            # By default it would listen on every interface of the node.
            coordinator_bind_address=seat.coordinator if seat.rank == 0 else None,
        )
    except Exception as error:
        raise EngineError(
            f"Rank {seat.rank} of {seat.world_size} could not join JAX's group at {seat.coordinator}; it gave up after "
            f"{time.monotonic() - began:.1f} s: {type(error).__name__}: {error}. Check that every node can reach that "
            "address, that no firewall lies between, and that no other rank failed first."
        ) from error
    _membership.has_joined = True


def _leave(seconds: float) -> None:
    """Leave the group if this process has joined one, within ``seconds``."""
    if _membership.has_joined:
        import jax

        _membership.has_joined = False
        problem = within(seconds, jax.distributed.shutdown, "leaving JAX's group")
        if problem:
            logger.warning("JAX's group could not be left: %s", problem)
    _membership.port.close()
