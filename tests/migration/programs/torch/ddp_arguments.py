"""``parallel_strategy_kwargs`` go to DistributedDataParallel, here for a layer that is not always used."""

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(1, 1)
        self.unused = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.used(x)


def train_func():
    model = prepare_model(Branches(), parallel_strategy_kwargs={"find_unused_parameters": True})
    for _ in range(3):
        model(torch.ones(2, 1)).sum().backward()
    return model.find_unused_parameters, model.module.unused.weight.grad is None


result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit()
assert result.return_value == (True, True)
