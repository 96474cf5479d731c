"""Metrics keep their types: numbers, strings, lists, nested dicts."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

METRICS = {
    "step": 3,
    "loss": 0.25,
    "phase": "warm-up",
    "done": False,
    "per_class": [0.1, 0.9],
    "eval": {"f1": 0.5},
}


def train_func():
    with tempfile.TemporaryDirectory() as directory:
        open(os.path.join(directory, "model.pt"), "w").close()
        ray.train.report(METRICS, checkpoint=Checkpoint.from_directory(directory))


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.metrics == METRICS
assert type(result.metrics["step"]) is int
assert type(result.metrics["done"]) is bool
