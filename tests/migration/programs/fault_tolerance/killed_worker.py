"""A worker whose process is killed is a failure like any other, and ``max_failures=-1`` retries for ever."""

import os
import signal
import tempfile

import ray.train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    checkpoint = ray.train.get_checkpoint()
    step = 0
    if checkpoint:
        with checkpoint.as_directory() as directory, open(os.path.join(directory, "step")) as file:
            step = int(file.read())
    if step < 2 and ray.train.get_context().get_world_rank() == 1:
        with open(config["deaths"], "a") as file:
            file.write("killed\n")
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "step"), "w") as file:
            file.write(str(step + 1))
        ray.train.report({"step": step + 1}, checkpoint=Checkpoint.from_directory(directory))
    ray.train.get_all_reported_checkpoints()
    if step < 2 and ray.train.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


deaths = os.path.abspath("deaths.txt")
result = TorchTrainer(
    train_func,
    train_loop_config={"deaths": deaths},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("runs"), failure_config=FailureConfig(max_failures=-1)),
).fit()
with open(deaths) as file:
    assert len(file.readlines()) == 2
assert result.metrics == {"step": 3}
