"""Gradient accumulation with ``no_sync``: gradients are averaged once for several batches."""

import contextlib

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train_func():
    rank = ray.train.get_context().get_world_rank()
    model = prepare_model(torch.nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model.module.weight.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches = 4
    for index in range(batches):
        last = index == batches - 1
        with contextlib.nullcontext() if last else model.no_sync():
            (model(torch.full((1, 1), rank + 1.0)).sum() / batches).backward()
    optimizer.step()
    return model.module.weight.item()


assert TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit().return_value == -1.5
