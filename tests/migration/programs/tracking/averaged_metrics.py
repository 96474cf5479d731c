"""Metrics of all workers are averaged with torch.distributed before rank 0 reports them."""

import os
import tempfile

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    rank = ray.train.get_context().get_world_rank()
    loss = torch.tensor(float(rank + 1))
    dist.all_reduce(loss, op=dist.ReduceOp.SUM)
    loss /= ray.train.get_context().get_world_size()
    with tempfile.TemporaryDirectory() as directory:
        saved = None
        if rank == 0:
            open(os.path.join(directory, "model.pt"), "w").close()
            saved = Checkpoint.from_directory(directory)
        ray.train.report({"loss": loss.item()}, checkpoint=saved)


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.metrics == {"loss": 1.5}
