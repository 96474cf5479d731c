"""``TF_CONFIG``: the addresses of all workers, from which ``MultiWorkerMirroredStrategy`` makes its group.

The strategy connects the workers itself, in the training function.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec

from powertrain.backend import Backend, BackendConfig, WorkerGroup
from powertrain.frameworks.joining import await_joined, leave_all
from powertrain.frameworks.ports import ReservedPort, addresses, joined
from powertrain.tensorflow.library import TENSORFLOW
from powertrain.text.loggers import module_logger

logger = module_logger(__name__)


class TensorflowBackend(Backend):
    """Tells every worker where the others are, before the user's function is called."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Choose a port for every worker, and set ``TF_CONFIG`` in all of them. Raises the first worker's error."""
        hosts = addresses(worker_group.workers)
        choosing = [
            worker_group.execute_single_async(rank, _choose_port, host) for rank, host in enumerate(hosts)
        ]
        await_joined(choosing)
        workers = [future.result() for future in choosing]
        await_joined(
            [
                worker_group.execute_single_async(rank, _set_variables, workers, rank)
                for rank in range(len(hosts))
            ]
        )

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Undo that in every worker that still answers. Never raises, never hangs."""
        leave_all(worker_group, _leave)


# --------------------------------------------------------------------------- in each worker


class _Membership:
    """The membership of this process in its group: one instance per process."""

    def __init__(self) -> None:
        self.port = ReservedPort()
        #: Variables that were set, with what they were before.
        self.environment: dict[str, str | None] = {}


_membership = _Membership()


def _choose_port(address: str) -> str:
    """Take a port of this node. gRPC shares it, so that it stays reserved until the end."""
    TENSORFLOW.check_installed("TensorflowTrainer")
    return joined(*_membership.port.open(address, listens=False))


def _set_variables(workers: list[str], rank: int) -> None:
    values = {
        "TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}})
    }
    # Keras 3 does not train with MultiWorkerMirroredStrategy; tf_keras is Keras 2, and the choice of Ray Train too.
    if "TF_USE_LEGACY_KERAS" not in os.environ:
        if find_spec("tf_keras") is not None:
            values["TF_USE_LEGACY_KERAS"] = "1"
        elif len(workers) > 1 and rank == 0:
            logger.warning(
                "tf_keras is not installed, so tf.keras is Keras 3, whose model.fit does not train on several workers: "
                "pip install tf-keras"
            )
    for name, value in values.items():
        _membership.environment.setdefault(name, os.environ.get(name))
        os.environ[name] = value


def _leave(seconds: float) -> None:
    """Let go of the port and restore the variables. TensorFlow closes its connections when the process ends."""
    _membership.port.close()
    for name, value in _membership.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _membership.environment.clear()
