"""Rows sorted by columns before training: directions, nulls, and every row in training."""

import pandas as pd
import ray.data
import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    shard = ray.train.get_dataset_shard("train")
    times = []
    for batch in shard.iter_batches(batch_size=4):
        times += batch["time"].tolist()
    return times


frame = pd.DataFrame(
    {
        "user": ["b", "a", "b", "a", "c", "a"],
        "time": [3, 1, 2, 5, 4, 0],
        "score": [0.5, None, 0.1, 0.9, 0.3, 0.2],
    }
)
dataset = ray.data.from_pandas(frame)

by_time = dataset.sort("time")
assert [row["time"] for row in by_time.take_all()] == [0, 1, 2, 3, 4, 5]
newest = dataset.sort("time", descending=True).take(2)
assert [row["time"] for row in newest] == [5, 4]
both = dataset.sort(["user", "time"], descending=[False, True])
assert [(row["user"], row["time"]) for row in both.take_all()] == [
    ("a", 5), ("a", 1), ("a", 0), ("b", 3), ("b", 2), ("c", 4),
]  # fmt: skip
scores = [row["score"] for row in dataset.sort("score", descending=True).take_all()]
assert scores[:5] == [0.9, 0.5, 0.3, 0.2, 0.1], scores
assert pd.isna(scores[5]), "missing values are the last ones"
assert by_time.count() == 6

result = TorchTrainer(
    train_func, datasets={"train": by_time}, scaling_config=ScalingConfig(num_workers=1)
).fit()
assert result.error is None
assert sorted(result.return_value) == [0, 1, 2, 3, 4, 5]
