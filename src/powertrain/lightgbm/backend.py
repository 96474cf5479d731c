"""LightGBM's network: a port for each rank, and in each rank the list of all of them.

LightGBM connects the ranks itself, within ``lightgbm.train``. It does not share its port, so the port is reserved
only until the training function requests the parameters.
"""

from __future__ import annotations

from typing import Any

from powertrain.backend import Backend, BackendConfig, WorkerGroup
from powertrain.frameworks.joining import await_joined, leave_all
from powertrain.frameworks.ports import ReservedPort, addresses, joined
from powertrain.lightgbm.library import LIGHTGBM
from powertrain.text.loggers import module_logger

logger = module_logger(__name__)


def get_network_params() -> dict[str, Any]:
    """Return the parameters with which ``lightgbm.train`` trains on the rows of all workers.

    Returns:
        ``num_machines``, ``machines`` and ``local_listen_port``; nothing outside the training function of a
        :class:`~powertrain.lightgbm.LightGBMTrainer`, and nothing with one worker.

    Example:
        >>> params = {"objective": "binary", "tree_learner": "data_parallel", "pre_partition": True}
        >>> lightgbm.train({**params, **get_network_params()}, train_set)
    """
    if not _membership.is_member:
        logger.warning(
            "get_network_params() returns nothing here: only the training function of a LightGBMTrainer has a group."
        )
    _membership.port.close()
    return dict(_membership.params)


class LightGBMBackend(Backend):
    """Tells every worker where the others are. One worker alone needs no network."""

    def on_training_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Choose a port for every worker, and tell all workers. Raises the first worker's error."""
        workers = worker_group.workers
        hosts = addresses(workers)
        choosing = [
            worker_group.execute_single_async(rank, _choose_port, hosts[rank]) for rank in range(len(workers))
        ]
        await_joined(choosing)
        places = [future.result() for future in choosing]
        machines = ",".join(joined(host, port) for host, port in places)
        await_joined(
            [
                worker_group.execute_single_async(rank, _set_params, len(workers), machines, port)
                for rank, (_, port) in enumerate(places)
            ]
        )

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Forget the network in every worker that still answers. Never raises, never hangs."""
        leave_all(worker_group, _leave)


# --------------------------------------------------------------------------- in each worker


class _Membership:
    """The membership of this process in its group: one instance per process."""

    def __init__(self) -> None:
        self.port = ReservedPort()
        self.params: dict[str, Any] = {}
        self.is_member = False


_membership = _Membership()


def _choose_port(address: str) -> tuple[str, int]:
    LIGHTGBM.load("LightGBMTrainer")
    return _membership.port.open(address, listens=False)


def _set_params(world_size: int, machines: str, port: int) -> None:
    _membership.is_member = True
    if world_size > 1:
        _membership.params = {
            "num_machines": world_size,
            "machines": machines,
            "local_listen_port": port,
        }


def _leave(seconds: float) -> None:
    """Let go of the port. LightGBM itself closes its connections with the booster."""
    _membership.port.close()
    _membership.params, _membership.is_member = {}, False
