"""A summary writer of TensorBoard's files in the loop, with a directory of its own for each worker."""

import os

import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from tensorboardX import SummaryWriter


def train_func(config):
    rank = ray.train.get_context().get_world_rank()
    writer = SummaryWriter(os.path.join(config["logs"], f"rank-{rank}"))
    for step in range(3):
        writer.add_scalar("loss", 1 / (step + 1), step)
        ray.train.report({"step": step})
    writer.close()


logs = os.path.abspath("logs")
TorchTrainer(train_func, train_loop_config={"logs": logs}, scaling_config=ScalingConfig(num_workers=2)).fit()
for rank in range(2):
    (events,) = os.listdir(os.path.join(logs, f"rank-{rank}"))
    assert events.startswith("events.out")
