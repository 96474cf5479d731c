"""``num_workers=(min, max)``: the run has as many workers as there is room for, within the bounds."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory, open(os.path.join(directory, "epoch")) as file:
            start = int(file.read()) + 1
    for epoch in range(start, config["epochs"]):
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if ray.train.get_context().get_world_rank() == 0:
                with open(os.path.join(directory, "epoch"), "w") as file:
                    file.write(str(epoch))
                saved = Checkpoint.from_directory(directory)
            ray.train.report(
                {"epoch": epoch, "workers": ray.train.get_context().get_world_size()}, checkpoint=saved
            )


result = TorchTrainer(
    train_func,
    train_loop_config={"epochs": 3},
    scaling_config=ScalingConfig(num_workers=(1, 2), use_gpu=False),
    run_config=RunConfig(
        name="elastic",
        storage_path=os.path.abspath("runs"),
        failure_config=FailureConfig(max_failures=3),
    ),
).fit()
assert result.metrics["epoch"] == 2
assert 1 <= result.metrics["workers"] <= 2
