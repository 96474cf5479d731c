"""Data parallel training: rank 0 saves, the others report None; both load it again at the start."""

import os
import tempfile

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    model = ray.train.torch.prepare_model(torch.nn.Linear(2, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"))
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(directory, "state.pt"))
                saved = Checkpoint.from_directory(directory)
            ray.train.report({"epoch": epoch}, checkpoint=saved)
    return start


def fit(epochs):
    return TorchTrainer(
        train_func,
        train_loop_config={"epochs": epochs},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="ddp", storage_path=os.path.abspath("runs")),
    ).fit()


first = fit(epochs=2)
assert first.metrics["epoch"] == 1
assert sorted(os.listdir(first.checkpoint.path))[-1] == "state.pt"
second = fit(epochs=3)
assert second.return_value == 2
assert second.metrics["epoch"] == 2
