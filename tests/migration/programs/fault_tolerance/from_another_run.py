"""A new run begins from the checkpoint of another one, which is passed in its config."""

import os
import tempfile

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    model = torch.nn.Linear(1, 1)
    checkpoint = ray.train.get_checkpoint() or config.get("pretrained")
    if checkpoint:
        with checkpoint.as_directory() as directory:
            model.load_state_dict(torch.load(os.path.join(directory, "model.pt")))
    with torch.no_grad():
        model.weight.fill_(model.weight.item() + 1 if checkpoint else 5.0)
    with tempfile.TemporaryDirectory() as directory:
        torch.save(model.state_dict(), os.path.join(directory, "model.pt"))
        ray.train.report({"weight": model.weight.item()}, checkpoint=Checkpoint.from_directory(directory))


def fit(name, config):
    return TorchTrainer(
        train_func,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=name, storage_path=os.path.abspath("runs")),
    ).fit()


pretrained = fit("pretraining", {})
assert pretrained.metrics["weight"] == 5.0
assert fit("finetuning", {"pretrained": pretrained.checkpoint}).metrics["weight"] == 6.0
