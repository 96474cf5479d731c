"""A run that is watched: ``python trained.py DIRECTORY``. Trains until DIRECTORY/enough is there.

A step takes a millisecond of the processor and nine of waiting, as where a GPU works. Rank 0 writes the number of steps
that it has made to DIRECTORY/steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import powertrain
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig


def train(config: dict[str, Any]) -> None:
    """Make steps until it is enough."""
    here, rank = Path(config["directory"]), powertrain.get_context().get_world_rank()
    number = 0
    while not (here / "enough").exists():
        busy_until = time.perf_counter() + 0.001
        while time.perf_counter() < busy_until:
            pass
        time.sleep(0.009)
        number += 1
        powertrain.report({"loss": 1.0 / number, "accuracy": 1 - 1.0 / number})
        if rank == 0 and number % 10 == 0:
            (here / "steps.new").write_text(str(number))
            os.replace(here / "steps.new", here / "steps")


if __name__ == "__main__":
    DataParallelTrainer(
        train,
        train_loop_config={"directory": sys.argv[1]},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="watched", storage_path=os.path.join(sys.argv[1], "runs"), verbose=0),
    ).fit()
