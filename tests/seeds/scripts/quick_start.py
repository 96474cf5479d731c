"""The quick start of seeds/004 after the renaming, as a script without a ``__main__`` guard."""

from __future__ import annotations

from typing import Any

import torch

import powertrain
import powertrain as train
from powertrain import ScalingConfig
from powertrain.torch import TorchTrainer


def train_func(config: dict[str, Any]) -> None:
    model: torch.nn.Module = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = train.torch.prepare_model(model)
    for epoch in range(10):
        loss = model(torch.randn(32, 10)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        train.report({"loss": loss.item(), "epoch": epoch})


trainer = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2, use_gpu=False))
result = trainer.fit()
assert isinstance(result, powertrain.Result)
assert result.metrics is not None
print(f"Final loss: {result.metrics['loss']}")
print(f"Path: {result.path}")
