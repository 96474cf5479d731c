"""TorchCheckpoint: a checkpoint made of a state dict, which loads a model again."""

import os

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchCheckpoint, TorchTrainer


def train_func():
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 3.0)
    ray.train.report({"step": 1}, checkpoint=TorchCheckpoint.from_state_dict(model.state_dict()))


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
checkpoint = TorchCheckpoint(result.checkpoint.path, result.checkpoint.filesystem)
loaded = checkpoint.get_model(torch.nn.Linear(2, 1))
assert loaded.weight.tolist() == [[3.0, 3.0]]
