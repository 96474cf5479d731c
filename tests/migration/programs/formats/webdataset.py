"""WebDatasets: samples are written to tar files, read again by their endings, and trained on."""

import os

import numpy as np
import ray.data
import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

rows = [
    {"__key__": f"{number:04d}", "cls": number, "txt": f"row {number}", "npy": np.full(3, number)}
    for number in range(8)
]
ray.data.from_items(rows).write_webdataset(os.path.abspath("shards"))
assert all(name.endswith(".tar") for name in os.listdir("shards"))

dataset = ray.data.read_webdataset(os.path.abspath("shards"), suffixes=["cls", "txt", "npy"])
found = sorted(dataset.take_all(), key=lambda row: row["__key__"])
assert [row["txt"] for row in found] == [f"row {number}" for number in range(8)]
assert found[3]["npy"].tolist() == [3, 3, 3]
assert found[0]["__url__"].endswith(".tar")

undecoded = ray.data.read_webdataset(os.path.abspath("shards"), decoder=None, suffixes=["cls"])
assert sorted(row["cls"] for row in undecoded.take_all()) == [str(number).encode() for number in range(8)]


def twice(sample):
    return {"__key__": sample["__key__"], "cls": 2 * int(sample["cls"])}


doubled = ray.data.read_webdataset(os.path.abspath("shards"), decoder=twice)
assert sorted(row["cls"] for row in doubled.take_all()) == [2 * number for number in range(8)]


def train_func():
    shard = ray.train.get_dataset_shard("train")
    return sum(int(batch["cls"].sum()) for batch in shard.iter_batches(batch_size=3))


labels = dataset.select_columns(["cls"])
result = TorchTrainer(
    train_func, datasets={"train": labels}, scaling_config=ScalingConfig(num_workers=1)
).fit()
assert result.return_value == 28
