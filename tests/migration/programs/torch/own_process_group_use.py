"""torch.distributed is initialised for the loop: DDP by hand, a DistributedSampler, variables of the environment."""

import os

import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_func():
    assert dist.is_initialized()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert os.environ["RANK"] == str(rank)
    assert os.environ["WORLD_SIZE"] == str(world_size)
    assert os.environ["LOCAL_RANK"] == str(rank)
    assert os.environ["MASTER_ADDR"]
    data = TensorDataset(torch.arange(8.0).unsqueeze(1))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=False)
    model = DistributedDataParallel(torch.nn.Linear(1, 1).to(get_device()))
    seen = []
    for (batch,) in DataLoader(data, batch_size=2, sampler=sampler):
        model(batch.to(get_device())).sum().backward()
        seen += batch.flatten().tolist()
    return seen


result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit()
assert result.return_value == [0.0, 2.0, 4.0, 6.0]
