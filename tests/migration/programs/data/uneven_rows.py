"""Rows that two workers cannot share evenly: every worker gets as many batches as the others."""

import os

import ray.data
import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train_func(config):
    model = prepare_model(torch.nn.Linear(1, 1))
    shard = ray.train.get_dataset_shard("train")
    batches = 0
    for batch in shard.iter_torch_batches(batch_size=1, dtypes=torch.float32):
        model(batch["id"].unsqueeze(1)).sum().backward()
        batches += 1
    with open(os.path.join(config["out"], str(ray.train.get_context().get_world_rank())), "w") as file:
        file.write(str(batches))


out = os.path.abspath("out")
os.mkdir(out)
TorchTrainer(
    train_func,
    train_loop_config={"out": out},
    datasets={"train": ray.data.range(7)},
    scaling_config=ScalingConfig(num_workers=2),
).fit()
with open("out/0") as first, open("out/1") as second:
    assert first.read() == second.read()
