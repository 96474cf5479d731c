"""``ray.train.collective.barrier``: rank 0 prepares the data, the others wait for it."""

import os

import ray.train
import ray.train.collective
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    path = os.path.join(config["data"], "ready.txt")
    if ray.train.get_context().get_world_rank() == 0:
        with open(path, "w") as file:
            file.write("downloaded")
    ray.train.collective.barrier()
    with open(path) as file:
        text = file.read()
    ray.train.collective.barrier()
    return text


data = os.path.abspath("data")
os.mkdir(data)
result = TorchTrainer(
    train_func, train_loop_config={"data": data}, scaling_config=ScalingConfig(num_workers=2)
).fit()
assert result.return_value == "downloaded"
