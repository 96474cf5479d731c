"""The seam between a run and the framework its workers use.

A :class:`Backend` has three hooks. They run in the driver, once per attempt, and reach the workers through
a :class:`WorkerGroup`. ``BackendConfig.backend_cls`` names the backend; ``TorchConfig`` names torch's.

::

    workers are up ─▶ on_start ─▶ on_training_start ─▶ the user's function ─▶ on_shutdown
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from powertrain.errors import ConfigError

__all__ = ["Backend", "BackendConfig", "Worker", "WorkerGroup", "WorkerMetadata"]

T = TypeVar("T")

#: Modules of torch that the first step of a worker uses, those of ours that connect it, and first calls.
TORCH_PRELOAD = (
    "torch",
    "torch._dynamo",  # the first optimizer and DDP load it
    "torch.distributed",
    "torch.nn.parallel.distributed",
    "torch.utils.data",
    "powertrain.torch.backend",
    "powertrain.torch.data_loader.prepare",
    "powertrain.torch.prepare",
    "powertrain.torch.warming:make_first_calls",
)

#: Modules with which workers save and load states, and the functions that need them.
STATE_PRELOAD = (
    "powertrain.checkpoint.staging",
    "powertrain.checkpoint.state.saver",
    "powertrain.worker.checkpoints.state",
)
STATE_FUNCTIONS = ("save_state", "load_state", "register_state")


@dataclass(frozen=True)
class WorkerMetadata:
    """The location of a worker, under the names that Ray Train's backends read.

    Attributes:
        node_id: The id of the worker's node.
        node_ip: The address under which other nodes of the run reach the worker's node.
        hostname: The name of the node.
        pid: The process id of the worker.
        gpu_ids: The GPUs the worker may use, as its node numbers them.
    """

    node_id: str
    node_ip: str
    hostname: str
    pid: int
    gpu_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Worker:
    """One rank of the group.

    Attributes:
        rank: The rank, from 0, over all nodes.
        metadata: The location of its process.
    """

    rank: int
    metadata: WorkerMetadata

    @property
    def host(self) -> str:
        """The name of the worker's node."""
        return self.metadata.hostname

    @property
    def pid(self) -> int:
        """The process id of the worker."""
        return self.metadata.pid


class WorkerGroup(Protocol):
    """All workers of one attempt, in rank order.

    A function is called in the worker's main thread, one after another in the order of the calls, before
    (or, from ``on_shutdown``, after) the user's function. An exception in a worker comes out of the call or
    of its future.

    Example::

        addresses = worker_group.execute(socket.gethostname)
        worker_group.execute(os.environ.update, {"MASTER_ADDR": addresses[0]})
    """

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers, in rank order."""

    def __len__(self) -> int: ...

    def execute(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[T]:
        """Call ``fn`` in every worker, and wait for all.

        Args:
            fn: A function that can be pickled.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The values that it returned, in rank order.

        Raises:
            Exception: The exception of a worker whose call raised.
        """

    def execute_async(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> list[Future[T]]:
        """Call ``fn`` in every worker, without waiting.

        Args:
            fn: A function that can be pickled.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            A future for each rank, in rank order.
        """

    def execute_single(self, rank: int, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call ``fn`` in one worker, and wait for it.

        Args:
            rank: The rank of the worker.
            fn: A function that can be pickled.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            The value that it returned.

        Raises:
            Exception: The exception of the call.
        """

    def execute_single_async(self, rank: int, fn: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Call ``fn`` in one worker, without waiting.

        Args:
            rank: The rank of the worker.
            fn: A function that can be pickled.
            *args: Its positional arguments.
            **kwargs: Its keyword arguments.

        Returns:
            A future of its value.
        """


class Backend:
    """A framework's hooks in its workers. Override those that apply; the others do nothing.

    Example::

        class ScanBackend(Backend):
            def on_start(self, worker_group, backend_config):
                worker_group.execute(connect, worker_group.workers[0].metadata.node_ip)
    """

    #: Ray Train's. Without effect here: every worker sees all GPUs of the run on its node.
    share_cuda_visible_devices: bool = False

    def on_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Connect the workers. They are up; ``get_context`` works in them.

        Args:
            worker_group: The workers of this attempt.
            backend_config: The config that the trainer was given.
        """

    def on_training_start(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Make the last preparations: the user's function is called next.

        Args:
            worker_group: The workers of this attempt.
            backend_config: The config that the trainer was given.
        """

    def on_shutdown(self, worker_group: WorkerGroup, backend_config: BackendConfig) -> None:
        """Disconnect the workers. Some may be gone, or stuck.

        Args:
            worker_group: The workers of this attempt.
            backend_config: The config that the trainer was given.
        """


class BackendConfig:
    """A framework's settings for its workers. Subclass it with a ``backend_cls``.

    It is a plain class, so a subclass may be anything: a dataclass, frozen or not, or one with its own
    ``__init__``.

    Example::

        @dataclass
        class ScanConfig(BackendConfig):
            port: int = 7000

            @property
            def backend_cls(self):
                return ScanBackend
    """

    #: False where no worker needs torch: the process that workers are forked from then does not load it.
    uses_torch: ClassVar[bool] = True
    #: Modules that workers need: the process that they are forked from imports them once, in this order. An entry
    #: "package.module:function" is called there as well. Only modules that are safe to fork: none that starts threads
    #: or opens a GPU when it is imported. Entries that cannot be imported are skipped. None leaves the choice to
    #: ``uses_torch``. Not an attribute of the backend, whose module may import the framework.
    preload: ClassVar[Sequence[str] | None] = None

    @property
    def backend_cls(self) -> type[Any]:
        """The :class:`powertrain.backend.Backend` that does the setting up; the base one does nothing."""
        return Backend


def preload_of(config: BackendConfig) -> tuple[str, ...]:
    """Return the modules for the process from which the workers of a backend are forked.

    Raises:
        ConfigError: ``preload`` is not a sequence of texts.
    """
    if config.preload is None:
        # The base class does not name its workers' framework: use the one that is loaded here.
        is_used = "torch" in sys.modules if type(config) is BackendConfig else config.uses_torch
        return TORCH_PRELOAD if is_used else ()
    preload = (config.preload,) if isinstance(config.preload, str) else tuple(config.preload)
    if not all(isinstance(entry, str) and entry for entry in preload):
        raise ConfigError(
            f"{type(config).__name__}.preload is {config.preload!r:.200}, and must be a sequence of module names. "
            "Write it as ('package.module', 'package.module:function')."
        )
    return preload


def modules_of_others(preload: Sequence[str]) -> tuple[str, ...]:
    """Return the modules that are not Powertrain's.

    Processes that have loaded the same ones of these can replace each other: workers import missing ones of ours.
    """
    return tuple(entry for entry in preload if not entry.startswith("powertrain."))


def first_calls_here() -> tuple[str, ...]:
    """Return the first calls in a fork of this process, for frameworks that are loaded here already."""
    return ("powertrain.torch.warming:use_one_thread",) if "torch" in sys.modules else ()
