"""``iter_batches`` in its formats: numpy by default, pandas and pyarrow by name, and ``iter_rows``."""

import numpy as np
import pandas as pd
import pyarrow as pa
import ray.data
import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    shard = ray.train.get_dataset_shard("train")
    kinds = []
    for batch in shard.iter_batches(batch_size=4):
        assert isinstance(batch["id"], np.ndarray)
        kinds.append(len(batch["id"]))
    for batch in shard.iter_batches(batch_size=4, batch_format="pandas"):
        assert isinstance(batch, pd.DataFrame)
    for batch in shard.iter_batches(batch_size=4, batch_format="pyarrow"):
        assert isinstance(batch, pa.Table)
    rows = list(shard.iter_rows())
    assert all(set(row) == {"id"} for row in rows)
    return sum(kinds), len(rows)


result = TorchTrainer(
    train_func, datasets={"train": ray.data.range(16)}, scaling_config=ScalingConfig(num_workers=2)
).fit()
assert result.return_value == (8, 8)
