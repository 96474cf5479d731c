"""``prepare_model`` wraps a model in DistributedDataParallel: all workers have the same weights after a step."""

import ray.train
import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model
from torch.nn.parallel import DistributedDataParallel


def train_func():
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(rank)
    model = prepare_model(torch.nn.Linear(2, 1))
    assert isinstance(model, DistributedDataParallel)
    assert next(model.parameters()).device == get_device()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((4, 2), float(rank))).sum().backward()
    optimizer.step()
    mine = model.module.weight.detach().clone()
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    return torch.equal(both[0], both[1])


assert TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit().return_value is True
