"""``broadcast_from_rank_zero``: rank 0 makes the identity of an experiment, and all workers get it."""

import os
import uuid

import ray.train
from ray.train import ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.torch import TorchTrainer


def train_func(config):
    rank = ray.train.get_context().get_world_rank()
    identity = {"id": uuid.uuid4().hex} if rank == 0 else None
    identity = broadcast_from_rank_zero(identity)
    with open(os.path.join(config["out"], str(rank)), "w") as file:
        file.write(identity["id"])


out = os.path.abspath("out")
os.mkdir(out)
TorchTrainer(train_func, train_loop_config={"out": out}, scaling_config=ScalingConfig(num_workers=2)).fit()
with open("out/0") as first, open("out/1") as second:
    assert len(first.read()) == len(second.read()) == 32
with open("out/0") as first, open("out/1") as second:
    assert first.read() == second.read()
