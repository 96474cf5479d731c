"""FSDP2 in the loop: ``fully_shard`` over a device mesh of all workers, a step, and the whole state on rank 0."""

import os
import tempfile

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train_func():
    torch.manual_seed(0)
    context = ray.train.get_context()
    mesh = init_device_mesh("cpu", (context.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inputs = torch.ones(4, 4)
    losses = []
    for _ in range(4):
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    with tempfile.TemporaryDirectory() as directory:
        saved = None
        if context.get_world_rank() == 0:
            torch.save(state, os.path.join(directory, "model.pt"))
            saved = Checkpoint.from_directory(directory)
        ray.train.report({"first": losses[0], "last": losses[-1]}, checkpoint=saved)


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.metrics["last"] < result.metrics["first"]
with result.checkpoint.as_directory() as directory:
    state = torch.load(os.path.join(directory, "model.pt"))
assert state["0.weight"].shape == (8, 4)
