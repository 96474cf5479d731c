"""Columns by expressions, arguments about scheduling, a mixture of datasets, the schema in the training function."""

import ray.data
import ray.train
from ray.data.expressions import col, lit
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    shard = ray.train.get_dataset_shard("train")
    names = sorted(shard.schema().names)
    ids, sources = [], set()
    for batch in shard.iter_batches(batch_size=4):
        ids += batch["id"].tolist()
        sources |= set(batch["source"])
    return names, sorted(ids), sorted(sources)


web = ray.data.range(6, override_num_blocks=2).with_column("source", lit("web"))
books = ray.data.range(3).with_column("id", col("id") + 100).with_column("source", lit("books"))
dataset = web.mix(books, weights=[2, 1])
dataset = dataset.map_batches(lambda batch: batch, batch_size="auto", num_cpus=1, concurrency=1)
assert dataset.count() == 9
assert web.sum("id") == 15
assert sorted(dataset.unique("source")) == ["books", "web"]
assert [row["id"] for row in web.filter(expr=(col("id") >= 2) & (col("id") < 4)).take_all()] == [2, 3]
result = TorchTrainer(
    train_func, datasets={"train": dataset}, scaling_config=ScalingConfig(num_workers=1)
).fit()
assert result.return_value == (
    ["id", "source"],
    [0, 1, 2, 3, 4, 5, 100, 101, 102],
    ["books", "web"],
)
