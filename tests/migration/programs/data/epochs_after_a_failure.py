"""A checkpoint at the end of each epoch: after a failure the next epoch begins, and all of its rows come."""

import os
import tempfile

import ray.data
import ray.train
import ray.train.collective
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory, open(os.path.join(directory, "epoch")) as file:
            start = int(file.read()) + 1
    shard = ray.train.get_dataset_shard("train")
    for epoch in range(start, 3):
        rows = sum(len(batch["id"]) for batch in shard.iter_torch_batches(batch_size=5))
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "epoch"), "w") as file:
                file.write(str(epoch))
            ray.train.report({"epoch": epoch, "rows": rows}, checkpoint=Checkpoint.from_directory(directory))
        if epoch == 1 and start == 0:
            ray.train.get_all_reported_checkpoints()
            raise RuntimeError("once")


result = TorchTrainer(
    train_func,
    train_loop_config={},
    datasets={"train": ray.data.range(20)},
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs"), failure_config=FailureConfig(max_failures=1)),
).fit()
found = [(metrics["epoch"], metrics["rows"]) for _, metrics in result.best_checkpoints]
assert found == [(0, 20), (1, 20), (2, 20)]
