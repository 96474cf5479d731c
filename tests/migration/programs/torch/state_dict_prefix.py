"""Weights of a wrapped model are loaded by a plain one, with the prefix that DDP adds taken out."""

import os
import tempfile

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present


def train_func():
    model = prepare_model(torch.nn.Linear(3, 1))
    with tempfile.TemporaryDirectory() as directory:
        saved = None
        if ray.train.get_context().get_world_rank() == 0:
            torch.save(model.state_dict(), os.path.join(directory, "model.pt"))
            saved = Checkpoint.from_directory(directory)
        ray.train.report({"step": 1}, checkpoint=saved)


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
with result.checkpoint.as_directory() as directory:
    state = torch.load(os.path.join(directory, "model.pt"))
consume_prefix_in_state_dict_if_present(state, "module.")
assert sorted(state) == ["bias", "weight"]
torch.nn.Linear(3, 1).load_state_dict(state)
