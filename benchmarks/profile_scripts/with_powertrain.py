"""A run that is profiled from outside: python with_powertrain.py SETTINGS"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from powertrain import RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer, prepare_model

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


def train_function(settings: dict[str, Any]) -> None:
    import torch
    from steps import make_model, train

    torch.set_num_threads(1)
    train(prepare_model(make_model(settings["device"])), settings, lambda number: None)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    TorchTrainer(
        train_function,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=1, use_gpu=settings["device"] == "cuda"),
        run_config=RunConfig(name="profiled", storage_path=settings["storage"]),
    ).fit()
