"""Trivial trials with powertrain.tune, 2 at a time: python with_powertrain.py DIRECTORY TRIALS

Prints one JSON object: seconds for each trial in order of their ends, the driver's resident memory after each, in MB.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import psutil

from powertrain import tune


def trial(config: dict[str, Any]) -> None:
    for step in range(5):
        tune.report({"loss": config["x"] / (step + 1)})


class Clock(tune.Callback):
    """Callback that records the end times of trials, and the driver's memory at these times."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.memory: list[float] = []
        self._process = psutil.Process()

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.ends.append(time.monotonic())
        self.memory.append(self._process.memory_info().rss / 2**20)


if __name__ == "__main__":
    directory, count = sys.argv[1], int(sys.argv[2])
    clock = Clock()
    tuner = tune.Tuner(
        trial,
        param_space={"x": tune.uniform(0, 1)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=count, max_concurrent_trials=2),
        run_config=tune.RunConfig(name="sweep", storage_path=directory, verbose=0, callbacks=[clock]),
    )
    began = time.monotonic()
    grid = tuner.fit()
    seconds = time.monotonic() - began
    assert len(grid) == grid.num_terminated == count
    ends = [end - began for end in clock.ends]
    print(json.dumps({"seconds": seconds, "ends": ends, "memory": clock.memory}))
