"""The blocks of seeds/000 and seeds/002 about Lightning, written anew after the renaming rules.

seeds/001 and seeds/004 name Lightning in a comparison, with no code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import powertrain
import powertrain.trace as traceml
from powertrain import FailureConfig, RunConfig, ScalingConfig
from powertrain.lightning import (
    RayDDPStrategy,
    RayLightningEnvironment,
    RayTrainReportCallback,
    TraceMLCallback,
    prepare_trainer,
)
from powertrain.storage import open_storage
from powertrain.torch import TorchTrainer
from powertrain.trace import store
from powertrain.trace.integrations.ray import TraceMLRayConfig, TraceMLTorchTrainer
from powertrain.trace.recording import phases


class MyLightningModule(pl.LightningModule):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.lr = config["lr"]
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, digits = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        loss = torch.nn.functional.cross_entropy(self.layers(images), digits)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, digits = batch
        self.log("accuracy", (self.layers(images).argmax(1) == digits).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class MyDataModule(pl.LightningDataModule):
    """scikit-learn's handwritten digits."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.batch_size = config["batch_size"]

    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.data, dtype=torch.float32) / 16
        self.data = TensorDataset(images, torch.tensor(digits.target))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=256)


def train_func(config: dict[str, Any]) -> dict[str, float]:
    model = MyLightningModule(config)
    datamodule = MyDataModule(config)
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        accelerator="auto",
        devices="auto",
        logger=False,
        enable_checkpointing=False,
    )
    trainer = prepare_trainer(trainer)
    trainer.fit(model, datamodule=datamodule)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_lightning_modules_are_kept_as_they_are_and_learn_on_two_workers() -> None:
    result = TorchTrainer(
        train_func,
        train_loop_config={"epochs": 4, "lr": 1e-2, "batch_size": 32},
        scaling_config=ScalingConfig(num_workers=2),
    ).fit()
    assert result.return_value["accuracy"] > 0.9


def train_and_report(config: dict[str, Any]) -> int:
    """Ray's guide to Lightning: the callback reports, and get_checkpoint() gives the path to go on from."""
    trainer = pl.Trainer(
        max_epochs=config["epochs"],
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        accelerator="auto",
        devices="auto",
        logger=False,
        enable_checkpointing=False,
    )
    trainer = prepare_trainer(trainer)
    model, datamodule = MyLightningModule(config), MyDataModule(config)
    checkpoint = powertrain.get_checkpoint()
    began = 0
    if checkpoint:
        with checkpoint.as_directory() as ckpt_dir:
            ckpt_path = Path(ckpt_dir) / RayTrainReportCallback.CHECKPOINT_NAME
            began = torch.load(ckpt_path, weights_only=True)["epoch"] + 1
            trainer.fit(model, datamodule=datamodule, ckpt_path=ckpt_path)
    else:
        model.on_train_epoch_start = lambda: fail_in(model, 2)  # type: ignore[method-assign]
        trainer.fit(model, datamodule=datamodule)
    return began


def fail_in(model: pl.LightningModule, epoch: int) -> None:
    if model.current_epoch == epoch:
        raise RuntimeError("a node was reclaimed")


def test_fault_tolerance_goes_on_from_the_last_epoch(tmp_path: Path) -> None:
    result = TorchTrainer(
        train_and_report,
        train_loop_config={"epochs": 4, "lr": 1e-2, "batch_size": 32},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=2)),
    ).fit()
    assert result.return_value == 2, "epochs 0 and 1 were reported before the failure"
    frame = result.dataframe()
    assert frame["epoch"].tolist() == [0, 1, 2, 3]
    assert frame["accuracy"].iloc[-1] > 0.9
    assert result.checkpoint is not None


# --------------------------------------------------------------------------- Ray + Lightning of seeds/000


def traced_loop(config: dict[str, Any]) -> None:
    trainer = pl.Trainer(
        max_steps=config["max_steps"],
        max_epochs=-1,
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        accelerator="cpu",
        callbacks=[TraceMLCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer = prepare_trainer(trainer)
    batches = powertrain.get_dataset_shard("train").iter_torch_batches(batch_size=16)
    trainer.fit(MyLightningModule({"lr": 1e-3}), traceml.wrap_dataloader_fetch(batches))


@pytest.mark.parametrize("mode", ["selective", "auto"])
def test_lightning_in_a_traced_trainer_is_recorded_step_by_step(mode: str) -> None:
    chosen: dict[str, Any] = {"patch_dataloader": True, "patch_h2d": True} if mode == "selective" else {}
    result = TraceMLTorchTrainer(
        traced_loop,
        train_loop_config={"max_steps": 12},
        scaling_config=ScalingConfig(num_workers=2),
        datasets={"train": powertrain.data.from_items([{"x": [0.5] * 64, "y": 3} for _ in range(160)])},
        traceml_config=TraceMLRayConfig(mode="summary", init_mode=mode, **chosen),
    ).fit()
    steps = store.read(open_storage(result.path)).steps[0]
    assert sorted(steps) == [0, 1]
    for of_rank in steps.values():
        assert of_rank["step"].tolist() == list(range(12))
        assert of_rank["samples"].tolist() == [16] * 12
        seen = {name for phase, name in enumerate(phases.NAMES) if (of_rank["phases"][:, phase] > 0).any()}
        assert seen >= {"input", "forward", "backward", "optimizer", "inside"}
