"""LightGBMTrainer: the data-parallel trainer whose workers share LightGBM's network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.backend import BackendConfig
from powertrain.config.data import TRAIN_DATASET_KEY, DataConfig
from powertrain.frameworks.boosting.trainer import BoosterTrainer
from powertrain.lightgbm.config import LightGBMConfig
from powertrain.lightgbm.from_params import LightGBMFromParams
from powertrain.lightgbm.library import LIGHTGBM

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.config.run import RunConfig
    from powertrain.config.scaling import ScalingConfig
    from powertrain.config.validation import ValidationConfig
    from powertrain.data.dataset import Dataset


class LightGBMTrainer(BoosterTrainer):
    """Run ``train_loop_per_worker`` on every worker, with a network for LightGBM between them.

    ``lightgbm.train`` in the function trains one model on the rows of all workers where its parameters have
    ``tree_learner="data_parallel"``, ``pre_partition=True`` and what
    :func:`~powertrain.lightgbm.get_network_params` returns.

    Args:
        train_loop_per_worker: The training function. Without one, ``params``, ``label_column`` and ``datasets`` say
            what to train, as in Ray Train's older API.
        train_loop_config: What the function is called with.
        lightgbm_config: How the workers are connected.
        scaling_config: How many workers there are, and what each of them gets.
        run_config: The name, storage and rules of the run.
        datasets: Datasets by name, for ``get_dataset_shard(name)``.
        dataset_config: How they are divided.
        validation_config: How checkpoints are validated beside the training.
        metadata: Data that is kept with the run's checkpoints.
        resume_from_checkpoint: A checkpoint that ``get_checkpoint()`` gives at the run's first start.
        label_column: Without a function: the column to predict.
        params: Without a function: LightGBM's parameters.
        num_boost_round: Without a function: rounds of the whole model, 10 by default.
        **train_kwargs: Without a function: further arguments of ``lightgbm.train``, and ``dmatrix_params``: by dataset
            arguments of its matrix, such as ``{"train": {"weight": "column"}}``.

    Raises:
        ConfigError: An argument has a wrong value, or arguments contradict each other.
        ImportError: lightgbm is not installed.

    Example:
        >>> def train(config):
        ...     frame = powertrain.get_dataset_shard("train").materialize().to_pandas()
        ...     train_set = lightgbm.Dataset(frame.drop(columns="y"), label=frame["y"])
        ...     params = {**config, "tree_learner": "data_parallel", "pre_partition": True, **get_network_params()}
        ...     lightgbm.train(params, train_set, valid_sets=[train_set], callbacks=[ReportCallback()])
        >>> result = LightGBMTrainer(
        ...     train,
        ...     train_loop_config={"objective": "binary"},
        ...     datasets={"train": dataset},
        ...     scaling_config=ScalingConfig(num_workers=2),
        ... ).fit()
    """

    library = LIGHTGBM
    _loop = LightGBMFromParams
    _backend_argument = "lightgbm_config"

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any] | None = None,
        *,
        train_loop_config: dict[str, Any] | None = None,
        lightgbm_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        dataset_config: DataConfig | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        label_column: str | None = None,
        params: dict[str, Any] | None = None,
        num_boost_round: int | None = None,
        **train_kwargs: Any,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            of_recipe={"params": params, "label_column": label_column, "num_boost_round": num_boost_round},
            train_kwargs=train_kwargs,
            train_loop_config=train_loop_config,
            backend_config=LightGBMConfig() if lightgbm_config is None else lightgbm_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )

    @staticmethod
    def _usual_dataset_config() -> DataConfig:
        # LightGBM evaluates the rows of each worker alone: with early stopping, workers that evaluate different rows
        # would stop in different rounds, and the others wait for them.
        return DataConfig(datasets_to_split=[TRAIN_DATASET_KEY])
