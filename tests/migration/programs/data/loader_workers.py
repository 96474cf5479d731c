"""A DataLoader with worker processes of its own inside of the training workers."""

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is not None
        return index * index


def train_func():
    loader = prepare_data_loader(DataLoader(Squares(), batch_size=3, num_workers=1))
    total = torch.zeros(1, dtype=torch.long)
    for batch in loader:
        total += batch.sum()
    torch.distributed.all_reduce(total)
    return int(total)


result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit()
assert result.return_value == sum(number * number for number in range(12))
