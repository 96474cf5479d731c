"""Small models and Trainers for tests in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

import powertrain
from powertrain import RunConfig, ScalingConfig
from powertrain.lightning import DDPStrategy, prepare_trainer
from powertrain.torch import TorchTrainer

ROWS = 20
#: Options of a Trainer that writes nothing and says little.
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Model(lightning.LightningModule):
    """Notes the rows of each batch, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(1, 1)
        self.seen: dict[int, list[list[int]]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = batch["first"] if isinstance(batch, dict) else batch
        self.seen.setdefault(self.current_epoch, []).append(rows.tolist())
        loss = (self.layer(rows.float()[:, None] / ROWS) - 1).square().mean()
        self.log("loss", loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self.layer(batch.float()[:, None]) - 1).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def rows(self, epoch: int) -> list[int]:
        return [row for batch in self.seen.get(epoch, []) for row in batch]


def loader(rows: int = ROWS, batch: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(rows), batch_size=batch, shuffle=True, **options)  # type: ignore[arg-type]


def make(callbacks: Any = (), **options: Any) -> Any:
    given = {**QUIET, "enable_checkpointing": False, "strategy": DDPStrategy(), **options}
    return prepare_trainer(lightning.Trainer(callbacks=list(callbacks), **given))


def run(
    function: Callable[[], Any], directory: Path, name: str = "run", workers: int = 0, **options: Any
) -> Any:
    """Fit a function in this very process."""
    return TorchTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name=name, storage_path=str(directory)),
        **options,
    ).fit()


def positions() -> dict[str, dict[str, Any]]:
    from powertrain.worker.session import current

    return current("test").data.positions()


def rows_as_dataset() -> powertrain.data.Dataset:
    return powertrain.data.from_items([{"id": row} for row in range(ROWS)]).random_shuffle(seed=1)
