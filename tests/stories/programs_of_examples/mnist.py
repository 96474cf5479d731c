"""A small conv net that learns to read digits: the first of PyTorch's examples, with two workers.

The pictures are synthetic, so that nothing is downloaded::

    python mnist.py --storage /tmp/runs --name mnist
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from weights import hash_of

import powertrain
import powertrain.torch
from powertrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer

CLASSES, SIDE = 10, 28


class Net(nn.Module):
    """Two convolutions, two linear layers, and dropout after each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(16 * 6 * 6, 32)
        self.fc2 = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(x.flatten(1))))
        return F.log_softmax(self.fc2(x), dim=1)


def synthetic_digits(count: int, seed: int) -> TensorDataset:
    """Pictures of ten fixed patterns under noise, and which pattern each of them has."""
    patterns = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return TensorDataset(patterns[labels] + 1.5 * noise, labels)


def train(
    config: dict[str, Any],
    model: nn.Module,
    device: torch.device,
    loader: DataLoader[Any],
    optimizer: optim.Optimizer,
    epoch: int,
) -> None:
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % config["log_interval"] == 0 and dist.get_rank() == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(loader)}]\tLoss: {loss.item():.6f}", flush=True)


def test(model: nn.Module, device: torch.device, loader: DataLoader[Any]) -> tuple[float, float]:
    """The mean loss and the accuracy on the pictures of all workers."""
    model.eval()
    sums = torch.zeros(3)
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            correct = output.argmax(dim=1).eq(target).sum().item()
            sums += torch.tensor([F.nll_loss(output, target, reduction="sum").item(), correct, len(target)])
    dist.all_reduce(sums)
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def train_func(config: dict[str, Any]) -> None:
    torch.manual_seed(config["seed"])
    device = powertrain.torch.get_device()
    train_loader = DataLoader(synthetic_digits(512, seed=1), config["batch_size"], shuffle=True)
    test_loader = DataLoader(synthetic_digits(256, seed=2), config["test_batch_size"])
    train_loader = powertrain.torch.prepare_data_loader(train_loader)
    test_loader = powertrain.torch.prepare_data_loader(test_loader)

    model = powertrain.torch.prepare_model(Net())
    optimizer = optim.Adadelta(model.parameters(), lr=config["lr"])
    scheduler = StepLR(optimizer, step_size=1, gamma=config["gamma"])
    first_epoch = 1
    checkpoint = powertrain.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "mnist_cnn.pt"), map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        first_epoch = state["epoch"] + 1

    for epoch in range(first_epoch, config["epochs"] + 1):
        torch.manual_seed(config["seed"] + epoch)  # so that dropout is the same after a restart
        train_loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        train(config, model, device, train_loader, optimizer, epoch)
        loss, accuracy = test(model, device, test_loader)
        scheduler.step()
        metrics = {"epoch": epoch, "loss": loss, "accuracy": accuracy}
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if powertrain.get_context().get_world_rank() == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "epoch": epoch,
                }
                torch.save(state, os.path.join(directory, "mnist_cnn.pt"))
                saved = Checkpoint.from_directory(directory)
            powertrain.report(metrics, checkpoint=saved)


def main() -> None:
    parser = argparse.ArgumentParser(description="PyTorch MNIST example")
    parser.add_argument("--storage", required=True, help="directory that the run is kept in")
    parser.add_argument("--name", required=True, help="name of the run; the same again goes on with it")
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--test-batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=4)
    args = parser.parse_args()

    trainer = TorchTrainer(
        train_func,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=args.name, storage_path=args.storage, failure_config=FailureConfig(max_failures=-1)
        ),
    )
    result = trainer.fit()
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        state = torch.load(os.path.join(directory, "mnist_cnn.pt"))
    found = {"weights": hash_of(state["model"]), "epochs": state["epoch"]}
    print(json.dumps({**found, **(result.metrics or {})}))


if __name__ == "__main__":
    main()
