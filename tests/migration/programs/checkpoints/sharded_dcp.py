"""A sharded model: torch.distributed.checkpoint writes a part on each worker and reads them after a resume."""

import os
import tempfile

import ray.train
import torch
import torch.distributed.checkpoint as dcp
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train_func(config):
    mesh = init_device_mesh("cpu", (ray.train.get_context().get_world_size(),))
    model = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.zeros_(model.weight)
    fully_shard(model, mesh=mesh)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = {"model": get_model_state_dict(model)}
            dcp.load(state, checkpoint_id=directory)
            set_model_state_dict(model, state["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(config["steps"]):
        (-model(torch.ones(1, 4)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as directory:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=directory)
        ray.train.report({"steps": config["steps"]}, checkpoint=Checkpoint.from_directory(directory))
    return model.weight.full_tensor().sum().item()


def fit(steps):
    return TorchTrainer(
        train_func,
        train_loop_config={"steps": steps},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="sharded", storage_path=os.path.abspath("runs")),
    ).fit()


first = fit(steps=2)
assert first.return_value == 32
files = os.listdir(first.checkpoint.path)
assert ".metadata" in files
assert len([name for name in files if name.endswith(".distcp")]) == 2
assert fit(steps=1).return_value == 48, "two steps of the first run and one of the second"
