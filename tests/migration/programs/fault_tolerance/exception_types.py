"""``worker_failures`` has exceptions of the types that the workers raised, or of types made from them."""

import os

from ray.train import RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer


def train_func():
    raise KeyError("no such layer")


try:
    TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=os.path.abspath("runs")),
    ).fit()
except TrainingFailedError as error:
    failure = error.worker_failures[0]
    assert isinstance(failure, KeyError), type(failure)
else:
    raise AssertionError("fit() returned although a worker failed")
