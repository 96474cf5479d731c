"""Datasets of TensorFlow's whose rows are this worker's already."""

from __future__ import annotations

from typing import Any

from powertrain.tensorflow.library import TENSORFLOW


def prepare_dataset_shard(tf_dataset_shard: Any) -> Any:
    """Return a ``tf.data.Dataset`` for ``model.fit``, which then does not divide it among the workers once more.

    Args:
        tf_dataset_shard: The rows of this worker, such as ``get_dataset_shard("train").to_tf(...)``.

    Returns:
        The dataset without automatic sharding, read ahead of the model.

    Raises:
        ImportError: tensorflow is not installed.

    Example:
        >>> batches = prepare_dataset_shard(shard.to_tf("features", "label", batch_size=32))
        >>> model.fit(batches)
    """
    tf = TENSORFLOW.load("prepare_dataset_shard")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options).prefetch(tf.data.AUTOTUNE)
