"""A dataset in local mode: the one worker gets all of it."""

import ray.data
import ray.train
from ray.train.torch import TorchTrainer


def train_func():
    shard = ray.train.get_dataset_shard("train")
    return sum(int(batch["id"].sum()) for batch in shard.iter_torch_batches(batch_size=4))


result = TorchTrainer(
    train_func,
    datasets={"train": ray.data.range(10)},
    scaling_config=ray.train.ScalingConfig(num_workers=0),
).fit()
assert result.return_value == 45
