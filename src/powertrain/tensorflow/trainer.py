"""TensorflowTrainer: the data-parallel trainer whose workers find each other through ``TF_CONFIG``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from powertrain.backend import BackendConfig
from powertrain.config.checks import as_config
from powertrain.tensorflow.config import TensorflowConfig
from powertrain.tensorflow.library import TENSORFLOW
from powertrain.trainer import DataParallelTrainer

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.config.data import DataConfig
    from powertrain.config.run import RunConfig
    from powertrain.config.scaling import ScalingConfig
    from powertrain.config.validation import ValidationConfig
    from powertrain.data.dataset import Dataset


class TensorflowTrainer(DataParallelTrainer):
    """Run ``train_loop_per_worker`` on every worker, with ``TF_CONFIG`` set.

    ``tf.distribute.MultiWorkerMirroredStrategy()`` in the function then trains one model on the batches of all
    workers. Where ``tf_keras`` is installed, ``tf.keras`` is Keras 2, as in Ray Train: Keras 3 does not train with that
    strategy.

    Args:
        train_loop_per_worker: The training function.
        train_loop_config: What it is called with.
        tensorflow_config: How the workers are connected.
        scaling_config: How many workers there are, and what each of them gets.
        run_config: The name, storage and rules of the run.
        datasets: Datasets by name, for ``get_dataset_shard(name)``.
        dataset_config: How they are divided.
        validation_config: How checkpoints are validated beside the training.
        metadata: Data that is kept with the run's checkpoints.
        resume_from_checkpoint: A checkpoint that ``get_checkpoint()`` gives at the run's first start.

    Raises:
        ConfigError: An argument has a wrong value.
        ImportError: tensorflow is not installed.

    Example:
        >>> def train(config):
        ...     import tensorflow as tf
        ...
        ...     with tf.distribute.MultiWorkerMirroredStrategy().scope():
        ...         model = tf.keras.Sequential([tf.keras.layers.Dense(10)])
        ...         model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        ...     shard = powertrain.get_dataset_shard("train")
        ...     batches = prepare_dataset_shard(shard.to_tf("features", "label", batch_size=32))
        ...     model.fit(batches, callbacks=[ReportCheckpointCallback()])
        >>> result = TensorflowTrainer(
        ...     train, datasets={"train": dataset}, scaling_config=ScalingConfig(num_workers=2)
        ... ).fit()
    """

    _backend_argument = "tensorflow_config"

    def __init__(
        self,
        train_loop_per_worker: Callable[[], Any] | Callable[[dict[str, Any]], Any],
        *,
        train_loop_config: dict[str, Any] | None = None,
        tensorflow_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: DataConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        validation_config: ValidationConfig | None = None,
        metadata: dict[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        super().__init__(
            train_loop_per_worker,
            train_loop_config=train_loop_config,
            backend_config=TensorflowConfig()
            if tensorflow_config is None
            else as_config(tensorflow_config, BackendConfig, "tensorflow_config"),
            scaling_config=scaling_config,
            run_config=run_config,
            datasets=datasets,
            dataset_config=dataset_config,
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
            validation_config=validation_config,
        )
        if not self._request.traits.spans_nodes:  # on a cluster its nodes need it, and this process does not
            TENSORFLOW.check_installed("TensorflowTrainer")
