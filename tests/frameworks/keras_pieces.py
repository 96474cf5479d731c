"""Run by a test in a process of its own: what TensorFlow's users call, on real models and datasets."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ.update(TF_USE_LEGACY_KERAS="1", TF_CPP_MIN_LOG_LEVEL="3")

import numpy as np
import pytest
import tensorflow as tf

import powertrain
from powertrain import Checkpoint, RunConfig, ScalingConfig
from powertrain.errors import CheckpointError, ConfigError, DataError
from powertrain.tensorflow import (
    ReportCheckpointCallback,
    TensorflowCheckpoint,
    TensorflowTrainer,
    prepare_dataset_shard,
)

ROWS = {
    "x": np.arange(12, dtype=np.float32).reshape(6, 2),
    "y": np.arange(6),
    "name": np.array(list("abcdef")),
}


def small() -> Any:
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def refused(kind: type[Exception], words: str, call: Any) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert words in str(raised.value)


def check_checkpoints() -> None:
    model, directory = small(), tempfile.mkdtemp()
    file, saved = os.path.join(directory, "model.h5"), os.path.join(directory, "saved")
    model.save(file)
    model.save(saved)
    for checkpoint in (
        TensorflowCheckpoint.from_model(model),
        TensorflowCheckpoint.from_h5(file),
        TensorflowCheckpoint.from_saved_model(saved),
    ):
        weights = TensorflowCheckpoint(checkpoint.path).get_model().get_weights()
        assert np.array_equal(weights[0], model.get_weights()[0])
    refused(CheckpointError, "'.h5'", lambda: TensorflowCheckpoint.from_h5(saved))
    refused(CheckpointError, "SavedModel", lambda: TensorflowCheckpoint.from_saved_model(file))
    refused(CheckpointError, "no model.keras", TensorflowCheckpoint(tempfile.mkdtemp()).get_model)


def train() -> None:
    shard: Any = powertrain.get_dataset_shard("train")
    whole = list(shard.to_tf("x", ["y", "name"], batch_size=4))
    assert [tuple(features.shape) for features, _ in whole] == [(4, 2), (2, 2)]
    assert whole[0][1]["name"].numpy().tolist() == [b"a", b"b", b"c", b"d"]
    [(_, _, extra)] = list(shard.to_tf("x", "y", additional_columns="y", batch_size=6))
    assert extra.numpy().tolist() == list(range(6))
    refused(DataError, "'z' is no column", lambda: shard.to_tf("z", "y"))
    refused(DataError, "names no columns", lambda: shard.to_tf([], "y"))
    [batch] = list(shard.iter_tf_batches(batch_size=6, dtypes={"y": tf.float32}))
    assert batch["y"].dtype == tf.float32
    assert batch["x"].dtype == tf.float32
    batches = prepare_dataset_shard(shard.to_tf("x", "y", batch_size=2))
    refused(ConfigError, "names 'none'", lambda: small().fit(
        batches, verbose=0, callbacks=[ReportCheckpointCallback(metrics="none")]))  # fmt: skip
    own = ReportCheckpointCallback("train_end", ["epoch_end", "train_end"], {"error": "mae"})
    small().fit(batches, epochs=2, verbose=0, callbacks=[own])


def main(storage: str) -> None:
    check_checkpoints()
    refused(ConfigError, "checkpoint_on='late'", lambda: ReportCheckpointCallback("late"))
    result = TensorflowTrainer(
        train,
        datasets={"train": powertrain.data.from_numpy(ROWS)},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="pieces", storage_path=storage),
    ).fit()
    assert result.metrics is not None
    assert list(result.metrics) == ["error"], result.metrics
    assert len(result.metrics_dataframe) == 3
    assert len(result.best_checkpoints) == 1
    assert isinstance(result.checkpoint, Checkpoint)
    assert TensorflowCheckpoint(result.checkpoint.path).get_model().count_params() == 3


if __name__ == "__main__":
    main(sys.argv[1])
