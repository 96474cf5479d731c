"""Metrics that are not plain JSON: numpy scalars, a date, a path."""

import datetime
import os
import pathlib

import numpy as np
import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    ray.train.report(
        {
            "loss": np.float32(0.5),
            "steps": np.int64(7),
            "at": datetime.datetime(2026, 1, 2, 3, 4, 5),
            "took": datetime.timedelta(seconds=90),
            "file": pathlib.PurePosixPath("/data/train"),
        }
    )
    return "went on"


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.return_value == "went on"
