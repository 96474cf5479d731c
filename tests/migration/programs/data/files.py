"""Datasets from files: Parquet, CSV and JSON lines are written and read, and trained on."""

import json
import os

import pandas as pd
import ray.data
import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

frame = pd.DataFrame({"x": [float(number) for number in range(8)], "y": list(range(8))})
ray.data.from_pandas(frame).write_parquet(os.path.abspath("parquet"))
frame.to_csv("rows.csv", index=False)
with open("rows.jsonl", "w") as file:
    for row in frame.to_dict("records"):
        file.write(json.dumps(row) + "\n")

assert ray.data.read_csv(os.path.abspath("rows.csv")).count() == 8
assert ray.data.read_json(os.path.abspath("rows.jsonl")).take_all()[0] == {"x": 0.0, "y": 0}
dataset = ray.data.read_parquet(os.path.abspath("parquet"))
assert sorted(dataset.columns()) == ["x", "y"]


def train_func():
    shard = ray.train.get_dataset_shard("train")
    return sum(float(batch["x"].sum()) for batch in shard.iter_torch_batches(batch_size=4))


result = TorchTrainer(
    train_func, datasets={"train": dataset}, scaling_config=ScalingConfig(num_workers=1)
).fit()
assert result.return_value == 28.0
