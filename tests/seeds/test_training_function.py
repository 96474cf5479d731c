"""The blocks of seeds/002, written anew: training function, scaling config, checkpoints, fault tolerance."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import powertrain
from powertrain import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model


def build_model(config: dict[str, Any]) -> torch.nn.Module:
    hidden = config["hidden"]
    return torch.nn.Sequential(torch.nn.Linear(64, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10))


def build_dataloader(config: dict[str, Any]) -> DataLoader[Any]:
    """scikit-learn's handwritten digits: 8x8 images, ten classes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=32, shuffle=True)


def train_digits(config: dict[str, Any]) -> int:
    model = build_model(config)
    model = model.to(get_device())
    model = prepare_model(model)
    train_loader = prepare_data_loader(build_dataloader(config))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        running_loss = 0.0
        for inputs, targets in train_loader:
            inputs, targets = inputs.to(get_device()), targets.to(get_device())
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
        powertrain.report({"loss": running_loss / len(train_loader), "epoch": epoch})
    return len(train_loader)


def test_the_training_function_learns_on_two_workers() -> None:
    trainer = TorchTrainer(
        train_loop_per_worker=train_digits,
        train_loop_config={"lr": 1e-2, "epochs": 3, "hidden": 32},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 0.5}),
    )
    result = trainer.fit()
    frame = result.dataframe(ranks="all")
    losses = frame[frame["rank"] == 0].sort_values("epoch")["loss"].tolist()
    assert losses[-1] < losses[0] / 3
    assert result.metrics == {"loss": losses[-1], "epoch": 2}
    assert result.return_value == 29, "1797 digits, half of them per worker, in batches of 32"


# --------------------------------------------------------------------------- checkpoints from a dict

#: By epoch; the smallest are those of epochs 4, 2 and 1.
VAL_LOSSES = (0.9, 0.3, 0.2, 0.8, 0.1, 0.7)


def train_and_save(config: dict[str, Any]) -> list[int]:
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = 0
    if checkpoint := powertrain.get_checkpoint():
        state = checkpoint.to_dict()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    for epoch in range(start, len(VAL_LOSSES)):
        model(torch.rand(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        powertrain.report(
            {"val_loss": VAL_LOSSES[epoch], "epoch": epoch},
            checkpoint=Checkpoint.from_dict(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            ),
        )
        if epoch in config["faults"] and epoch > start:
            powertrain.collective.barrier()  # all ranks' reports are with the run by then
            raise RuntimeError(f"a fault at epoch {epoch}")
    return list(range(start, len(VAL_LOSSES)))


def _trainer(run_config: RunConfig, faults: tuple[int, ...] = ()) -> TorchTrainer:
    return TorchTrainer(
        train_and_save,
        train_loop_config={"faults": faults},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run_config,
    )


def test_only_the_three_checkpoints_with_the_lowest_loss_are_kept() -> None:
    best_three = CheckpointConfig(
        num_to_keep=3, checkpoint_score_attribute="val_loss", checkpoint_score_order="min"
    )
    result = _trainer(RunConfig(checkpoint_config=best_three)).fit()
    kept = {metrics["epoch"] for _, metrics in result.best_checkpoints}
    assert kept == {1, 2, 4, 5}, "the three best, and the newest because a restart needs it"
    best = result.get_best_checkpoint("val_loss", "min")
    assert best is not None
    assert best.to_dict()["epoch"] == 4
    assert set(best.to_dict()["model"]) == {"weight", "bias"}


def test_two_faults_are_survived_from_the_last_checkpoint() -> None:
    result = _trainer(RunConfig(failure_config=FailureConfig(max_failures=2)), faults=(1, 3)).fit()
    assert result.return_value == [4, 5], "the third attempt begins after what epoch 3 saved"
    frame = result.dataframe(ranks="all")
    assert sorted(frame[frame["rank"] == 0]["epoch"]) == [0, 1, 2, 3, 4, 5]
    assert sorted(set(frame["attempt"])) == [0, 1, 2]
