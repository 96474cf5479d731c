"""Options of data ingest: the defaults, changed and passed to ``DataConfig``."""

import ray.data
import ray.train
from ray.train import DataConfig, ScalingConfig
from ray.train.torch import TorchTrainer

options = DataConfig.default_ingest_options()
options.preserve_order = True


def train_func():
    shard = ray.train.get_dataset_shard("train")
    return sum(len(batch["id"]) for batch in shard.iter_batches(batch_size=4))


result = TorchTrainer(
    train_func,
    datasets={"train": ray.data.range(20)},
    dataset_config=DataConfig(datasets_to_split=["train"], execution_options=options),
    scaling_config=ScalingConfig(num_workers=2),
).fit()
assert result.return_value == 10
