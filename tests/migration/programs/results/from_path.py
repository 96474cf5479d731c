"""``Result.from_path`` reads a run again from its directory."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    for epoch in range(2):
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "model.txt"), "w") as file:
                file.write(str(epoch))
            ray.train.report(
                {"epoch": epoch, "loss": 1.0 - epoch}, checkpoint=Checkpoint.from_directory(directory)
            )


trained = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(name="again", storage_path=os.path.abspath("runs")),
).fit()
read = Result.from_path(trained.path)
assert read.metrics == trained.metrics == {"epoch": 1, "loss": 0.0}
assert read.checkpoint.path == trained.checkpoint.path
assert len(read.best_checkpoints) == 2
assert read.get_best_checkpoint("loss", mode="max").path == read.best_checkpoints[0][0].path
with read.checkpoint.as_directory() as directory, open(os.path.join(directory, "model.txt")) as file:
    assert file.read() == "1"
