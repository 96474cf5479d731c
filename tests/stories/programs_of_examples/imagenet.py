"""Training of an image classifier in the manner of PyTorch's ImageNet example: meters, the best accuracy, resuming.

The net is a tiny ResNet and the pictures are synthetic. Each rank makes its part of the data by hand::

    python imagenet.py --storage /tmp/runs --name imagenet
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from weights import hash_of

import powertrain
from powertrain import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer, get_device, prepare_model

CLASSES, SIDE = 8, 16
CHECKPOINT, BEST = "checkpoint.pth.tar", "model_best.pth.tar"


class BasicBlock(nn.Module):
    """Two convolutions around a shortcut; ``stride=2`` halves the picture."""

    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = nn.Conv2d(inplanes, planes, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.downsample(x))


def tiny_resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        BasicBlock(8, 8),
        BasicBlock(8, 16, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


class FakeImages(Dataset[tuple[Tensor, int]]):
    """Pictures of one colour for each class, under noise; those to train on are flipped by chance, as ImageNet's."""

    def __init__(self, size: int, seed: int, flips: bool) -> None:
        colours = torch.randn(CLASSES, 3, 1, 1, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(CLASSES, (size,), generator=generator)
        noise = torch.randn(size, 3, SIDE, SIDE, generator=generator)
        self.images, self.flips = colours[self.targets] + 2.0 * noise, flips

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.flips and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, int(self.targets[index])


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    """Keeps the newest value of something, and the mean of all."""

    def __init__(self, name: str, fmt: str, summary: Summary = Summary.AVERAGE) -> None:
        self.name, self.fmt, self.summary = name, fmt, summary
        self.val = self.sum = self.count = 0.0

    @property
    def avg(self) -> float:
        return self.sum / max(self.count, 1.0)

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n

    def all_reduce(self) -> None:
        """Make the mean that of all ranks."""
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()

    def __str__(self) -> str:
        return f"{self.name} {self.val:{self.fmt}} ({self.avg:{self.fmt}})"


class ProgressMeter:
    """Prints meters, and how many batches of an epoch are done."""

    def __init__(self, num_batches: int, meters: list[AverageMeter], prefix: str) -> None:
        self.num_batches, self.meters, self.prefix = num_batches, meters, prefix

    def display(self, batch: int) -> None:
        done = f"{self.prefix}[{batch:2d}/{self.num_batches}]"
        print("\t".join([done, *map(str, self.meters)]), flush=True)

    def display_summary(self) -> None:
        told = [f"{meter.name} {meter.avg:.3f}" for meter in self.meters if meter.summary is not Summary.NONE]
        print(" *", *told, flush=True)


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[float]:
    """For each ``k`` the percentage of pictures whose class is among the ``k`` best guesses."""
    guesses = output.topk(max(topk), dim=1).indices
    hits = guesses.eq(target.unsqueeze(1))
    return [100.0 * hits[:, :k].any(dim=1).float().mean().item() for k in topk]


def run_batches(
    config: dict[str, Any],
    loader: DataLoader[Any],
    model: nn.Module,
    optimizer: SGD | None,
    device: torch.device,
    prefix: str,
) -> list[AverageMeter]:
    """Train on every batch, or only look at it where there is no optimizer; return loss, Acc@1 and Acc@5."""
    batch_time = AverageMeter("Time", ".3f", Summary.NONE)
    losses = AverageMeter("Loss", ".4f")
    top1, top5 = AverageMeter("Acc@1", ".2f"), AverageMeter("Acc@5", ".2f")
    progress = ProgressMeter(len(loader), [batch_time, losses, top1, top5], prefix)
    model.train(optimizer is not None)
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        with torch.set_grad_enabled(optimizer is not None):
            output = model(images)
            loss = F.cross_entropy(output, target)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        for meter, value in ((losses, loss.item()), (top1, acc1), (top5, acc5)):
            meter.update(value, len(images))
        batch_time.update(time.time() - end)
        end = time.time()
        if i % config["print_freq"] == 0 and dist.get_rank() == 0:
            progress.display(i)
    for meter in (losses, top1, top5):
        meter.all_reduce()
    if dist.get_rank() == 0:
        progress.display_summary()
    return [losses, top1, top5]


def save_checkpoint(state: dict[str, Any], is_best: bool, directory: str) -> Checkpoint:
    path = os.path.join(directory, CHECKPOINT)
    torch.save(state, path)
    if is_best:
        shutil.copyfile(path, os.path.join(directory, BEST))
    return Checkpoint.from_directory(directory)


def main_worker(config: dict[str, Any]) -> None:
    torch.manual_seed(config["seed"])
    device = get_device()
    model = prepare_model(tiny_resnet())
    optimizer = SGD(
        model.parameters(), config["lr"], momentum=config["momentum"], weight_decay=config["weight_decay"]
    )
    scheduler = StepLR(optimizer, step_size=3, gamma=0.1)
    start_epoch, best_acc1 = 0, 0.0
    resume = powertrain.get_checkpoint()
    if resume:
        with resume.as_directory() as directory:
            saved = torch.load(os.path.join(directory, CHECKPOINT), map_location=device)
        start_epoch, best_acc1 = saved["epoch"], saved["best_acc1"]
        model.load_state_dict(saved["state_dict"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        print(f"=> loaded checkpoint (epoch {start_epoch})", flush=True)

    train_dataset, val_dataset = FakeImages(256, 1, flips=True), FakeImages(128, 2, flips=False)
    train_sampler: DistributedSampler[Any] = DistributedSampler(train_dataset, seed=config["seed"])
    val_sampler: DistributedSampler[Any] = DistributedSampler(val_dataset, shuffle=False, drop_last=True)
    size, workers = config["batch_size"], config["workers"]
    train_loader = DataLoader(train_dataset, size, sampler=train_sampler, num_workers=workers)
    val_loader = DataLoader(val_dataset, size, sampler=val_sampler)

    for epoch in range(start_epoch, config["epochs"]):
        torch.manual_seed(config["seed"] + epoch)  # so that pictures are flipped alike after a restart
        train_sampler.set_epoch(epoch)
        run_batches(config, train_loader, model, optimizer, device, f"Epoch: [{epoch}]")
        _, top1, top5 = run_batches(config, val_loader, model, None, device, "Test: ")
        scheduler.step()
        is_best = top1.avg > best_acc1
        best_acc1 = max(top1.avg, best_acc1)
        metrics = {"epoch": epoch + 1, "acc1": top1.avg, "acc5": top5.avg, "best_acc1": best_acc1}
        state = {
            "epoch": epoch + 1,
            "state_dict": model.state_dict(),
            "best_acc1": best_acc1,
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        }
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = save_checkpoint(state, is_best, directory) if dist.get_rank() == 0 else None
            powertrain.report(metrics, checkpoint=checkpoint)


def load(checkpoint: Checkpoint | None, name: str) -> dict[str, Any]:
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        state: dict[str, Any] = torch.load(os.path.join(directory, name), map_location="cpu")
    return state


def main() -> None:
    parser = argparse.ArgumentParser(description="PyTorch ImageNet training")
    parser.add_argument("--storage", required=True, help="directory that the run is kept in")
    parser.add_argument("--name", required=True, help="name of the run; the same again goes on with it")
    parser.add_argument("-j", "--workers", type=int, default=1, help="data loading workers of each rank")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("-b", "--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("-p", "--print-freq", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    kept = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="acc1", checkpoint_score_order="max")
    result = TorchTrainer(
        main_worker,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=args.name,
            storage_path=args.storage,
            checkpoint_config=kept,
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()
    last = load(result.checkpoint, CHECKPOINT)
    best = load(result.get_best_checkpoint("acc1", "max"), CHECKPOINT)
    found = {"weights": hash_of(last["state_dict"]), "best_weights": hash_of(best["state_dict"])}
    print(json.dumps({**found, "epochs": last["epoch"], **(result.metrics or {})}))


if __name__ == "__main__":
    main()
