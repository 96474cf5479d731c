"""``python sweeping.py SCENARIO DIRECTORY ENGINE``: one sweep of a story; prints what came of it as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import powertrain
from powertrain import Checkpoint, DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig, tune
from powertrain.tune import schedulers
from powertrain.tune.integration.ray_train import TuneReportCallback

SCENARIO, DIRECTORY, ENGINE = sys.argv[1:4]


def curve(config: dict[str, Any]) -> None:
    """A loss that falls towards the configuration's own value; saved after each report."""
    start = 0
    checkpoint = powertrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            start = json.loads(Path(directory, "state.json").read_text())["step"]
    for step in range(start, config.get("steps", 9)):
        metrics = {"loss": config["x"] + 1 / (step + 1), "pid": os.getpid()}
        with powertrain.checkpoint_dir() as directory:
            if powertrain.get_context().get_world_rank() == 0:
                Path(directory, "state.json").write_text(json.dumps({"step": step + 1, "x": config["x"]}))
            powertrain.report(metrics, checkpoint=Checkpoint.from_directory(directory))


def plain(config: dict[str, Any]) -> None:
    for step in range(3):
        tune.report({"loss": config["x"] * (3 - step)})


def population(config: dict[str, Any]) -> None:
    """A score that a state carries on: a trial that loads another's state shows it."""
    score, steps = 0.0, 0
    checkpoint = tune.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            score, steps = json.loads(Path(directory, "state.json").read_text())
    while steps < 16:
        score, steps = score + config["rate"], steps + 1
        with powertrain.checkpoint_dir() as directory:
            Path(directory, "state.json").write_text(json.dumps([score, steps]))
            tune.report({"score": score}, checkpoint=Checkpoint.from_directory(directory))


def fails_above_a_half(config: dict[str, Any]) -> None:
    tune.report({"loss": config["x"]})
    if config["x"] > 0.5:
        raise ValueError(f"{config['x']} is too much")


def never_reports_it(config: dict[str, Any]) -> None:
    tune.report({"accuracy": config["x"]})


def runs_a_trainer(config: dict[str, Any]) -> None:
    """A trainer within a trial, whose reports are the trial's own."""
    trial_id = tune.get_context().get_trial_id()
    inner = DataParallelTrainer(
        reports_for_long,
        train_loop_config=config,
        scaling_config=scaling(),
        run_config=RunConfig(
            name=f"inner-{trial_id}", storage_path=f"{DIRECTORY}/inner", callbacks=[TuneReportCallback()]
        ),
    )
    inner.fit()


def reports_for_long(config: dict[str, Any]) -> None:
    for step in range(100_000):
        powertrain.report({"loss": config["x"] / (step + 1)})
        time.sleep(0.01)


def scaling(workers: int = 1, cpus: float = 0.5) -> ScalingConfig:
    if ENGINE == "inline":
        return ScalingConfig(num_workers=0)
    options = {"address": os.environ["SWEEP_RAY"]} if ENGINE == "ray" else {}
    return ScalingConfig(
        num_workers=workers, resources_per_worker={"CPU": cpus}, engine=ENGINE, engine_options=options
    )


def sweep(
    trainable: Any,
    space: dict[str, Any],
    *,
    run: dict[str, Any] | None = None,
    metric: str = "loss",
    mode: str = "min",
    **search: Any,
) -> tune.Tuner:
    config = RunConfig(name=SCENARIO, storage_path=DIRECTORY, verbose=1, **(run or {}))
    if not isinstance(trainable, DataParallelTrainer):
        trainable = DataParallelTrainer(trainable, scaling_config=scaling(), run_config=config)
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(metric=metric, mode=mode, **search),
        run_config=config,
    )


GRID = {"x": tune.grid_search([round(0.1 * value, 1) for value in (7, 3, 9, 1, 5, 0, 8, 2, 6, 4)])}


def good() -> tune.Tuner:
    return sweep(plain, {"x": tune.grid_search([0.3, 0.1, 0.2])})


def asha() -> tune.Tuner:
    trainer = DataParallelTrainer(curve, scaling_config=scaling(2, 0.5))
    space = {"x": tune.uniform(0, 1), "steps": 9}
    rule = schedulers.ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3)
    search = tune.search.BasicVariantGenerator(random_state=4)
    return sweep(trainer, space, num_samples=16, scheduler=rule, search_alg=search)


def hyperband() -> tune.Tuner:
    rule = schedulers.HyperBandScheduler(max_t=9, reduction_factor=3)
    return sweep(curve, {**GRID, "steps": 9}, scheduler=rule)


def pbt() -> tune.Tuner:
    rule = schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=4,
        hyperparam_mutations={"rate": [0.1, 1.0, 2.0]},
        resample_probability=0.0,
        quantile_fraction=0.5,
        synch=True,
    )
    space = {"rate": tune.grid_search([0.1, 2.0])}
    return sweep(population, space, metric="score", mode="max", scheduler=rule)


def failing() -> tune.Tuner:
    return sweep(fails_above_a_half, GRID)


def fail_fast() -> tune.Tuner:
    run = {"failure_config": FailureConfig(fail_fast=True)}
    return sweep(fails_above_a_half, GRID, run=run, max_concurrent_trials=1)


def unreported() -> tune.Tuner:
    return sweep(never_reports_it, GRID)


def stopped() -> tune.Tuner:
    return sweep(curve, GRID, run={"stop": {"training_iteration": 2}})


def nested() -> tune.Tuner:
    return sweep(runs_a_trainer, {"x": tune.grid_search([0.2, 0.1])}, run={"stop": {"training_iteration": 3}})


def restored() -> tune.Tuner:
    return tune.Tuner.restore(sys.argv[4], resume_errored="errored" in sys.argv[5:])


def outcome() -> dict[str, Any]:
    scenarios: dict[str, Callable[[], tune.Tuner]] = {
        function.__name__: function
        for function in (
            good,
            asha,
            hyperband,
            pbt,
            failing,
            fail_fast,
            unreported,
            stopped,
            nested,
            restored,
        )
    }
    tuner = scenarios[SCENARIO]()
    try:
        grid = tuner.fit()
    except (Exception, KeyboardInterrupt) as error:
        return {"raised": type(error).__name__, "message": str(error)}
    return {
        "trials": [
            [result.config, (result.metrics or {}).get("training_iteration", 0), result.state]
            for result in grid
        ],
        "best": grid.get_best_result().config,
        "errors": [type(error).__name__ for error in grid.errors],
    }


if __name__ == "__main__":
    print(json.dumps(outcome()), flush=True)
