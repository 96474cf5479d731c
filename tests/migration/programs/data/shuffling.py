"""Shuffling: the whole dataset before training, and a local buffer while iterating."""

import ray.data
import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    shard = ray.train.get_dataset_shard("train")
    seen = []
    for batch in shard.iter_torch_batches(batch_size=10, local_shuffle_buffer_size=30, local_shuffle_seed=3):
        seen += batch["id"].tolist()
    return seen


result = TorchTrainer(
    train_func,
    datasets={"train": ray.data.range(100).random_shuffle(seed=1)},
    scaling_config=ScalingConfig(num_workers=1),
).fit()
assert sorted(result.return_value) == list(range(100))
assert result.return_value != list(range(100))
