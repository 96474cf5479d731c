"""Files are passed to workers by absolute path, and every worker can write to its working directory."""

import os

import ray.train
from ray.train.torch import TorchTrainer


def train_func(config):
    with open(config["data"]) as file:
        numbers = [int(line) for line in file]
    with open(f"scratch-{ray.train.get_context().get_world_rank()}.txt", "w") as file:
        file.write("a file of this worker")
    return sum(numbers), os.path.exists("scratch-0.txt")


with open("numbers.txt", "w") as file:
    file.write("1\n2\n3\n")
result = TorchTrainer(
    train_func,
    train_loop_config={"data": os.path.abspath("numbers.txt")},
    scaling_config=ray.train.ScalingConfig(num_workers=2),
).fit()
assert result.return_value == (6, True)
