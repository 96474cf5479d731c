"""``DataConfig(datasets_to_split=...)``: the training data is split, every worker gets all of the validation data."""

import ray.data
import ray.train
from ray.train import DataConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    def rows(name):
        shard = ray.train.get_dataset_shard(name)
        return sum(len(batch["id"]) for batch in shard.iter_torch_batches(batch_size=5))

    return rows("train"), rows("val")


result = TorchTrainer(
    train_func,
    datasets={"train": ray.data.range(20), "val": ray.data.range(10)},
    dataset_config=DataConfig(datasets_to_split=["train"]),
    scaling_config=ScalingConfig(num_workers=2),
).fit()
assert result.return_value == (10, 10)
