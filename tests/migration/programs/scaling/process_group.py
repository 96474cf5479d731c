"""TorchConfig chooses the backend of the process group and its timeout."""

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer


def train_func():
    values = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(values)
    return dist.get_backend(), values.item(), dist.get_world_size()


result = TorchTrainer(
    train_func,
    torch_config=TorchConfig(backend="gloo", timeout_s=60),
    scaling_config=ray.train.ScalingConfig(num_workers=2),
).fit()
assert result.return_value == ("gloo", 3.0, 2)
