"""Train a small ResNet on scikit-learn's handwritten digits with two workers.

A run is identified by its name. Interrupt this script and start it again, and it resumes from its newest checkpoint;
another name starts another run::

    python examples/digits.py
    python examples/digits.py --epochs 16           # four more epochs of the same run
    python examples/digits.py --name wide --workers 4
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import powertrain as train
from powertrain import CheckpointConfig, RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer, prepare_data_loader, prepare_model


class Block(nn.Module):
    """Two convolutions with a shortcut; ``stride=2`` halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Sequential):
    """Three blocks for images of 8 by 8 pixels."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Block(width, width),
            Block(width, 2 * width, stride=2),
            Block(2 * width, 4 * width, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, classes),
        )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 images for training and 360 for testing, the same split every time."""
    pictures, labels = load_digits(return_X_y=True)
    split = train_test_split(pictures, labels, test_size=0.2, random_state=0, stratify=labels)
    learn_x, test_x, learn_y, test_y = (torch.as_tensor(part) for part in split)
    return _dataset(learn_x, learn_y), _dataset(test_x, test_y)


def _dataset(pictures: Tensor, labels: Tensor) -> TensorDataset:
    return TensorDataset(pictures.float().reshape(-1, 1, 8, 8) / 16, labels.long())


def shifted(pictures: Tensor) -> Tensor:
    """Shift each image by up to one pixel, as data augmentation."""
    device = pictures.device
    down, right = torch.randint(0, 3, (2, len(pictures), 1, 1), device=device)
    rows = torch.arange(8, device=device).reshape(1, 8, 1) + down
    columns = torch.arange(8, device=device).reshape(1, 1, 8) + right
    padded = F.pad(pictures, (1, 1, 1, 1))
    which = torch.arange(len(pictures), device=device).reshape(-1, 1, 1)
    return padded[which, 0, rows, columns].unsqueeze(1)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the accuracy of the model on ``data``."""
    model.eval()
    pictures, labels = data.tensors
    device = next(model.parameters()).device
    return float((model(pictures.to(device)).argmax(1).cpu() == labels).float().mean())


def rate(steps: int, step: int) -> float:
    """Return the learning rate factor at ``step`` of ``steps``: up for a fifth, then down to zero."""
    done = min(step / steps, 1.0)
    return done / 0.2 if done < 0.2 else 0.5 * (1 + math.cos(math.pi * (done - 0.2) / 0.8))


def train_epoch(
    model: nn.Module,
    batches: DataLoader[tuple[Tensor, ...]],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> float:
    """Train for one pass over this worker's share; return the mean loss."""
    model.train()
    losses = []
    for pictures, labels in batches:
        loss = F.cross_entropy(model(shifted(pictures)), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean().item()


def train_digits(config: dict[str, float]) -> float:
    """Training function of every worker; returns the accuracy on the test images."""
    torch.manual_seed(0)
    learn, test = digits()
    workers = train.get_context().get_world_size()
    batch_size = int(config["batch_size"]) // workers
    batches = prepare_data_loader(DataLoader(learn, batch_size, shuffle=True, drop_last=True))
    model = prepare_model(ResNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=0.05)
    epochs = int(config["epochs"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(rate, epochs * len(batches)))
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}

    saved = train.load_state(**parts)  # this run's newest checkpoint; None at its first start
    for epoch in range(saved["epoch"] + 1 if saved else 0, epochs):
        loss = train_epoch(model, batches, optimizer, schedule)
        metrics = {"epoch": epoch, "loss": loss, "accuracy": accuracy(model, test)}
        train.report(metrics, checkpoint=train.save_state(**parts, epoch=epoch))
    return accuracy(model, test)


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train a small ResNet on handwritten digits.")
    arguments.add_argument("--name", default="digits", help="the run; the same name again goes on with it")
    arguments.add_argument("--storage-path", help="where runs are kept; the default when left out")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--epochs", type=int, default=12)
    arguments.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    arguments.add_argument("--smoke", action="store_true", help="two epochs")
    options = arguments.parse_args()
    if options.smoke:
        options.epochs = 2

    trainer = TorchTrainer(
        train_digits,
        train_loop_config={"epochs": options.epochs, "batch_size": 64, "lr": 0.01},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage_path,
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(result)
    print(f"test accuracy: {result.return_value:.2%}")


if __name__ == "__main__":
    main()
