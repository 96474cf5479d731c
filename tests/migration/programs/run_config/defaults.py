"""A run without a RunConfig gets a name and a place of its own."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    with tempfile.TemporaryDirectory() as directory:
        open(os.path.join(directory, "empty.txt"), "w").close()
        ray.train.report({"step": 1}, checkpoint=Checkpoint.from_directory(directory))
    return ray.train.get_context().get_experiment_name()


first = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=1)).fit()
assert first.return_value
assert os.path.basename(first.path) == first.return_value
assert os.path.isdir(first.path)
