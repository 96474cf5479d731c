"""A run whose steps are timed on the training thread: python train_tracked.py DIRECTORY SETTINGS

SETTINGS is a JSON object with "steps", "size" of the work of a step, "uri" of an MLflow server or "" for no tracker,
and "experiment". The rank writes a file at a quarter and at three quarters of its steps, for the process that takes the
server down.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np

import powertrain as train
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig
from powertrain.trackers import MLflow


def train_function(config: dict[str, Any]) -> None:
    steps, directory = config["steps"], Path(config["directory"])
    weights = np.random.default_rng(0).random((config["size"], config["size"]))
    nanoseconds = array("q", [0]) * steps
    for step in range(steps):
        before = time.perf_counter_ns()
        value = float(np.tanh(weights @ weights).mean())
        train.report({"loss": value / (step + 1)})
        nanoseconds[step] = time.perf_counter_ns() - before
        if step in (steps // 4, 3 * steps // 4):
            Path(directory, "quarter" if step == steps // 4 else "three-quarters").touch()
    Path(directory, "steps.json").write_text(json.dumps(list(nanoseconds)))


directory, settings = os.path.abspath(sys.argv[1]), json.loads(sys.argv[2])
trackers = [MLflow(settings["uri"], experiment=settings["experiment"])] if settings["uri"] else []
trainer = DataParallelTrainer(
    train_function,
    train_loop_config={"directory": directory, "steps": settings["steps"], "size": settings["size"]},
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(
        name="tracked",
        storage_path=os.path.join(directory, "storage"),
        trackers=trackers,
        tracker_timeout_s=300.0,
    ),
)
trainer.fit()
