"""``collate_fn`` makes the batches that the loop wants from numpy batches."""

import ray.data
import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def collate(batch):
    return torch.as_tensor(batch["id"], dtype=torch.float32).unsqueeze(1), len(batch["id"])


def train_func():
    shard = ray.train.get_dataset_shard("train")
    shapes = []
    for features, rows in shard.iter_torch_batches(batch_size=4, collate_fn=collate):
        assert features.dtype is torch.float32
        shapes.append((tuple(features.shape), rows))
    return shapes


result = TorchTrainer(
    train_func, datasets={"train": ray.data.range(10)}, scaling_config=ScalingConfig(num_workers=1)
).fit()
assert result.return_value == [((4, 1), 4), ((4, 1), 4), ((2, 1), 2)]
