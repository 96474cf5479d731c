"""Preprocessing before training: ``map_batches``, ``map``, ``filter``, ``drop_columns``, statistics of a column."""

import numpy as np
import ray.data
import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def scale(batch):
    batch["scaled"] = batch["value"] / 10.0
    return batch


def label(row):
    row["label"] = int(row["value"] >= 5)
    return row


def train_func():
    shard = ray.train.get_dataset_shard("train")
    columns, largest, ones = set(), 0.0, 0
    for batch in shard.iter_batches(batch_size=2):
        columns |= set(batch)
        largest = max(largest, float(np.max(batch["scaled"])))
        ones += int(batch["label"].sum())
    return sorted(columns), largest <= 0.9, ones <= 5


dataset = ray.data.from_items([{"value": number, "unused": "x"} for number in range(10)])
dataset = dataset.map_batches(scale).map(label).drop_columns(["unused"]).filter(lambda row: row["value"] > 0)
assert dataset.count() == 9
result = TorchTrainer(
    train_func, datasets={"train": dataset}, scaling_config=ScalingConfig(num_workers=1)
).fit()
assert result.return_value == (["label", "scaled", "value"], True, True)
