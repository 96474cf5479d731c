"""The library imported as ``train``, with ``train.torch`` reached through it."""

import torch
from ray import train
from ray.train.torch import TorchTrainer


def train_func(config):
    model = train.torch.prepare_model(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for _ in range(2):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        train.report({"rank": train.get_context().get_world_rank()})
    return str(train.torch.get_device())


result = TorchTrainer(
    train_func, train_loop_config={"lr": 0.01}, scaling_config=train.ScalingConfig(num_workers=2)
).fit()
assert result.return_value == "cpu"
