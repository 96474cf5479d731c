"""Digits with JAX: the loop of a story, and the same training in one process."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np

import powertrain
from powertrain import Checkpoint

STEPS = 30
_EVERY = 10
_RATE = 0.5


def begin() -> dict[str, Any]:
    """The weights of a small network, the same in every process."""
    random = np.random.default_rng(0)
    return {
        "hidden": random.normal(0, 0.1, (64, 32)).astype(np.float32),
        "output": random.normal(0, 0.1, (32, 10)).astype(np.float32),
    }


def make_step() -> Any:
    import jax
    import jax.numpy as jnp

    def loss(weights: Any, features: Any, labels: Any) -> Any:
        logits = jnp.tanh(features @ weights["hidden"]) @ weights["output"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -picked.mean()

    @jax.jit
    def step(weights: Any, features: Any, labels: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, features, labels)
        return {name: weights[name] - _RATE * gradients[name] for name in weights}, value

    return step


def train_digits(config: dict[str, Any]) -> dict[str, Any]:
    """Each worker holds its rows of one global array; gradients are those of all rows."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    frame = powertrain.get_dataset_shard("train").materialize().to_pandas()
    frame = frame.iloc[: config["rows_per_worker"]]
    mesh = Mesh(np.array(jax.devices()), ("workers",))
    by_row, whole = NamedSharding(mesh, PartitionSpec("workers")), NamedSharding(mesh, PartitionSpec())

    def shared(array: Any) -> Any:
        return jax.make_array_from_process_local_data(by_row, array)

    features = shared(frame.drop(columns="label").to_numpy(np.float32) / 16)
    labels = shared(frame["label"].to_numpy(np.int32))
    weights, begun = begin(), 0
    checkpoint = powertrain.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory, np.load(os.path.join(directory, "weights.npz")) as saved:
            weights, begun = {name: saved[name] for name in weights}, int(saved["step"])
    weights = {
        name: jax.make_array_from_process_local_data(whole, value, value.shape)
        for name, value in weights.items()
    }
    step, rank = make_step(), powertrain.get_context().get_world_rank()
    for number in range(begun, STEPS):
        weights, loss = step(weights, features, labels)
        metrics = {"step": number, "loss": float(loss)}
        if (number + 1) % _EVERY:
            powertrain.report(metrics)
        else:
            save(weights, number + 1, metrics, rank)
        if checkpoint is None and number == config.get("killed_in") and rank == 1:
            assert powertrain.get_all_reported_checkpoints(), "nothing is committed to go on from"
            os.kill(os.getpid(), signal.SIGKILL)
    return {"begun": begun, "devices": jax.device_count(), "has_torch": "torch" in sys.modules}


def save(weights: dict[str, Any], step: int, metrics: dict[str, Any], rank: int) -> None:
    with powertrain.checkpoint_dir() as directory:
        saved = None
        if rank == 0:
            arrays: dict[str, Any] = {name: np.asarray(value) for name, value in weights.items()}
            np.savez(os.path.join(directory, "weights.npz"), step=step, **arrays)
            saved = Checkpoint.from_directory(directory)
        powertrain.report(metrics, checkpoint=saved)


def train_alone(features: Any, labels: Any) -> dict[str, Any]:
    """JAX's own result, in one process without a run."""
    weights, step = begin(), make_step()
    for _ in range(STEPS):
        weights, _ = step(weights, features.astype(np.float32) / 16, labels.astype(np.int32))
    return {name: np.asarray(value) for name, value in weights.items()}


if __name__ == "__main__":
    with np.load(sys.argv[1]) as given:
        np.savez(sys.argv[2], **train_alone(given["features"], given["labels"]))
