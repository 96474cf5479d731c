"""The tutorial of DistributedDataParallel: a toy model that is wrapped by hand, saved by rank 0 and loaded by all.

The trainer has set up the process group, so there is neither ``setup`` nor ``cleanup``::

    python ddp_tutorial.py --storage /tmp/runs --name ddp
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from weights import hash_of

import powertrain
from powertrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer, get_device

BATCH = 20


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net2(self.relu(self.net1(x)))
        return out


def demo_basic(ddp_model: DDP, optimizer: optim.Optimizer, device: torch.device, steps: int) -> float:
    """Fit random inputs to the sums of their halves; return the loss of the last step."""
    loss_fn = nn.MSELoss()
    loss = torch.zeros(())
    for _ in range(steps):
        inputs = torch.randn(BATCH, 10)
        labels = inputs[:, :5] + inputs[:, 5:]
        optimizer.zero_grad()
        loss = loss_fn(ddp_model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
    return loss.item()


def load(path: str, ddp_model: DDP, optimizer: optim.Optimizer, device: torch.device) -> int:
    """Load what rank 0 has saved, from whichever device, to this rank's; return the epoch it was saved after."""
    saved = torch.load(path, map_location=device, weights_only=True)
    ddp_model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["epoch"])


def demo_checkpoint(config: dict[str, Any]) -> None:
    assert dist.is_initialized(), "the trainer sets up the process group"
    rank, device = dist.get_rank(), get_device()
    print(f"Running DDP checkpoint example on rank {rank} of {dist.get_world_size()}.", flush=True)

    torch.manual_seed(rank)  # DDP makes all ranks begin with the weights of rank 0
    ddp_model = DDP(ToyModel().to(device))
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.01, momentum=0.9)
    done = 0
    checkpoint = powertrain.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            done = load(os.path.join(directory, "model.checkpoint"), ddp_model, optimizer, device)

    # One path for all ranks of this machine.
    place = os.path.join(tempfile.gettempdir(), f"ddp-tutorial-{config['name']}")
    path = os.path.join(place, "model.checkpoint")
    for epoch in range(done + 1, config["epochs"] + 1):
        torch.manual_seed(1000 * epoch + rank)
        loss = demo_basic(ddp_model, optimizer, device, config["steps"])
        if rank == 0:
            os.makedirs(place, exist_ok=True)
            state = {"model": ddp_model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, path)
        dist.barrier()  # no rank loads before rank 0 has saved
        assert load(path, ddp_model, optimizer, device) == epoch
        saved = Checkpoint.from_directory(place) if rank == 0 else None
        powertrain.report({"epoch": epoch, "loss": loss}, checkpoint=saved)
        dist.barrier()  # nor does rank 0 save again before all have loaded
    if rank == 0:
        shutil.rmtree(place, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Getting started with DistributedDataParallel")
    parser.add_argument("--storage", required=True, help="directory that the run is kept in")
    parser.add_argument("--name", required=True, help="name of the run; the same again goes on with it")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps in an epoch")
    args = parser.parse_args()

    result = TorchTrainer(
        demo_checkpoint,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=args.name, storage_path=args.storage, failure_config=FailureConfig(max_failures=-1)
        ),
    ).fit()
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        saved = torch.load(os.path.join(directory, "model.checkpoint"), map_location="cpu")
    found = {"weights": hash_of(saved["model"]), "epochs": saved["epoch"]}
    print(json.dumps({**found, **(result.metrics or {})}))


if __name__ == "__main__":
    main()
