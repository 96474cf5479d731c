"""A Tuner refuses what cannot be searched before anything starts, and runs what can, here in this very process."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import powertrain
from powertrain import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig, tune
from powertrain.checkpoint.chain import Chain
from powertrain.errors import ConfigError
from powertrain.storage import open_storage
from powertrain.tune import schedulers
from powertrain.tune.search import BasicVariantGenerator
from powertrain.tune.sweep.grafts import Graft
from powertrain.tune.sweep.trial_run import TrialRun
from powertrain.tune.sweep.trial_starter import sections_of

#: The class without its types, for what a checker of types would refuse.
TUNE_CONFIG: Any = tune.TuneConfig
#: Something that is neither a dict nor a scheduler.
ANY_VALUE: Any = [1]


def report_x(config: dict[str, Any]) -> None:
    for step in range(3):
        tune.report({"loss": config["x"] + step, "nested": {"twice": 2 * config["x"]}})


def inline(function: Callable[..., Any], **arguments: Any) -> DataParallelTrainer:
    return DataParallelTrainer(function, scaling_config=ScalingConfig(num_workers=0), **arguments)


def fit(tmp_path: Path, function: Callable[..., Any] = report_x, **arguments: Any) -> tune.ResultGrid:
    space = arguments.pop("space", {"x": tune.grid_search([3, 1, 2])})
    run = RunConfig(name="sweep", storage_path=str(tmp_path), verbose=0, **arguments.pop("run", {}))
    config = tune.TuneConfig(**{"metric": "loss", "mode": "min", **arguments})
    return tune.Tuner(inline(function), param_space=space, tune_config=config, run_config=run).fit()


# --------------------------------------------------------------------------- bad input


class ForRay(schedulers.FIFOScheduler):
    def on_trial_result(self, controller: Any, trial: Any, result: Any) -> Any:  # type: ignore[override]
        return "STOP"


class Wordy(schedulers.FIFOScheduler):
    def on_trial_result(self, trial: str, result: Any) -> Any:
        return "STOP"


def test_a_scheduler_that_returns_something_else_than_decisions_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Wordy\.on_trial_result\(\) returned 'STOP'.* list of Decision"):
        fit(tmp_path, scheduler=Wordy())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tune.TuneConfig(num_samples=0), "no trial would run"),
        (lambda: tune.TuneConfig(num_samples=-1), "would never end"),
        (lambda: tune.TuneConfig(mode="least"), "neither 'min' nor 'max'"),
        (lambda: tune.TuneConfig(metric=["a", "b"], mode="min"), "a mode for each metric"),
        (lambda: TUNE_CONFIG(metrik="a"), "Did you mean 'metric'"),
        (lambda: TUNE_CONFIG(scheduler=ForRay()), "is written for Ray Tune"),
        (
            lambda: TUNE_CONFIG(scheduler=schedulers.HyperBandScheduler),
            "HyperBandScheduler is a class",
        ),
        (lambda: tune.TuneConfig(scheduler=ANY_VALUE), "is not a scheduler"),
        (lambda: tune.TuneConfig(search_alg=ANY_VALUE), "is not a search algorithm"),
        (lambda: tune.Tuner(report_x, param_space={"x": tune.choice([])}), "'x' of param_space"),
        (lambda: tune.Tuner(report_x, param_space=ANY_VALUE), "is not a dict"),
        (lambda: tune.Tuner(report_x, param_space={}), "nothing to search"),
        (lambda: tune.Tuner(3), "neither a trainer nor a function"),
        (lambda: tune.Tuner(), "neither a trainer nor a function"),
        (
            lambda: tune.Tuner(report_x, tune_config=tune.TuneConfig(scheduler="asha")),
            "needs to know by what",
        ),
        (
            lambda: tune.Tuner(report_x, tune_config=tune.TuneConfig(scheduler="ashaa")),
            "There is no scheduler 'ashaa'. Did you mean 'asha'",
        ),
        (lambda: tune.create_scheduler("asha", max_time=3), "unexpected keyword argument 'max_time'"),
        (lambda: schedulers.HyperBandForBOHB, "OptunaSearch"),
        (
            lambda: tune.Tuner(
                inline(report_x), param_space={"train_loop_config": {}, "lr": tune.uniform(0, 1)}
            ),
            "entries outside of them",
        ),
        (lambda: tune.Tuner.restore("/nowhere/at/all"), "There is no sweep"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_searched_is_refused_in_one_sentence(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        make()


def test_metric_and_mode_may_be_given_once_only() -> None:
    rule = schedulers.ASHAScheduler(metric="loss", mode="min")
    with pytest.raises(ConfigError, match="differ"):
        tune.Tuner(report_x, tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=rule))


def test_a_run_is_not_taken_for_a_sweep(tmp_path: Path) -> None:
    inline(lambda: None, run_config=RunConfig(name="sweep", storage_path=str(tmp_path), verbose=0)).fit()
    with pytest.raises(ConfigError, match="is a run, and not a sweep"):
        fit(tmp_path)


# --------------------------------------------------------------------------- good sweeps


def test_a_grid_is_searched_in_its_order_and_results_know_their_configuration(tmp_path: Path) -> None:
    grid = fit(tmp_path)
    assert [result.config for result in grid] == [{"x": 3}, {"x": 1}, {"x": 2}]
    best = grid.get_best_result()
    assert best.config == {"x": 1}
    assert best.metrics is not None
    assert best.metrics["loss"] == 3
    assert best.metrics["training_iteration"] == 3
    assert len(grid) == grid.num_terminated == 3
    assert grid.num_errors == 0
    assert "3 trials" in repr(grid)


def test_the_best_is_that_of_the_scope_and_the_metric(tmp_path: Path) -> None:
    grid = fit(tmp_path)
    assert grid.get_best_result(metric="nested/twice", mode="max").config == {"x": 3}
    assert grid.get_best_result(scope="all").config == {"x": 1}
    assert grid.get_best_result(scope="avg", mode="max").config == {"x": 3}
    with pytest.raises(ConfigError, match=r"No trial has a finite 'los'\. Did you mean 'loss'"):
        grid.get_best_result(metric="los")
    with pytest.raises(ConfigError, match="scope='first' is not one of"):
        grid.get_best_result(scope="first")


def test_a_data_frame_has_a_row_for_each_trial(tmp_path: Path) -> None:
    frame = fit(tmp_path).get_dataframe()
    assert list(frame["config/x"]) == [3, 1, 2]
    assert list(frame["loss"]) == [5, 3, 4]
    first = fit(tmp_path / "again").get_dataframe(filter_metric="loss", filter_mode="min")
    assert list(first["loss"]) == [3, 1, 2]


def test_a_finished_sweep_is_read_from_its_directory(tmp_path: Path) -> None:
    fit(tmp_path)
    grid = tune.ResultGrid.from_path(tmp_path / "sweep")
    assert grid.get_best_result().config == {"x": 1}
    assert [trial.status for trial in grid.trials] == ["TERMINATED"] * 3


def test_a_finished_sweep_that_is_started_again_runs_no_trial(tmp_path: Path) -> None:
    fit(tmp_path)
    ran = []
    grid = fit(tmp_path, lambda config: ran.append(config))
    assert len(grid) == 3
    assert not ran


def test_what_a_function_returns_or_yields_is_a_report(tmp_path: Path) -> None:
    def returns(config: dict[str, Any]) -> dict[str, float]:
        return {"loss": config["x"]}

    def yields(config: dict[str, Any]) -> Any:
        for step in range(4):
            yield {"loss": config["x"] - step}

    trainables: dict[str, Any] = {"returns": returns, "yields": yields}
    losses = {}
    for name, function in trainables.items():
        tuner = tune.Tuner(
            function,
            param_space={"x": 7},
            tune_config=tune.TuneConfig(metric="loss", mode="min"),
            run_config=RunConfig(name=name, storage_path=str(tmp_path), verbose=0),
        )
        metrics = tuner.fit()[0].metrics
        assert metrics is not None
        losses[name] = metrics["loss"], metrics["training_iteration"]
    assert losses == {"returns": (7, 1), "yields": (4, 4)}


def test_a_trial_stops_at_the_report_that_was_judged(tmp_path: Path) -> None:
    """Not one report later: that would double the cost of a trial that is stopped at its first."""
    seen: list[tuple[int, int]] = []

    def train(config: dict[str, Any]) -> None:
        for step in range(9):
            seen.append((config["x"], step + 1))
            tune.report({"loss": config["x"]})

    rule = schedulers.ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3)
    fit(tmp_path, train, scheduler=rule, space={"x": tune.grid_search([1, 2, 3])})
    assert [step for x, step in seen if x == 1] == list(range(1, 10))
    assert [step for x, step in seen if x != 1] == [1, 1]


def test_configurations_that_json_cannot_hold_survive_a_restart(tmp_path: Path) -> None:
    space = {"x": tune.grid_search([1, 2]), "loss": math.hypot, "pair": (1, 2)}
    fit(tmp_path, space=space)
    grid = tune.Tuner.restore(tmp_path / "sweep").fit()
    assert [result.config for result in grid] == [
        {"x": x, "loss": math.hypot, "pair": (1, 2)} for x in (1, 2)
    ]


def test_callbacks_get_every_trial(tmp_path: Path) -> None:
    heard: list[str] = []

    class Hears(tune.Callback):
        def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            heard.append(f"start {trial.config['x']}")

        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            heard.append(f"result {result['training_iteration']}")

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            heard.append("complete")

        def on_experiment_end(self, trials: Any, **info: Any) -> None:
            heard.append(f"end {len(trials)}")

    fit(tmp_path, run={"callbacks": [Hears()]}, space={"x": tune.grid_search([4, 5])})
    one = ["result 1", "result 2", "result 3", "complete"]
    assert heard == ["start 4", *one, "start 5", *one, "end 2"]


def test_a_callback_keeps_its_state_over_a_restart_of_the_sweep(tmp_path: Path) -> None:
    class Counts(tune.Callback):
        def __init__(self) -> None:
            self.completed = 0

        def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            self.completed += 1

        def get_state(self) -> dict[str, Any]:
            return {"completed": self.completed}

        def set_state(self, state: dict[str, Any]) -> None:
            self.completed = state["completed"]

    fit(tmp_path, run={"callbacks": [Counts()]})
    later = Counts()
    fit(tmp_path, run={"callbacks": [later]})
    assert later.completed == 3


def test_a_state_that_cannot_be_pickled_is_reported_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Holds(tune.Callback):
        def get_state(self) -> dict[str, Any]:
            return {"lock": threading.Lock()}

    assert len(fit(tmp_path, run={"callbacks": [Holds()]})) == 3
    assert capsys.readouterr().out.count("states of the callbacks are not kept") == 1


def test_a_callback_is_notified_of_a_trial_that_fails_and_is_started_again(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Hears(tune.Callback):
        def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            heard.append(trial.config["x"])

    def fails_once(config: dict[str, Any]) -> None:
        if not heard:
            raise ValueError("the first time")
        tune.report({"loss": config["x"]})

    run = {"callbacks": [Hears()], "failure_config": FailureConfig(max_failures=1)}
    assert fit(tmp_path, fails_once, space={"x": 5}, run=run).num_errors == 0
    assert heard == [5]


def test_a_trial_that_finds_no_checkpoint_to_exploit_says_so(tmp_path: Path) -> None:
    told: list[str] = []
    observer = SimpleNamespace(event=lambda event: told.append(event.message))
    empty = open_storage(tmp_path / "source")
    run = TrialRun(inline(report_x), observer, lambda *_: "", None, Graft(empty, 4, 4))
    own = open_storage(tmp_path / "own")
    run._prepare(own, Chain(own, 1, 0))
    assert "continues from its own: of the other one there is no checkpoint yet" in told[0]


def test_a_function_may_name_its_parameters_as_sections_of_a_trainer(tmp_path: Path) -> None:
    tune.Tuner(report_x, param_space={"x": 1, "datasets": ["a"], "run_config": 2})
    assert sections_of(report_x, {"x": 1, "datasets": ["a"]})["train_loop_config"] == {
        "x": 1,
        "datasets": ["a"],
    }


def test_each_trial_requests_the_resources_of_its_own_configuration() -> None:
    sized = tune.with_resources(report_x, lambda config: {"cpu": config["x"]})
    asked = [sections_of(sized, {"x": x})["scaling_config"].resources_per_worker for x in (1, 3)]
    assert asked == [{"CPU": 1}, {"CPU": 3}]


def test_a_trial_knows_its_sweep_and_its_id(tmp_path: Path) -> None:
    seen: list[tuple[str, str, str]] = []

    def train(config: dict[str, Any]) -> None:
        context = tune.get_context()
        seen.append((context.get_experiment_name(), context.get_trial_id(), context.get_trial_name()))
        tune.report({"loss": 1})

    grid = fit(tmp_path, train, space={"x": 1})
    (trial,) = grid.trials
    assert seen == [("sweep", trial.trial_id, trial.name)]


def test_trials_have_the_names_that_the_user_gives(tmp_path: Path) -> None:
    grid = fit(tmp_path, trial_dirname_creator=lambda trial: f"x-{trial.config['x']}")
    assert [Path(result.path).name for result in grid] == ["x-3", "x-1", "x-2"]
    with pytest.raises(ConfigError, match="which the sweep uses itself"):
        fit(tmp_path / "b", trial_dirname_creator=lambda trial: "journal")


def test_a_spent_budget_ends_the_sweep(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        while True:
            tune.report({"loss": 1})

    grid = fit(tmp_path, train, space={"x": 1}, num_samples=-1, time_budget_s=timedelta(seconds=1))
    assert len(grid) >= 1
    assert "time budget" in grid.trials[-1].reason


def test_two_sweeps_with_one_seed_try_the_same(tmp_path: Path) -> None:
    space = {"x": tune.uniform(0, 1), "y": tune.sample_from(lambda spec: spec.config.x * 2)}
    grids = [
        fit(tmp_path / name, space=space, num_samples=3, search_alg=BasicVariantGenerator(random_state=8))
        for name in ("a", "b")
    ]
    first, second = ([result.config for result in grid] for grid in grids)
    assert first == second
    assert all(config is not None and config["y"] == 2 * config["x"] for config in first)


def test_run_is_a_sweep_in_one_call(tmp_path: Path) -> None:
    analysis = tune.run(
        inline(report_x),
        config={"x": tune.grid_search([2, 1])},
        metric="loss",
        mode="min",
        name="sweep",
        storage_path=str(tmp_path),
        verbose=0,
    )
    assert analysis.best_config == {"x": 1}
    assert analysis.best_result["loss"] == 3
    assert len(analysis.dataframe()) == len(analysis.trials) == 2


def test_the_package_loads_neither_torch_nor_optuna() -> None:
    script = (
        "import sys; from powertrain import tune; tune.uniform(0, 1); tune.TuneConfig(); tune.Tuner; tune.ResultGrid; "
        "print([name for name in ('torch', 'optuna', 'pandas', 'matplotlib', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_report_is_the_report_of_training() -> None:
    assert tune.report is powertrain.report
    assert tune.get_checkpoint is powertrain.get_checkpoint
    assert tune.get_context is powertrain.get_context
