"""Trivial trials with Ray Tune, 2 at a time: python with_ray_tune.py DIRECTORY TRIALS

Starting Ray is not counted. Prints one JSON object with "seconds".
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # it is spared the files that we do not write either

import ray
from ray import tune


def trial(config: dict[str, Any]) -> None:
    for step in range(5):
        tune.report({"loss": config["x"] / (step + 1)})


if __name__ == "__main__":
    directory, count = sys.argv[1], int(sys.argv[2])
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False)
    tuner = tune.Tuner(
        trial,
        param_space={"x": tune.uniform(0, 1)},
        tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=count, max_concurrent_trials=2),
        run_config=tune.RunConfig(name="sweep", storage_path=directory, verbose=0),
    )
    began = time.monotonic()
    grid = tuner.fit()
    seconds = time.monotonic() - began
    assert len(grid) == grid.num_terminated == count
    ray.shutdown()
    print(json.dumps({"seconds": seconds}))
