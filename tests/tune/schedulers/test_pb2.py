"""Population based bandits find good values from what trials have gained, and the same ones after a restart."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest

from powertrain import DataParallelTrainer, RunConfig, ScalingConfig, tune
from powertrain.errors import ConfigError
from powertrain.tune import schedulers as s

BOUNDS = {"x": [0.0, 10.0]}


def make(bounds: Any = None, **arguments: Any) -> s.PB2:
    given = {"time_attr": "training_iteration", "perturbation_interval": 2, **arguments}
    scheduler = s.PB2(hyperparam_bounds=bounds or BOUNDS, **given)
    scheduler.set_search_properties("score", "max")
    return scheduler


def train_population(scheduler: s.PB2, rounds: int = 40, best: float = 7.0) -> list[s.Decision]:
    """Four trials that gain most in each step when x is best; those that exploit take over the other's score."""
    configs: dict[str, Any] = {str(number): {"x": 0.5 + number} for number in range(4)}
    scores = dict.fromkeys(configs, 0.0)
    for trial, config in configs.items():
        scheduler.on_trial_add(trial, config)
    decided = []
    for time in range(1, rounds + 1):
        for trial in configs:
            scores[trial] += 1 - ((configs[trial]["x"] - best) / 10) ** 2
            result = {"training_iteration": time, "score": scores[trial]}
            for decision in scheduler.on_trial_result(trial, result):
                decided.append(decision)
                configs[trial], scores[trial] = decision.config, scores[decision.source]
    return decided


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_values_approach_those_that_gain_most(seed: int) -> None:
    decided = train_population(make(seed=seed))
    values = [decision.config["x"] for decision in decided if decision.config is not None]
    assert all(0 <= value <= 10 for value in values)
    before = [0.5, 1.5, 2.5, 3.5]
    assert min(values[-2:], key=lambda value: abs(value - 7.0)) == pytest.approx(7.0, abs=1.0)
    assert max(abs(value - 7.0) for value in values) <= min(abs(value - 7.0) for value in before)


def test_the_same_reports_give_the_same_decisions() -> None:
    assert train_population(make(), 12) == train_population(make(), 12)
    assert train_population(make(), 12) != train_population(make(seed=5), 12)


def test_a_whole_number_stays_one_and_nested_values_are_found() -> None:
    scheduler = make({"net": {"width": [1, 64]}, "lr": [0.0, 1.0]})
    config = scheduler.fill_config({"net": {"width": 8, "act": "relu"}})
    assert 0 <= config["lr"] <= 1
    for trial in "ab":
        scheduler.on_trial_add(trial, config)
    scheduler.on_trial_result("a", {"training_iteration": 2, "score": 2.0})
    (decision,) = scheduler.on_trial_result("b", {"training_iteration": 2, "score": 1.0})
    assert decision.config is not None
    assert decision.source == "a"
    width = decision.config["net"]["width"]
    assert type(width) is int
    assert 1 <= width <= 64
    assert decision.config["net"]["act"] == "relu"
    assert config["net"]["width"] == 8


def test_gains_that_are_not_finite_are_not_learned_from() -> None:
    scheduler = make()
    for trial in "ab":
        scheduler.on_trial_add(trial, {"x": 1.0})
    for time in range(1, 20):
        scheduler.on_trial_result("a", {"training_iteration": time, "score": float(time)})
        scheduler.on_trial_result("b", {"training_iteration": time, "score": math.nan})
    assert all(math.isfinite(gain.gain) for gain in scheduler._gains)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({}, "PB2 needs hyperparam_bounds"),
        ({"lr": 3}, r"hyperparam_bounds\['lr'\]=3 must be a list of two numbers"),
        ({"a": {"lr": [1, 1]}}, r"hyperparam_bounds\['a/lr'\]"),
        ({"lr": [0, math.inf]}, r"hyperparam_bounds\['lr'\]"),
        ({"lr": tune.uniform(0, 1)}, r"hyperparam_bounds\['lr'\]"),
    ],
)
def test_bounds_that_are_none_are_named(bounds: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        s.PB2(hyperparam_bounds=bounds)


def climb(config: dict[str, Any]) -> None:
    checkpoint = tune.get_checkpoint()
    start, score = 0, 0.0
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            start, score = json.loads(Path(directory, "state").read_text())
    for step in range(start, 12):
        score += 1 - abs(config["x"] - 7) / 10
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state").write_text(json.dumps([step + 1, score]))
            tune.report({"score": score}, checkpoint=tune.Checkpoint.from_directory(directory))


def test_a_sweep_with_pb2_runs_to_its_end_and_decides_nothing_anew_when_restored(tmp_path: Path) -> None:
    trainer = DataParallelTrainer(climb, scaling_config=ScalingConfig(num_workers=0))
    grid = tune.Tuner(
        trainer,
        tune_config=tune.TuneConfig(
            metric="score",
            mode="max",
            num_samples=4,
            scheduler=s.PB2("training_iteration", perturbation_interval=3, hyperparam_bounds=BOUNDS),
        ),
        run_config=RunConfig(
            name="sweep", storage_path=str(tmp_path), verbose=0, stop={"training_iteration": 12}
        ),
    ).fit()
    assert grid.num_terminated == 4
    assert list((tmp_path / "sweep").glob("pbt_policy_*.txt"))
    again = tune.Tuner.restore(tmp_path / "sweep").fit()
    assert [result.metrics for result in again] == [result.metrics for result in grid]
