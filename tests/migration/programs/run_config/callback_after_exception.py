"""A UserCallback gets the exceptions of workers by rank."""

import os

import ray.train
import ray.train.collective
from ray.train import RunConfig, ScalingConfig, TrainingFailedError, UserCallback
from ray.train.torch import TorchTrainer


class Alarm(UserCallback):
    def __init__(self, path):
        self.path = path

    def after_exception(self, run_context, worker_exceptions):
        with open(self.path, "a") as file:
            for rank, error in worker_exceptions.items():
                file.write(f"{rank}: {'the disk is on fire' in str(error)}\n")


def train_func():
    if ray.train.get_context().get_world_rank() == 1:
        raise ValueError("the disk is on fire")
    ray.train.collective.barrier()


path = os.path.abspath("alarms.txt")
try:
    TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.path.abspath("runs"), callbacks=[Alarm(path)]),
    ).fit()
except TrainingFailedError as error:
    assert "the disk is on fire" in str(error)
else:
    raise AssertionError("the failure did not reach the driver")
with open(path) as file:
    assert "1: True" in file.read().splitlines()
