"""``prepare_data_loader`` with ``add_dist_sampler=False`` and for an IterableDataset: all rows on every worker."""

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(6))


def train_func():
    whole = prepare_data_loader(
        DataLoader(TensorDataset(torch.arange(6)), batch_size=2), add_dist_sampler=False
    )
    rows = [value for (batch,) in whole for value in batch.tolist()]
    streamed = []
    for batch in prepare_data_loader(DataLoader(Numbers(), batch_size=3), move_to_device=True):
        assert batch.device == get_device()
        streamed += batch.tolist()
    return rows, streamed


result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit()
assert result.return_value == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
