"""Digits with Keras: the loop of a story, and the same training in one process."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np

import powertrain

EPOCHS = 4
BATCH = 64


def compiled(tf: Any) -> Any:
    """A small network, the same in every process."""
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [tf.keras.Input((64,)), layers.Dense(32, activation="tanh"), layers.Dense(10)]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=tf.keras.optimizers.SGD(0.1, momentum=0.9), loss=loss, metrics=["accuracy"])
    return model


def train_digits(config: dict[str, Any]) -> dict[str, Any]:
    """The loop of Ray Train's guide: a strategy, a shard, the reporting callback."""
    import tensorflow as tf

    from powertrain.tensorflow import ReportCheckpointCallback, TensorflowCheckpoint, prepare_dataset_shard

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    checkpoint = powertrain.get_checkpoint()
    begun = 0
    with strategy.scope():
        if checkpoint is None:
            model = compiled(tf)
        else:
            model = TensorflowCheckpoint(checkpoint.path).get_model()
            begun = int(model.optimizer.iterations.numpy()) // config["steps"]
    rank = powertrain.get_context().get_world_rank()

    class Killer(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if checkpoint is None and epoch == config.get("killed_in") and rank == 1:
                assert powertrain.get_all_reported_checkpoints(), "nothing is committed to go on from"
                os.kill(os.getpid(), signal.SIGKILL)

    shard = powertrain.get_dataset_shard("train")

    def own_batches(_: Any) -> Any:
        rows = BATCH // strategy.num_replicas_in_sync
        return prepare_dataset_shard(shard.to_tf("features", "label", batch_size=rows, drop_last=True))

    for epoch in range(begun, EPOCHS):
        model.fit(
            # A plain dataset would be cut once more: model.fit() takes its batches for those of all workers together.
            strategy.distribute_datasets_from_function(own_batches),
            steps_per_epoch=config["steps"],
            initial_epoch=epoch,
            epochs=epoch + 1,
            verbose=0,
            callbacks=[ReportCheckpointCallback(), Killer()],
        )
    return {
        "begun": begun,
        "workers": strategy.num_replicas_in_sync,
        "keras": tf.keras.__name__.partition(".")[0],
        "has_torch": "torch" in sys.modules,
    }


def train_alone(features: Any, labels: Any) -> list[Any]:
    """Keras's own result, in one process without a run."""
    import tensorflow as tf

    model = compiled(tf)
    rows = len(features) // BATCH * BATCH
    model.fit(features[:rows], labels[:rows], batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    weights: list[Any] = model.get_weights()
    return weights


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        with np.load(sys.argv[2]) as given:
            np.savez(sys.argv[3], *train_alone(given["features"], given["labels"]))
    else:
        import tensorflow

        np.savez(sys.argv[3], *tensorflow.keras.models.load_model(sys.argv[2]).get_weights())
