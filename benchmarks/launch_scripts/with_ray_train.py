"""The training function under Ray Train: python with_ray_train.py DIRECTORY WORKERS"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import ray.train as train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_function(config: dict[str, Any]) -> None:
    model = train.torch.prepare_model(torch.nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        loss = model(torch.randn(32, 10)).sum()
        loss.backward()
        optimizer.step()
        if step == 0:
            rank = train.get_context().get_world_rank()
            Path(config["directory"], f"rank-{rank}").write_text(str(time.monotonic() - config["started"]))
        optimizer.zero_grad()
        train.report({"loss": loss.item(), "step": step})


directory = os.path.abspath(sys.argv[1])
trainer = TorchTrainer(
    train_function,
    train_loop_config={
        "directory": directory,
        "started": float(os.environ.get("BENCHMARK_STARTED", time.monotonic())),
    },
    scaling_config=ScalingConfig(num_workers=int(sys.argv[2])),
    run_config=RunConfig(name="launch", storage_path=os.path.join(directory, "storage")),
)
result = trainer.fit()
print(f"Final metrics: {result.metrics}")
