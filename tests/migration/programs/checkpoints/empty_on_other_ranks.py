"""The usual loop in which all workers report a directory and only rank 0 has written into it."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    for epoch in range(2):
        with tempfile.TemporaryDirectory() as directory:
            if ray.train.get_context().get_world_rank() == 0:
                with open(os.path.join(directory, "model.txt"), "w") as file:
                    file.write(str(epoch))
            ray.train.report({"epoch": epoch}, checkpoint=Checkpoint.from_directory(directory))


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
with result.checkpoint.as_directory() as directory, open(os.path.join(directory, "model.txt")) as file:
    assert file.read() == "1"
assert len(result.best_checkpoints) == 2
