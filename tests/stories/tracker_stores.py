"""Points in the stores of trackers, as their own readers find them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: Points of one run by metric, each as (step, value).
Points = dict[str, list[tuple[int, float]]]

#: In a process of its own: importing MLflow changes the one it is in.
_RUNS = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
print(json.dumps([
    {
        name: [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    for run in client.search_runs(["0"])
]))
"""


def tensorboard_points(directory: Path) -> Points:
    """Read the event files of a directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(directory), size_guidance={"scalars": 0}).Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]
    }


def mlflow_runs(store: str) -> list[Points]:
    """Read each run of a store, which no server is needed for."""
    done = subprocess.run([sys.executable, "-c", _RUNS, store], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    runs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return [{name: [(step, value) for step, value in points] for name, points in run.items()} for run in runs]


def assert_one_run(run: Path, store: str, metric: str, values: Sequence[float]) -> None:
    """The run's event files and the MLflow store have one run, with each row of it once.

    Args:
        run: The directory of the run.
        store: The MLflow store, which no other run was given.
        metric: One that each row has.
        values: Its values, row by row.
    """
    (in_mlflow,) = mlflow_runs(store)
    expected = list(enumerate(values, 1))
    assert tensorboard_points(run / "tensorboard")[metric] == expected
    assert sorted(in_mlflow[metric]) == expected
