"""A training function with Lightning's Trainer that notes which rows it trained on, as ``feeding`` does.

``kills`` has (attempt, batch of that attempt) at which the last rank dies: by SIGKILL, or by an exception where it
lives in the process of the test. At those of ``terminates`` it gets SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import story
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import powertrain
from powertrain.backend import TORCH_PRELOAD
from powertrain.lightning import DDPStrategy, FSDPStrategy, ReportCallback, prepare_trainer
from powertrain.torch import TorchConfig
from powertrain.worker.session import current

#: Not a multiple of any batch that the stories use: at the end of an epoch a rank has one row, and another one none.
ROWS = 109


class WithLightning(TorchConfig):
    """Workers are forked from a process that has this module, and so Lightning, which takes seconds to import."""

    preload = (*TORCH_PRELOAD, __name__)


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"id": torch.tensor(index)}


class WithoutLength:
    """A shard's batches as a user may wrap them: nothing says how many there are."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from powertrain.get_dataset_shard("train").iter_torch_batches(batch_size=self._batch)


class Learner(lightning.LightningModule):
    """Learns a function of the row's number, and notes the rows."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        context = powertrain.get_context()
        self.rank, self.attempt = context.get_world_rank(), context.get_attempt()
        self.is_last_rank = self.rank == context.get_world_size() - 1
        self.config, self.made = config, 0
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        x = ids.float()[:, None] / ROWS
        found: torch.Tensor = self.net(torch.cat([x, x.square()], dim=1))
        return torch.nn.functional.mse_loss(found, torch.sin(6 * x))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.made += 1
        if dist.is_initialized():
            dist.all_reduce(torch.ones(1))  # from here on every rank has made its report of the step before
        if self.is_last_rank and [self.attempt, self.made] in self.config["kills"]:
            if self.config.get("raises"):
                raise RuntimeError("the end of this attempt")
            os.kill(os.getpid(), signal.SIGKILL)
        if self.is_last_rank and [self.attempt, self.made] in self.config.get("terminates", ()):
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self.config.get("pace", 0.0))
        strategy: Any = self.trainer.strategy
        counts = strategy.feeds.weight(self.trainer) > 0
        line = {
            "row": current("feeding").row + 1,
            "ids": batch["id"].tolist() if counts else [],
            "epoch": self.current_epoch,
            "batch": batch_idx,
            "step": self.global_step,
        }
        with open(story.directory() / f"fed-{self.attempt}-{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        loss = self.loss(batch["id"])
        self.log("train_loss", loss.detach())
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch["id"]), on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def training_data(config: dict[str, Any]) -> Any:
    kind, batch = config.get("data", "loader"), config["batch"]
    if kind == "loader":
        return DataLoader(Rows(), batch_size=batch, shuffle=True, num_workers=config.get("processes", 0))
    if kind == "shard":
        return powertrain.get_dataset_shard("train").iter_torch_batches(batch_size=batch)
    assert kind == "without_length"
    return WithoutLength(batch)


def make_trainer(config: dict[str, Any]) -> Any:
    strategy = config.get("strategy", "ddp")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices="auto",
        strategy=DDPStrategy()
        if strategy == "ddp"
        else FSDPStrategy(state_dict_type=strategy, auto_wrap_policy={torch.nn.Linear}),
        callbacks=[ReportCallback(every_n_steps=config["every"])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(story.directory()),
        **{"max_epochs": config["epochs"], **config.get("trainer", {})},
    )
    return prepare_trainer(trainer)


def fits_with_lightning(config: dict[str, Any]) -> float:
    """Train, and return the loss over all rows at the end."""
    model, trainer = Learner(config), make_trainer(config)
    validation = DataLoader(Rows(30), batch_size=10) if config.get("validates") else None
    data = training_data(config)
    if config.get("ckpt_path", "last") == "last":
        trainer.fit(model, data, validation, ckpt_path="last")
    else:
        checkpoint = powertrain.get_checkpoint()
        if checkpoint:
            with checkpoint.as_directory() as directory:
                trainer.fit(model, data, validation, ckpt_path=Path(directory) / "checkpoint.ckpt")
        else:
            trainer.fit(model, data, validation)
    if config.get("strategy", "ddp") != "ddp":
        return 0.0  # its weights are in pieces; the checkpoint has them
    with torch.no_grad():
        return float(model.loss(torch.arange(ROWS)))
