"""Train a small classifier with DDP, as in PyTorch's tutorials of torchrun.

torchrun --nproc-per-node=2 ddp_classifier.py --epochs 3 --snapshot snapshot.pt
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def forward(self, pixels):
        return self.layers(pixels)


def load_data(rank, world_size, batch_size):
    pixels = torch.randn(1024, 64, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(pixels, pixels[:, :10].argmax(1))
    sampler = DistributedSampler(dataset, world_size, rank)
    return DataLoader(dataset, batch_size, sampler=sampler), sampler


if __name__ == "__main__":
    # Not within a function: gloo's group may deadlock where a DDP model is freed after it was destroyed.
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--snapshot", default="snapshot.pt")
    parser.add_argument("--pause-file", default="", help="after the first epoch, wait until this file exists")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    loader, sampler = load_data(rank, world_size, batch_size=64)
    model = DistributedDataParallel(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    first = 0
    if os.path.exists(args.snapshot):
        snapshot = torch.load(args.snapshot)
        model.module.load_state_dict(snapshot["model"])
        optimizer.load_state_dict(snapshot["optimizer"])
        first = snapshot["epochs"]
    print(f"rank {rank} of {world_size} begins at epoch {first}")
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for pixels, labels in loader:
            loss = cross_entropy(model(pixels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            state = {
                "model": model.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "epochs": epoch + 1,
            }
            torch.save(state, args.snapshot + ".new")
            os.replace(args.snapshot + ".new", args.snapshot)
        dist.barrier()
        while epoch == 0 and args.pause_file and not os.path.exists(args.pause_file):
            time.sleep(0.01)
    print(f"rank {rank} is done after {args.epochs} epochs, loss {loss.item():.3f}")
    dist.destroy_process_group()
