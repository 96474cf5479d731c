"""Options of ``iter_torch_batches``: types by column, a device, no short last batch, batches in advance."""

import ray.data
import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device


def train_func():
    shard = ray.train.get_dataset_shard("train")
    sizes = []
    for batch in shard.iter_torch_batches(
        batch_size=4,
        dtypes={"x": torch.float16, "y": torch.long},
        device=get_device(),
        drop_last=True,
        prefetch_batches=2,
    ):
        assert batch["x"].dtype is torch.float16
        assert batch["y"].dtype is torch.long
        assert batch["x"].device == get_device()
        sizes.append(len(batch["x"]))
    return sizes


dataset = ray.data.from_items([{"x": number / 2, "y": number} for number in range(10)])
result = TorchTrainer(
    train_func, datasets={"train": dataset}, scaling_config=ScalingConfig(num_workers=1)
).fit()
assert result.return_value == [4, 4]
