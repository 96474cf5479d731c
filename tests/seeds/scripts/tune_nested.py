"""A sweep over the ``train_loop_config`` of a trainer: python tune_nested.py STORAGE"""

from __future__ import annotations

import sys
from typing import Any

import torch

import powertrain
import powertrain.torch
from powertrain import RunConfig, ScalingConfig, tune
from powertrain.torch import TorchTrainer


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = powertrain.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    rows = torch.randn(config["batch_size"], 4)
    for _ in range(config["epochs"]):
        loss = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        powertrain.report({"eval_loss": loss.item()})


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_loop_per_worker=train_func,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=sys.argv[1]),
    )
    tuner = tune.Tuner(
        trainer,
        param_space={
            "train_loop_config": {
                "lr": tune.loguniform(1e-5, 1e-3),
                "batch_size": tune.choice([16, 32, 64]),
                "epochs": 3,
            },
        },
        tune_config=tune.TuneConfig(
            num_samples=10,
            metric="eval_loss",
            mode="min",
            scheduler=tune.schedulers.ASHAScheduler(max_t=3, grace_period=1),
        ),
    )
    results = tuner.fit()
    best = results.get_best_result()
    print("trials:", len(results))
    print("stopped early:", any(trial.iteration < 3 for trial in results.trials))
    print("epochs:", (best.config or {})["train_loop_config"]["epochs"])
