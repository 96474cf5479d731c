"""Lightning's strategies in workers: the run starts the processes, and their group is there already."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.lightning.environment import LightningEnvironment
from powertrain.lightning.feeds import Feeds
from powertrain.lightning.packages import PackageClass, derived


class WorkerStrategy:
    """The overrides of a strategy in a worker."""

    lightning_module: Any
    _environment: Any = None
    _own_path = ""
    _sigterm_handler: Any = None

    @cached_property
    def feeds(self) -> Feeds:
        """The data of the Trainer."""
        return Feeds()

    @property
    def root_device(self) -> Any:
        """The device of this worker."""
        from powertrain.torch.device import get_device

        return get_device()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of torch's distributed sampler: rank and number of ranks."""
        strategy: Any = self
        return {"num_replicas": strategy.world_size, "rank": strategy.global_rank}

    @property
    def cluster_environment(self) -> Any:
        """The environment that names the ranks: always that of the run."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        # Whatever Lightning has found around this process, such as Slurm, the ranks are those of the run.
        if environment is not None and not isinstance(environment, LightningEnvironment):
            environment = LightningEnvironment()
        self._environment = environment

    def setup_environment(self) -> None:
        """Set up the environment, and note the handler of SIGTERM that the run has installed."""
        self._sigterm_handler = signal.getsignal(signal.SIGTERM)
        super().setup_environment()  # type: ignore[misc]

    def on_train_start(self) -> None:
        """Restore the run's handler of SIGTERM, and count the batches of a resumed epoch."""
        # Lightning's own handler would broadcast in the middle of other work of the ranks. The run handles the
        # signal itself, and requests a checkpoint between two steps.
        if threading.current_thread() is threading.main_thread() and self._sigterm_handler is not None:
            signal.signal(signal.SIGTERM, self._sigterm_handler)
        self.feeds.count_resumed(self.lightning_module.trainer)
        super().on_train_start()  # type: ignore[misc]

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader as Lightning prepares it; a dataset of the run is fed from this rank's shard."""
        dataloader = super().process_dataloader(dataloader)  # type: ignore[misc]
        return self.feeds.add(dataloader, self.lightning_module.trainer)

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass on the loss, weighted by the rows of this rank's batch."""
        # The mean over ranks is then that over all rows, also where ranks have different numbers of them.
        weight = self.feeds.weight(self.lightning_module.trainer)
        if weight != 1.0:
            closure_loss = closure_loss * weight
        return super().backward(closure_loss, *args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def own_path(self, path: str) -> Iterator[None]:
        """Let each rank use the path that it names itself, where Lightning would have all use that of rank 0.

        The files of a checkpoint are on the node of the rank: a sharded one is written in parts, which the run puts
        into one directory, and read from a copy.
        """
        before, self._own_path = self._own_path, path
        try:
            yield
        finally:
            self._own_path = before

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank ``src``; within :meth:`own_path`, each rank keeps its own path."""
        if self._own_path and isinstance(obj, (str, Path)) and str(obj) == self._own_path:
            return obj
        return super().broadcast(obj, src)  # type: ignore[misc]


class _Sharding(WorkerStrategy):
    """FSDP. Torch's own takes a CPU only where it is named, and Lightning names the index of a GPU.

    Also, state that torch offloads to the CPU is the memory that it frees, where it is on the CPU already.
    """

    kwargs: dict[str, Any]
    model: Any
    _state_dict_type: str

    def _setup_model(self, model: Any) -> Any:
        strategy: Any = super()
        if self.root_device.type != "cpu" or _is_sharded(model):
            return strategy._setup_model(model)
        arguments = self._arguments()
        model = arguments.pop("wrapper_cls")(model, **arguments)
        policy = self.kwargs.pop("auto_wrap_policy", None)  # it was applied
        try:
            return strategy._setup_model(model)
        finally:
            if policy is not None:
                self.kwargs["auto_wrap_policy"] = policy

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        from torch.distributed.fsdp.wrap import enable_wrap

        with enable_wrap(**self._arguments()):
            yield

    @property
    def _gathers_on_cpus(self) -> bool:
        return self._state_dict_type == "full" and bool(self.root_device.type == "cpu")

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._gathers_on_cpus:
            found: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
            return found
        with _full_state_of(self.model):
            return dict(self.model.state_dict())

    def optimizer_state(self, optimizer: Any) -> Any:
        if not self._gathers_on_cpus:
            return super().optimizer_state(optimizer)  # type: ignore[misc]
        from torch.distributed.fsdp import FullyShardedDataParallel as Sharded
        from torch.distributed.fsdp import OptimStateKeyType

        with _full_state_of(self.model):
            state = Sharded.optim_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))
        return Sharded.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, self.model)

    def _arguments(self) -> dict[str, Any]:
        from torch.distributed.fsdp import FullyShardedDataParallel

        strategy: Any = self
        return {
            "wrapper_cls": FullyShardedDataParallel,
            "cpu_offload": strategy.cpu_offload,
            "mixed_precision": strategy.mixed_precision_config,
            "sharding_strategy": strategy.sharding_strategy,
            "device_id": self.root_device,
            **self.kwargs,
        }


def _is_sharded(model: Any) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _full_state_of(model: Any) -> Any:
    """Return a context in which states are those of the whole model, on every rank."""
    from torch.distributed import fsdp

    return fsdp.FullyShardedDataParallel.state_dict_type(
        model,
        fsdp.StateDictType.FULL_STATE_DICT,
        fsdp.FullStateDictConfig(offload_to_cpu=False),
        fsdp.FullOptimStateDictConfig(offload_to_cpu=False),
    )


class _WithDeepSpeed(WorkerStrategy):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if find_spec("deepspeed") is None:
            raise ImportError(
                "DeepSpeedStrategy needs DeepSpeed, which is not installed: pip install deepspeed"
            )
        super().__init__(*args, **kwargs)


class DDPStrategy(metaclass=PackageClass, build=derived(WorkerStrategy, "strategies", "DDPStrategy")):
    """Lightning's ``DDPStrategy`` in the workers of a run, with its arguments.

    Device, ranks and process group are the run's. ``process_group_backend``, ``timeout`` and ``start_method`` have no
    effect: see :class:`~powertrain.torch.TorchConfig`. Training loaders are divided so that every row comes once per
    epoch, and keep their position in checkpoints.

    Args:
        *args: Those of Lightning's ``DDPStrategy``.
        **kwargs: Those of Lightning's ``DDPStrategy``, such as ``find_unused_parameters=True``.

    Example::

        trainer = lightning.Trainer(max_epochs=3, strategy=DDPStrategy(), callbacks=[ReportCallback()])
        trainer = prepare_trainer(trainer)
        trainer.fit(model, loader, ckpt_path="last")
    """

    if TYPE_CHECKING:  # what it stands for is a class of Lightning's

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Make an instance of the class for the package in use."""


class FSDPStrategy(metaclass=PackageClass, build=derived(_Sharding, "strategies", "FSDPStrategy")):
    """Lightning's ``FSDPStrategy`` in the workers of a run, with its arguments; also on CPUs.

    Args:
        *args: Those of Lightning's ``FSDPStrategy``.
        **kwargs: Those of Lightning's ``FSDPStrategy``. With ``state_dict_type="sharded"`` each rank saves its shards;
            with "full", the default, rank 0 saves everything in one file.

    Example::

        trainer = lightning.Trainer(strategy=FSDPStrategy(state_dict_type="sharded"), callbacks=[ReportCallback()])
    """

    if TYPE_CHECKING:  # what it stands for is a class of Lightning's

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Make an instance of the class for the package in use."""


class DeepSpeedStrategy(
    metaclass=PackageClass, build=derived(_WithDeepSpeed, "strategies", "DeepSpeedStrategy")
):
    """Lightning's ``DeepSpeedStrategy`` in the workers of a run, with its arguments. Needs DeepSpeed and GPUs.

    Args:
        *args: Those of Lightning's ``DeepSpeedStrategy``.
        **kwargs: Those of Lightning's ``DeepSpeedStrategy``.

    Raises:
        ImportError: DeepSpeed is not installed.

    Example::

        trainer = lightning.Trainer(strategy=DeepSpeedStrategy(stage=3), callbacks=[ReportCallback()])
    """

    if TYPE_CHECKING:  # what it stands for is a class of Lightning's

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Make an instance of the class for the package in use."""
