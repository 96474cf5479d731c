"""Training functions whose seconds before the first step are reported by cause."""

from __future__ import annotations

import time
from typing import Any

import powertrain as train


class Slow:
    """A map-style dataset; on rank 1 the first row takes its time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        import torch

        time.sleep(self.seconds)
        self.seconds = 0.0
        return torch.ones(4)


def train_on(batches: Any) -> None:
    """Steps of a model whose ranks average their gradients, and so wait for each other."""
    import torch

    model = train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    train.report({"steps": len(batches)})


def from_a_shard() -> None:
    shard = train.get_dataset_shard("train")
    train_on([batch["x"].float().expand(4, -1).T for batch in shard.iter_torch_batches(batch_size=4)])


def beside_a_slow_loader(config: dict[str, Any]) -> None:
    import torch

    rank = train.get_context().get_world_rank()
    slow: Any = Slow(config["seconds"] if rank == 1 else 0.0)
    loader: Any = torch.utils.data.DataLoader(slow, batch_size=2)
    train_on(train.torch.prepare_data_loader(loader))


def never_at_a_step() -> str:
    return "neither a step nor a report"
