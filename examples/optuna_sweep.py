"""Search for a good classifier of handwritten digits: Optuna suggests trials, ASHA stops the weak ones.

Each trial is a run with two workers. Interrupt this script and start it again, and the sweep resumes::

    python examples/optuna_sweep.py
    powertrain show digits-sweep
    python examples/optuna_sweep.py --smoke           # a minute on two cores
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import powertrain as train
from powertrain import ScalingConfig, tune
from powertrain.torch import TorchTrainer, prepare_data_loader, prepare_model
from powertrain.tune.schedulers import ASHAScheduler
from powertrain.tune.search.optuna import OptunaSearch


def train_digits(config: dict[str, Any]) -> None:
    """Training function of every worker of a trial."""
    torch.manual_seed(0)
    pictures, labels = load_digits(return_X_y=True)
    parts = train_test_split(pictures / 16, labels, test_size=0.25, random_state=0, stratify=labels)
    learn_x, test_x = (torch.as_tensor(part).float() for part in parts[:2])
    learn_y, test_y = (torch.as_tensor(part).long() for part in parts[2:])
    batches = prepare_data_loader(
        DataLoader(TensorDataset(learn_x, learn_y), 32, shuffle=True, drop_last=True)
    )
    layers = [
        nn.Linear(64, config["width"]),
        nn.ReLU(),
        nn.Dropout(config["dropout"]),
        nn.Linear(config["width"], 10),
    ]
    model = prepare_model(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        model.train()
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (model(test_x.to(train.torch.get_device())).argmax(1).cpu() == test_y).float().mean()
        train.report({"epoch": epoch, "accuracy": right.item()})


def main() -> None:
    arguments = argparse.ArgumentParser(description="Search for a good classifier of handwritten digits.")
    arguments.add_argument(
        "--name", default="digits-sweep", help="the sweep; the same name again goes on with it"
    )
    arguments.add_argument("--storage-path", help="where runs are kept; the default when left out")
    arguments.add_argument("--trials", type=int, default=16)
    arguments.add_argument("--epochs", type=int, default=16)
    arguments.add_argument("--smoke", action="store_true", help="three trials of two epochs")
    options = arguments.parse_args()
    if options.smoke:
        options.trials, options.epochs = 3, 2

    tuner = tune.Tuner(
        TorchTrainer(train_digits, scaling_config=ScalingConfig(num_workers=2)),
        param_space={
            "train_loop_config": {
                "lr": tune.loguniform(1e-4, 1e-1),
                "width": tune.choice([16, 32, 64]),
                "dropout": tune.uniform(0.0, 0.5),
                "epochs": options.epochs,
            }
        },
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=options.trials,
            max_concurrent_trials=2,
            search_alg=OptunaSearch(seed=0),
            scheduler=ASHAScheduler(max_t=options.epochs, grace_period=2),
        ),
        run_config=tune.RunConfig(name=options.name, storage_path=options.storage_path),
    )
    best = tuner.fit().get_best_result()
    assert best.metrics is not None
    assert best.config is not None
    print(f"best accuracy {best.metrics['accuracy']:.2%} with {best.config['train_loop_config']}")


if __name__ == "__main__":
    main()
