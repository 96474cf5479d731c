"""The same loop with the parts of Powertrain that SETTINGS name: python with_powertrain.py DIRECTORY SETTINGS"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

import powertrain
from powertrain import CheckpointConfig, RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer, prepare_model

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


def train_function(settings: dict[str, Any]) -> None:
    from training import keep, make_model, train

    torch.set_num_threads(settings["threads"])

    parts = settings["parts"]

    def after_step(step: int, state: Any) -> None:
        if "reports" not in parts:
            return
        model, optimizer, loss = state
        metrics = {"loss": loss.item(), "step": step}
        if "checkpoints" in parts and step % settings["every"] == settings["every"] - 1:
            powertrain.report(metrics, checkpoint=powertrain.save_state(model=model, optimizer=optimizer))
        else:
            powertrain.report(metrics)

    times = [
        train(prepare_model(make_model(settings["device"])), {**settings, **size}, after_step)
        for size in settings["sizes"]
    ]
    keep(times, powertrain.get_context().get_world_rank(), settings["directory"])


if __name__ == "__main__":
    directory, settings = os.path.abspath(sys.argv[1]), json.loads(sys.argv[2])
    TorchTrainer(
        train_function,
        train_loop_config={**settings, "directory": directory},
        scaling_config=ScalingConfig(num_workers=settings["workers"], use_gpu=settings["device"] == "cuda"),
        run_config=RunConfig(
            name="overhead",
            trace="trace" in settings["parts"],
            storage_path=os.path.join(directory, "storage"),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()
