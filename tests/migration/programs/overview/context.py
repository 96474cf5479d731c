"""What the context says about a worker, and that it is only there inside of the training function."""

import os

import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    context = ray.train.get_context()
    rank = context.get_world_rank()
    facts = [
        context.get_world_size(),
        context.get_local_rank(),
        context.get_local_world_size(),
        context.get_node_rank(),
        context.get_experiment_name(),
    ]
    with open(os.path.join(config["out"], f"rank-{rank}"), "w") as file:
        file.write(repr(facts))


out = os.path.abspath("out")
os.mkdir(out)
TorchTrainer(
    train_func,
    train_loop_config={"out": out},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="known", storage_path=os.path.abspath("runs")),
).fit()

for rank in range(2):
    with open(os.path.join(out, f"rank-{rank}")) as file:
        assert file.read() == repr([2, rank, 2, 0, "known"])

try:
    ray.train.get_context()
except RuntimeError as error:
    assert "get_context" in str(error)
else:
    raise AssertionError("there is a context in the driver")
