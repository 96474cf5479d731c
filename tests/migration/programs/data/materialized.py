"""``materialize`` computes a dataset once; what a random map made of it stays the same in all epochs."""

import numpy as np
import ray.data
import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def add_noise(batch):
    batch["noise"] = np.random.rand(len(batch["id"]))
    return batch


def train_func():
    shard = ray.train.get_dataset_shard("train")
    epochs = []
    for _ in range(2):
        epochs.append(sorted(value for batch in shard.iter_batches() for value in batch["noise"].tolist()))
    return epochs[0] == epochs[1], len(epochs[0])


dataset = ray.data.range(32).map_batches(add_noise).materialize()
result = TorchTrainer(
    train_func, datasets={"train": dataset}, scaling_config=ScalingConfig(num_workers=1)
).fit()
assert result.return_value == (True, 32)
