"""Powertrain's report() from 2 ranks, each call timed: python with_powertrain.py DIRECTORY SETTINGS

SETTINGS is a JSON object with "count" and "gap_seconds", for each rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import torch

import powertrain as train
from powertrain import RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer


def train_function(config: dict[str, Any]) -> None:
    count, gap = config["count"], config["gap_seconds"]
    nanoseconds = array("q", [0]) * count
    torch.distributed.barrier()
    began = time.monotonic()
    for step in range(count):
        early = began + step * gap - time.monotonic()
        if early > 0:
            time.sleep(early)
        metrics = {"loss": 1.0 / (step + 1), "step": step}
        before = time.perf_counter_ns()
        train.report(metrics)
        nanoseconds[step] = time.perf_counter_ns() - before
    sample = {"pid": os.getpid(), "began": began, "ended": time.monotonic(), "nanoseconds": list(nanoseconds)}
    rank = train.get_context().get_world_rank()
    Path(config["directory"], f"rank-{rank}.json").write_text(json.dumps(sample))


directory = os.path.abspath(sys.argv[1])
trainer = TorchTrainer(
    train_function,
    train_loop_config={"directory": directory, **json.loads(sys.argv[2])},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="report", storage_path=os.path.join(directory, "storage")),
)
result = trainer.fit()
returned = time.monotonic()
points = result.dataframe(ranks="all")
steps_kept = [points[points["rank"] == rank]["step"].astype(int).tolist() for rank in range(2)]
told = {"returned": returned, "points": len(points), "steps_kept": steps_kept}
Path(directory, "driver.json").write_text(json.dumps(told))
