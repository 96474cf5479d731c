"""JaxTrainer: the trainer whose workers are the processes of one ``jax.distributed`` group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.backend import BackendConfig
from powertrain.config.checks import as_config
from powertrain.jax.config import JaxConfig
from powertrain.jax.library import JAX
from powertrain.trainer import DataParallelTrainer

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.config.data import DataConfig
    from powertrain.config.run import RunConfig
    from powertrain.config.scaling import ScalingConfig
    from powertrain.config.validation import ValidationConfig
    from powertrain.data.dataset import Dataset


class JaxTrainer(DataParallelTrainer):
    """Run ``train_loop_per_worker`` on every worker, inside one group of ``jax.distributed``.

    ``jax.devices()`` in the function are the devices of all workers, ``jax.local_devices()`` its own: arrays on a mesh
    of all devices are computed by all workers together. On CPUs each worker is one device.

    Args:
        train_loop_per_worker: The training function.
        train_loop_config: What it is called with.
        jax_config: How the workers are connected; by default with GPUs where ``scaling_config`` has them.
        scaling_config: How many workers there are, and what each of them gets.
        run_config: The name, storage and rules of the run.
        datasets: Datasets by name, for ``get_dataset_shard(name)``.
        dataset_config: How they are divided.
        validation_config: How checkpoints are validated beside the training.
        metadata: Data that is kept with the run's checkpoints.
        resume_from_checkpoint: A checkpoint that ``get_checkpoint()`` gives at the run's first start.

    Raises:
        ConfigError: An argument has a wrong value.
        ImportError: jax is not installed.

    Example:
        >>> def train(config):
        ...     import jax
        ...
        ...     powertrain.report({"devices": len(jax.devices())})
        >>> result = JaxTrainer(train, scaling_config=ScalingConfig(num_workers=2)).fit()
    """

    _backend_argument = "jax_config"

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        jax_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: DataConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        if jax_config is None:
            jax_config = JaxConfig(use_gpu=bool(getattr(scaling_config, "use_gpu", False)))
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=as_config(jax_config, BackendConfig, "jax_config"),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )
        if not self._request.traits.spans_nodes:  # on a cluster its nodes need it, and this process does not
            JAX.check_installed("JaxTrainer")
