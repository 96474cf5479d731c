"""A sweep whose space is the configuration itself: python tune_flat.py STORAGE"""

from __future__ import annotations

import sys
from typing import Any

import torch

import powertrain as train
import powertrain.torch
from powertrain import RunConfig, ScalingConfig, tune
from powertrain.torch import TorchTrainer
from powertrain.tune.schedulers import ASHAScheduler


def train_func(config: dict[str, Any]) -> None:
    lr = config["lr"]
    batch_size = config["batch_size"]

    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model = train.torch.prepare_model(model)  # type: ignore[assignment]

    for _ in range(10):
        rows = torch.randn(batch_size, 4)
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train.report({"loss": loss.item()})


if __name__ == "__main__":
    param_space = {
        "lr": tune.loguniform(1e-5, 1e-2),
        "batch_size": tune.choice([16, 32, 64, 128]),
    }
    tuner = tune.Tuner(
        TorchTrainer(
            train_func,
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(storage_path=sys.argv[1]),
        ),
        param_space=param_space,
        tune_config=tune.TuneConfig(num_samples=20, scheduler=ASHAScheduler(metric="loss", mode="min")),
    )
    results = tuner.fit()
    best = results.get_best_result(metric="loss", mode="min")
    print("trials:", len(results))
    print(f"Best: {best.config}")
