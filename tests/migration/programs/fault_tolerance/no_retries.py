"""Without retries the first failure ends the run, and ``fit`` raises with the text of the worker's error."""

import os

import ray.train
import ray.train.collective
from ray.train import RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
from ray.train.torch import TorchTrainer


def train_func():
    if ray.train.get_context().get_world_rank() == 1:
        raise ValueError("labels must be below 10")
    ray.train.collective.barrier()


try:
    TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("runs")),
    ).fit()
except WorkerGroupError as error:
    assert isinstance(error, TrainingFailedError)
    assert "labels must be below 10" in str(error)
    assert 1 in error.worker_failures
    assert "labels must be below 10" in str(error.worker_failures[1])
else:
    raise AssertionError("fit() returned although a worker failed")
