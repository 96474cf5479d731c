"""``num_workers=0`` runs the training function in the process of the script, for a debugger and for unit tests."""

import os

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model


def train_func(config):
    model = prepare_model(torch.nn.Linear(1, 1))
    model(torch.ones(1, 1).to(get_device())).sum().backward()
    context = ray.train.get_context()
    for step in range(config["steps"]):
        ray.train.report({"step": step, "loss": 1.0 / (step + 1)})
    return os.getpid(), context.get_world_size(), context.get_world_rank()


result = TorchTrainer(
    train_func, train_loop_config={"steps": 3}, scaling_config=ScalingConfig(num_workers=0)
).fit()
assert result.return_value == (os.getpid(), 1, 0)
assert result.metrics["step"] == 2
assert result.error is None
