"""``metrics_dataframe`` has one row for each report with a checkpoint, of rank 0."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    rank = ray.train.get_context().get_world_rank()
    for epoch in range(3):
        with tempfile.TemporaryDirectory() as directory:
            open(os.path.join(directory, f"model-{rank}.pt"), "w").close()
            ray.train.report(
                {"epoch": epoch, "rank": rank, "loss": 1 / (epoch + 1)},
                checkpoint=Checkpoint.from_directory(directory),
            )


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
frame = result.metrics_dataframe
assert frame["epoch"].tolist() == [0, 1, 2]
assert frame["rank"].tolist() == [0, 0, 0]
assert frame["loss"].min() == 1 / 3
