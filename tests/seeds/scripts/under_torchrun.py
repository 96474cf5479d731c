"""The torchrun block of seeds/001 after the renaming: the same code, started by torchrun."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import powertrain
from powertrain import ScalingConfig, get_context
from powertrain.torch import TorchTrainer


def train_func(config: dict[str, Any]) -> None:
    model: torch.nn.Module = torch.nn.Linear(10, 1)
    loader = DataLoader(TensorDataset(torch.randn(100, 10), torch.randn(100, 1)), batch_size=16)
    model = powertrain.torch.prepare_model(model)
    loader = powertrain.torch.prepare_data_loader(loader)
    print(f"Rank {get_context().get_world_rank()} of {get_context().get_world_size()}", flush=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(2):
        rows = 0
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows += len(inputs)
        powertrain.report({"loss": loss.item(), "epoch": epoch, "rows": rows})


trainer = TorchTrainer(
    train_loop_per_worker=train_func,
    scaling_config=ScalingConfig(num_workers=0, use_gpu=False),
)
result = trainer.fit()
print(f"Path: {result.path}", flush=True)
