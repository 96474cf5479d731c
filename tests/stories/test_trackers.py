"""Whole runs with trackers: each row arrives once, in one run of the tracker, and training never waits for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import story as stage
import tracked
from tests.stories.tracker_stores import mlflow_runs, tensorboard_points
from tests.trackers.mlflow_server import MLflowServer

from powertrain.result.result import Result
from powertrain.trackers import MLflow

STEPS = 100


def diary(directory: Path) -> list[list[str]]:
    return [line.split() for line in (directory / "diary").read_text().splitlines()]


def points_of(lines: list[list[str]]) -> list[tuple[int, float]]:
    return [
        (int(step), float(value)) for kind, step, *value_of in lines if kind == "point" for value in value_of
    ]


def expected(steps: int = STEPS) -> list[tuple[int, float]]:
    return [(step, 1 / step) for step in range(1, steps + 1)]


def scalars(directory: Path) -> list[int]:
    return [step for step, _ in tensorboard_points(directory)["loss"]]


@pytest.mark.timeout(600)
@pytest.mark.smoke
def test_trackers_have_every_row_once_when_fit_returns(fits: Any, directory: Path) -> None:
    outcome = stage.outcome_of(tracked.trainer("tracked", ["csv", "tensorboard", tracked.Diary()]).fit)
    assert outcome["raised"] == ""
    run = directory / "storage" / "tracked"
    frame = pd.read_csv(run / "metrics.csv")
    assert list(zip(frame["training_iteration"], frame["loss"], strict=True)) == expected()
    assert scalars(run / "tensorboard") == [step for step, _ in expected()]
    lines = diary(directory)
    assert points_of(lines) == expected()
    assert lines[0][0] == "opened"
    assert lines[0][2] == str(STEPS)
    assert lines[-1] == ["ended", "finished"]


@pytest.mark.timeout(600)
def test_a_killed_run_that_is_started_again_continues_the_same_run_of_each_tracker(stories: Any) -> None:
    first = stories.start("track_until_killed")
    first.await_told("halted-0", "halted-1")
    # What the trackers have by then is sent; the cursor may or may not know of it.
    first._await(lambda: (stories.root / "diary").exists(), "the first points in the diary", stage.PATIENCE)
    first.kill()
    (stories.root / "go-on-from-55").touch()
    outcome = stories.start("track_until_killed").outcome(within=300.0)
    assert outcome["raised"] == ""
    run = stories.storage / "tracked"
    lines = diary(stories.root)
    assert len({line[1] for line in lines if line[0] == "opened"}) == 1
    assert points_of(lines) == expected()
    frame = pd.read_csv(run / "metrics.csv")
    assert list(zip(frame["training_iteration"], frame["loss"], strict=True)) == expected()
    assert scalars(run / "tensorboard") == [step for step, _ in expected()]


@pytest.mark.timeout(600)
def test_a_tracker_that_is_down_at_the_end_is_named_and_track_sends_the_rest(
    fits: Any, directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stage.tell("diary-is-down")
    outcome = stage.outcome_of(tracked.trainer("tracked", ["csv", tracked.Diary()]).fit)
    assert outcome["raised"] == ""
    assert outcome["state"] == "finished"
    run = directory / "storage" / "tracked"
    said = " ".join("".join(capfd.readouterr()).split())
    assert f"The tracker 'diary' has not got {STEPS} points" in said
    assert f"powertrain track {run}" in said
    assert not (directory / "diary").exists()
    assert len(pd.read_csv(run / "metrics.csv")) == STEPS
    refused = _track(run)
    assert refused.returncode == 1
    assert "has not got 100 points: ConnectionError: the diary is closed" in refused.stderr
    (directory / "diary-is-down").unlink()
    done = _track(run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "diary: up to date, at row 100" in done.stdout
    assert points_of(diary(directory)) == expected()
    assert diary(directory)[-1] == ["ended", "finished"]


@pytest.mark.timeout(600)
def test_trackers_can_be_given_to_a_run_that_had_none(fits: Any, directory: Path) -> None:
    assert stage.outcome_of(tracked.trainer("tracked", []).fit)["raised"] == ""
    run = directory / "storage" / "tracked"
    refused = _track(run)
    assert refused.returncode == 1
    assert "was started without trackers" in refused.stderr
    done = _track(run, "--tracker", "csv")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(pd.read_csv(run / "metrics.csv")) == STEPS


@pytest.mark.timeout(1200)
def test_a_server_that_is_down_for_half_of_the_run_gets_every_row_once_in_one_run(
    fits: Any, directory: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mlflow")
    server = MLflowServer(tmp_path / "server")
    server.start()
    try:
        going = _Fit(tracked.trainer("tracked", [MLflow(server.uri)], steps=1000, halt_at=500, then_at=1000))
        going.await_cursor(directory / "storage" / "tracked" / "trackers" / "mlflow.json", row=500)
        server.stop()
        stage.tell("go-on-from-500")
        going.await_rows(directory / "storage" / "tracked", 1000)
        server.start()
        stage.tell("go-on-from-1000")
        assert going.outcome()["raised"] == ""
    finally:
        server.stop()
    found = [points["loss"] for points in mlflow_runs(server.store)]
    assert len(found) == 1
    assert Counter(step for step, _ in found[0]) == Counter(range(1, 1001))
    assert sorted(found[0]) == expected(1000)


def _track(run: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        "from powertrain.cli.main import main; main()",
        "track",
        str(run),
        *options,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(tracked.__file__).parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


class _Fit:
    """A fit on a thread, so that the test can watch it."""

    def __init__(self, trainer: Any) -> None:
        self._outcome: dict[str, Any] = {}
        self._thread = threading.Thread(target=lambda: self._outcome.update(stage.outcome_of(trainer.fit)))
        self._thread.start()

    def outcome(self) -> dict[str, Any]:
        self._thread.join()
        return self._outcome

    def await_cursor(self, path: Path, row: int) -> None:
        self._await(lambda: path.exists() and json.loads(path.read_text())["row"] >= row)

    def await_rows(self, run: Path, rows: int) -> None:
        self._await(lambda: len(Result.from_path(run).metrics_dataframe) >= rows)

    def _await(self, come: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600
        while not come():
            assert self._thread.is_alive() or come(), self._outcome
            assert time.monotonic() < deadline
            time.sleep(0.05)
