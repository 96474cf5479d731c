"""TorchTrainer: the data-parallel trainer whose workers share a torch process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.backend import BackendConfig
from powertrain.errors import ConfigError
from powertrain.torch.config import TorchConfig
from powertrain.trainer import DataParallelTrainer
from powertrain.values.arguments import shorten

if TYPE_CHECKING:
    from powertrain.config.data import DataConfig
    from powertrain.config.run import RunConfig
    from powertrain.config.scaling import ScalingConfig
    from powertrain.config.validation import ValidationConfig
    from powertrain.data.dataset import Dataset


class TorchTrainer(DataParallelTrainer):
    """Runs ``train_loop_per_worker`` on every worker, inside one torch process group.

    Args:
        train_loop_per_worker: The training function.
        train_loop_config: Its argument, a dict.
        torch_config: The set-up of the process group.
        (others): Those of :class:`~powertrain.trainer.DataParallelTrainer`.

    Raises:
        ConfigError: An argument has a wrong value.

    Example::

        result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit()
    """

    _backend_argument = "torch_config"

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        torch_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Any = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        if torch_config is not None and not isinstance(torch_config, BackendConfig):
            raise ConfigError(
                f"torch_config is {shorten(torch_config)}, which is not a TorchConfig. "
                'Pass, for example, torch_config=TorchConfig(backend="gloo").'
            )
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=torch_config or TorchConfig(),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )
