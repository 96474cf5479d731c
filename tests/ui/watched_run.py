"""A run that trains until it is asked to end, for tests that look at it meanwhile. Started in a process of its own."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import powertrain
from powertrain import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig
from powertrain.collective import broadcast_from_rank_zero

RANKS = 3
#: The rank that all others wait for.
STRAGGLER = 2
#: In the run's name, its metrics and what it prints.
ATTACK = "<img src=x onerror=alert(1)><script>alert(2)<\u2215script>"


def train(config: dict[str, Any]) -> None:
    """Train until there is a file "enough"; a rank's process id is in the file of its number."""
    here, rank = Path(config["directory"]), powertrain.get_context().get_world_rank()
    (here / f"pid-{rank}").write_text(str(os.getpid()))
    print(ATTACK)
    row = 0
    while not broadcast_from_rank_zero((here / "enough").exists()):
        time.sleep(0.12 if rank == STRAGGLER else 0.01)
        row += 1
        powertrain.report({"loss": 1.0 / row, ATTACK: row})


def main(directory: str) -> None:
    """Run it below ``directory``."""
    DataParallelTrainer(
        train,
        train_loop_config={"directory": directory},
        scaling_config=ScalingConfig(num_workers=RANKS),
        run_config=RunConfig(
            name=ATTACK,
            storage_path=os.path.join(directory, "runs"),
            failure_config=FailureConfig(max_failures=1),
            report_barrier=True,
            stop={"training_iteration": 100_000},
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
