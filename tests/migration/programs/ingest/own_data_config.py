"""A ``DataConfig`` of the user's own: it changes a dataset and gives each worker its iterators."""

import ray.data
import ray.train
from ray.train import DataConfig, ScalingConfig
from ray.train.torch import TorchTrainer


class EvenRows(DataConfig):
    def __init__(self, divisor):
        super().__init__(datasets_to_split=["train"])
        self.divisor = divisor

    def configure(self, datasets, world_size, worker_handles, worker_node_ids, **kwargs):
        ((name, dataset),) = datasets.items()
        if name == "val":
            return [{"val": dataset.iterator()} for _ in range(world_size)]
        divisor = self.divisor
        even = dataset.map_batches(lambda batch: {"id": batch["id"] * divisor})
        shards = even.streaming_split(world_size, equal=True, locality_hints=worker_node_ids)
        return [{"train": shard} for shard in shards]


def train_func():
    def ids(name):
        shard = ray.train.get_dataset_shard(name)
        return [int(number) for batch in shard.iter_batches(batch_size=4) for number in batch["id"]]

    return ids("train"), sorted(ids("val"))


result = TorchTrainer(
    train_func,
    datasets={"train": ray.data.range(20), "val": ray.data.range(5)},
    dataset_config=EvenRows(divisor=2),
    scaling_config=ScalingConfig(num_workers=2),
).fit()
train, val = result.return_value
assert len(train) == 10
assert all(number % 2 == 0 for number in train)
assert val == [0, 1, 2, 3, 4]
