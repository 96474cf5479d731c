"""``LoggingConfig`` sets how much the library itself logs; the script's own loggers work in workers as usual."""

import logging
import os

import ray.train
from ray.train import LoggingConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    logger = logging.getLogger("my_project")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.FileHandler(config["log"]))
    logger.info("rank %d is training", ray.train.get_context().get_world_rank())


run_config = RunConfig(logging_config=LoggingConfig(log_level="warning"))
assert run_config.logging_config.log_level == "WARNING"
log = os.path.abspath("training.log")
TorchTrainer(
    train_func,
    train_loop_config={"log": log},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=run_config,
).fit()
with open(log) as file:
    assert sorted(file.read().splitlines()) == ["rank 0 is training", "rank 1 is training"]
