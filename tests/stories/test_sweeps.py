"""Whole sweeps: real trials in real processes, killed, stopped early, failing, resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ray_nodes import RayNodes

from powertrain import Result
from powertrain.storage import open_storage
from powertrain.tune import ResultGrid
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.sweep.journal.record import read_journal

DRIVER = Path(__file__).parent / "drivers" / "sweeping.py"
#: The configurations of the grid that most scenarios search, in its order.
GRID = [0.7, 0.3, 0.9, 0.1, 0.5, 0.0, 0.8, 0.2, 0.6, 0.4]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts drivers in sessions of their own; whatever is left of them is ended."""
    drivers: list[subprocess.Popen[str]] = []

    def go(scenario: str, engine: str = "local", *arguments: str, **variables: str) -> subprocess.Popen[str]:
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), scenario, str(tmp_path), engine, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables},
        )
        drivers.append(driver)
        return driver

    yield go
    for driver in drivers:
        if driver.poll() is None:
            driver.kill()
        driver.communicate()


def outcome(driver: subprocess.Popen[str]) -> Any:
    output, _ = driver.communicate(timeout=100)
    assert driver.returncode == 0, output
    return json.loads(output.splitlines()[-1])


def facts(sweep: Path) -> list[ev.SweepEvent]:
    return read_journal(open_storage(sweep))


def wait_for_facts(sweep: Path, kind: type, count: int, driver: subprocess.Popen[str]) -> list[ev.SweepEvent]:
    """Wait until the journal has so many facts of a kind."""
    while True:
        found = facts(sweep) if (sweep / "journal").is_dir() else []
        if sum(isinstance(fact, kind) for fact in found) >= count:
            return found
        assert driver.poll() is None, driver.communicate()[0]
        time.sleep(0.02)


@pytest.mark.parametrize("engine", [pytest.param("local", marks=pytest.mark.smoke), "inline"])
def test_every_configuration_runs_once_and_the_best_is_found(
    start: Start, tmp_path: Path, engine: str
) -> None:
    found = outcome(start("good", engine))
    assert found["trials"] == [[{"x": x}, 3, "finished"] for x in (0.3, 0.1, 0.2)]
    assert found["best"] == {"x": 0.1}
    grid = ResultGrid.from_path(tmp_path / "good")
    assert [Result.from_path(result.path).metrics for result in grid] == [
        {"loss": x} for x in (0.3, 0.1, 0.2)
    ]


def test_a_sweep_runs_on_a_ray_cluster(start: Start, ray_nodes: RayNodes) -> None:
    found = outcome(start("good", "ray", SWEEP_RAY=ray_nodes.address))
    assert found["best"] == {"x": 0.1}
    assert [state for _, _, state in found["trials"]] == ["finished"] * 3


def test_a_killed_sweep_continues_without_another_decision_and_without_a_trial_twice(
    start: Start, tmp_path: Path
) -> None:
    """16 trials with two workers each under ASHA; the driver is killed halfway."""
    driver = start("asha")
    wait_for_facts(tmp_path / "asha", ev.TrialEnded, 7, driver)
    driver.kill()
    driver.wait()
    before = facts(tmp_path / "asha")

    found = outcome(start("restored", "local", str(tmp_path / "asha")))
    after = facts(tmp_path / "asha")
    assert after[: len(before)] == before
    decided = [(fact.trial, fact.action) for fact in after if isinstance(fact, ev.TrialDecided)]
    assert len(decided) == len(set(decided)), "a decision was taken twice"
    added = [fact.trial for fact in after if isinstance(fact, ev.TrialAdded)]
    ended = [fact.trial for fact in after if isinstance(fact, ev.TrialEnded)]
    assert len(added) == len(set(added)) == 16
    assert sorted(ended) == sorted(added), "each trial ends once"
    assert not [fact for fact in after if isinstance(fact, ev.TrialEnded) and fact.status != "TERMINATED"]
    was_over = {fact.trial for fact in before if isinstance(fact, ev.TrialEnded)}
    restarted = {fact.trial for fact in after[len(before) :] if isinstance(fact, ev.TrialStarted)}
    assert not was_over & restarted
    rows = [(fact.trial, fact.iteration) for fact in after if isinstance(fact, ev.TrialReported)]
    assert len(rows) == len(set(rows)), "a report counts once"
    best = min(fact.config["x"] for fact in after if isinstance(fact, ev.TrialAdded))
    assert found["best"]["x"] == best


def test_trials_wait_at_rungs_and_continue_from_their_checkpoints(start: Start, tmp_path: Path) -> None:
    found = outcome(start("hyperband"))
    assert found["best"] == {"x": 0.0, "steps": 9}
    decided = [fact for fact in facts(tmp_path / "hyperband") if isinstance(fact, ev.TrialDecided)]
    paused = {fact.trial for fact in decided if fact.action == "pause"}
    assert paused
    grid = ResultGrid.from_path(tmp_path / "hyperband")
    for trial in grid.trials:
        rows = [row for row, _ in grid.curves("loss")[trial.trial_id]]
        assert rows == list(range(1, trial.iteration + 1)), f"{trial} lost or repeated a report"
    assert max(trial.iteration for trial in grid.trials) == 9


def test_the_worst_of_a_population_continues_from_the_best(start: Start, tmp_path: Path) -> None:
    outcome(start("pbt"))
    grid = ResultGrid.from_path(tmp_path / "pbt")
    exploits = [fact for fact in facts(tmp_path / "pbt") if isinstance(fact, ev.TrialDecided) and fact.source]
    slow, fast = grid.trials
    assert (exploits[0].trial, exploits[0].source) == (slow.trial_id, fast.trial_id)
    assert slow.iteration == fast.iteration == 16
    scores = dict(grid.curves("score")[slow.trial_id])
    assert max(scores.values()) > 16 * 0.1 + 1, "it never took over the state of the other"


def test_a_failed_trial_does_not_stop_the_others(start: Start, tmp_path: Path) -> None:
    found = outcome(start("failing"))
    assert [state for _, _, state in found["trials"]] == ["failed" if x > 0.5 else "finished" for x in GRID]
    assert found["best"] == {"x": 0.0}
    assert set(found["errors"]) == {"WorkerGroupError"}
    again = outcome(start("restored", "local", str(tmp_path / "failing"), "errored"))
    assert [state for _, _, state in again["trials"]] == ["failed" if x > 0.5 else "finished" for x in GRID]
    starts = [fact.trial for fact in facts(tmp_path / "failing") if isinstance(fact, ev.TrialStarted)]
    assert len(starts) == 10 + 4, "the failed ones run again, and only those"


def test_with_fail_fast_the_first_failure_ends_the_sweep(start: Start) -> None:
    found = outcome(start("fail_fast"))
    assert [state for _, _, state in found["trials"]] == ["failed"]


def test_a_metric_that_is_never_reported_is_named_with_those_that_are(start: Start) -> None:
    found = outcome(start("unreported"))
    assert found["raised"] == "ConfigError"
    assert "never reported 'loss'" in found["message"]
    assert "'accuracy'" in found["message"]


def test_a_bound_of_the_run_config_ends_each_trial_there(start: Start) -> None:
    found = outcome(start("stopped"))
    assert [row for _, row, _ in found["trials"]] == [2] * 10


def test_a_trainer_within_a_trial_reports_to_the_sweep_and_ends_with_the_trial(
    start: Start, tmp_path: Path
) -> None:
    found = outcome(start("nested"))
    assert found["trials"] == [[{"x": x}, 3, "finished"] for x in (0.2, 0.1)]
    assert found["best"] == {"x": 0.1}
    for run in (tmp_path / "inner").iterdir():
        assert Result.from_path(run).state == "finished", "it was ended in good order"


def test_ctrl_c_leaves_a_sweep_that_can_be_continued(start: Start, tmp_path: Path) -> None:
    driver = start("asha")
    wait_for_facts(tmp_path / "asha", ev.TrialReported, 3, driver)
    driver.send_signal(signal.SIGINT)
    left = outcome(driver)
    assert left["raised"] == "KeyboardInterrupt"
    assert "Tuner.restore(" in left["message"]
    assert isinstance(facts(tmp_path / "asha")[-1], ev.SweepEnded)
    found = outcome(start("restored", "local", str(tmp_path / "asha")))
    assert len(found["trials"]) == 16
    assert {state for _, _, state in found["trials"]} == {"finished"}
