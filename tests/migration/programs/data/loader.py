"""A torch DataLoader through ``prepare_data_loader``: a distributed sampler, ``set_epoch``, all rows once."""

import ray.train
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader
from torch.utils.data import DataLoader, TensorDataset


def train_func():
    data = TensorDataset(torch.arange(16))
    loader = prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True))
    assert len(loader) == 2
    orders = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        mine = torch.cat([batch for (batch,) in loader])
        both = [torch.empty_like(mine) for _ in range(ray.train.get_context().get_world_size())]
        dist.all_gather(both, mine)
        orders.append(torch.cat(both).tolist())
    return orders


first, second = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit().return_value
assert sorted(first) == sorted(second) == list(range(16))
assert first != second
