"""XGBoostTrainer: the data-parallel trainer whose workers share XGBoost's collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.backend import BackendConfig
from powertrain.frameworks.boosting.trainer import BoosterTrainer
from powertrain.xgboost.config import XGBoostConfig
from powertrain.xgboost.from_params import XGBoostFromParams
from powertrain.xgboost.library import XGBOOST

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.config.data import DataConfig
    from powertrain.config.run import RunConfig
    from powertrain.config.scaling import ScalingConfig
    from powertrain.config.validation import ValidationConfig
    from powertrain.data.dataset import Dataset


class XGBoostTrainer(BoosterTrainer):
    """Run ``train_loop_per_worker`` on every worker, inside one communicator of XGBoost.

    ``xgboost.train`` in the function then trains one model on the rows of all workers.

    Args:
        train_loop_per_worker: The training function. Without one, ``params``, ``label_column`` and ``datasets`` say
            what to train, as in Ray Train's older API.
        train_loop_config: What the function is called with.
        xgboost_config: How the workers are connected.
        scaling_config: How many workers there are, and what each of them gets.
        run_config: The name, storage and rules of the run.
        datasets: Datasets by name, for ``get_dataset_shard(name)``.
        dataset_config: How they are divided.
        validation_config: How checkpoints are validated beside the training.
        metadata: Data that is kept with the run's checkpoints.
        resume_from_checkpoint: A checkpoint that ``get_checkpoint()`` gives at the run's first start.
        label_column: Without a function: the column to predict.
        params: Without a function: XGBoost's parameters.
        num_boost_round: Without a function: rounds of the whole model, 10 by default.
        **train_kwargs: Without a function: further arguments of ``xgboost.train``, and ``dmatrix_params``: by dataset
            arguments of its matrix, such as ``{"train": {"weight": "column"}}``.

    Raises:
        ConfigError: An argument has a wrong value, or arguments contradict each other.
        ImportError: xgboost is not installed.

    Example:
        >>> def train(config):
        ...     frame = powertrain.get_dataset_shard("train").materialize().to_pandas()
        ...     matrix = xgboost.DMatrix(frame.drop(columns="y"), label=frame["y"])
        ...     xgboost.train(config, matrix, evals=[(matrix, "train")], callbacks=[ReportCallback()])
        >>> result = XGBoostTrainer(
        ...     train,
        ...     train_loop_config={"objective": "binary:logistic"},
        ...     datasets={"train": dataset},
        ...     scaling_config=ScalingConfig(num_workers=2),
        ... ).fit()
    """

    library = XGBOOST
    _loop = XGBoostFromParams
    _backend_argument = "xgboost_config"

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any] | None = None,
        *,
        train_loop_config: dict[str, Any] | None = None,
        xgboost_config: BackendConfig | None = None,
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
            backend_config=XGBoostConfig() if xgboost_config is None else xgboost_config,
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )
