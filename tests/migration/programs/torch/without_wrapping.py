"""``parallel_strategy=None`` only moves the model, for loops that synchronise gradients themselves."""

import ray.train
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model


def train_func():
    model = prepare_model(torch.nn.Linear(1, 1, bias=False), parallel_strategy=None)
    assert type(model) is torch.nn.Linear
    rank = ray.train.get_context().get_world_rank()
    model(torch.full((1, 1), rank + 1.0, device=get_device())).sum().backward()
    dist.all_reduce(model.weight.grad)
    moved = prepare_model(torch.nn.Linear(1, 1), move_to_device=torch.device("cpu"), parallel_strategy=None)
    return model.weight.grad.item(), str(moved.weight.device)


assert TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit().return_value == (
    3.0,
    "cpu",
)
