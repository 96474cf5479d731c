"""A sweep that is started a second time: under another name, with fewer trials, or by the same objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from powertrain import DataParallelTrainer, FailureConfig, RunConfig, ScalingConfig, tune
from powertrain.config.run import NAME_LIMIT_BYTES
from powertrain.errors import ConfigError
from powertrain.tune.search.optuna import OptunaSearch
from powertrain.tune.stopper import (
    CombinedStopper,
    MaximumIterationStopper,
    NoopStopper,
    TimeoutStopper,
    add_spent,
    copy_stopper,
)
from powertrain.tune.sweep.journal import record


def report_x(config: dict[str, Any]) -> None:
    for step in range(3):
        tune.report({"loss": config["x"] + step})


def inline(function: Callable[..., Any]) -> DataParallelTrainer:
    return DataParallelTrainer(function, scaling_config=ScalingConfig(num_workers=0))


def make(tmp_path: Path, function: Callable[..., Any] = report_x, **arguments: Any) -> tune.Tuner:
    space = arguments.pop("space", {"x": tune.uniform(0, 1)})
    run = {"name": "sweep", "storage_path": str(tmp_path), "verbose": 0, **arguments.pop("run", {})}
    config = tune.TuneConfig(**{"metric": "loss", "mode": "min", "max_concurrent_trials": 1, **arguments})
    return tune.Tuner(inline(function), param_space=space, tune_config=config, run_config=RunConfig(**run))


# --------------------------------------------------------------------------- another name


def test_a_renamed_sweep_is_restored_without_its_script(tmp_path: Path) -> None:
    """Also one with configurations that JSON cannot hold, which keep the signatures of the first name."""
    grid = make(tmp_path / "a", space={"x": tune.grid_search([1, 2]), "pair": (1, 2)}).fit()
    path = tmp_path / "a" / "sweep"
    (tmp_path / "b").mkdir()
    for name in ("other", "third"):
        path = path.rename(tmp_path / "b" / name)
        again = tune.Tuner.restore(path).fit()
        assert [result.config for result in again] == [result.config for result in grid]
        assert [result.metrics for result in again] == [result.metrics for result in grid]
    assert record.read(record_storage(path))["names"] == ["sweep", "other", "third"]


def test_what_another_user_signed_is_not_opened_under_any_name(tmp_path: Path) -> None:
    make(tmp_path).fit()
    renamed = (tmp_path / "sweep").rename(tmp_path / "other")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        with pytest.raises(ConfigError, match="not written by you on this machine"):
            tune.Tuner.restore(renamed)


def record_storage(path: Path) -> Any:
    from powertrain.storage import open_storage

    return open_storage(str(path))


# --------------------------------------------------------------------------- fewer trials


@pytest.mark.parametrize("search_alg", [None, OptunaSearch(seed=1)], ids=["random", "optuna"])
def test_a_smaller_num_samples_is_answered_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], search_alg: Any
) -> None:
    make(tmp_path, num_samples=3, search_alg=search_alg).fit()
    capsys.readouterr()
    assert len(make(tmp_path, num_samples=1, search_alg=search_alg).fit()) == 3
    lines = [line for line in capsys.readouterr().out.splitlines() if "[sweep]" in line]
    assert len(lines) == 1
    assert "num_samples=1 asks for 1 trial, and the sweep has 3 already: all of them stay" in lines[0]


# --------------------------------------------------------------------------- the same objects


def test_a_stopper_counts_the_reports_of_a_continued_sweep_once(tmp_path: Path) -> None:
    """Its calls are replayed to a new copy: the object of the script has seen none of them."""
    is_first = [True]

    def train(config: dict[str, Any]) -> None:
        for step in range(10):
            tune.report({"loss": float(step)})
            if is_first and step == 1:
                is_first.clear()
                raise RuntimeError("once")

    stopper = MaximumIterationStopper(4)
    make(tmp_path, train, run={"stop": stopper}).fit()
    tuner = make(tmp_path, train, run={"stop": stopper})
    tuner._resume = tune.ResumeConfig(errored=tune.ResumeConfig.ResumeType.RESUME)
    assert [trial.iteration for trial in tuner.fit().trials] == [4]


def test_a_stopper_that_cannot_be_copied_is_used_itself() -> None:
    class Held(NoopStopper):
        def __init__(self) -> None:
            self.lock = threading.Lock()

    held = Held()
    assert copy_stopper(held) is held


def test_a_timeout_within_combined_stoppers_counts_earlier_time() -> None:
    timeout = TimeoutStopper(10)
    add_spent(CombinedStopper(NoopStopper(), CombinedStopper(timeout)), 4.0)
    assert timeout.spent == 4.0


# --------------------------------------------------------------------------- what is counted and called


def test_failures_of_a_trial_are_counted_also_for_a_later_process(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []

    class Counts(tune.Callback):
        def on_trial_recover(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            told.append(("recover", trial.num_failures))

        def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
            told.append(("error", trial.num_failures))

    def train(config: dict[str, Any]) -> None:
        tune.report({"loss": 1.0})
        if config["x"] == 1:
            raise RuntimeError("always")

    run = {"failure_config": FailureConfig(max_failures=2), "callbacks": [Counts()]}
    tuner = make(tmp_path, space={"x": tune.grid_search([0, 1])}, run=run)
    tuner = tune.Tuner(train, param_space=tuner._space, tune_config=tuner._tune, run_config=tuner._run)
    grid = tuner.fit()
    assert told == [("recover", 1), ("recover", 2), ("error", 3)]
    assert [trial.num_failures for trial in grid.trials] == [0, 3]
    read = tune.ResultGrid.from_path(tmp_path / "sweep")
    assert [trial.num_failures for trial in read.trials] == [0, 3]


def test_hooks_get_all_trials_and_the_number_of_the_round(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []

    class Rounds(tune.Callback):
        def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
            calls.append(("result", iteration, len(trials)))

        def on_checkpoint(
            self, iteration: int, trials: Any, trial: Any, checkpoint: Any, **info: Any
        ) -> None:
            calls.append(("checkpoint", iteration, len(trials)))

    def train(config: dict[str, Any]) -> None:
        with tune_checkpoint() as checkpoint:
            tune.report({"loss": 1.0}, checkpoint=checkpoint)

    make(tmp_path, train, num_samples=2, run={"callbacks": [Rounds()]}).fit()
    assert calls == [("result", 1, 1), ("checkpoint", 1, 1), ("result", 2, 2), ("checkpoint", 2, 2)]


def tune_checkpoint() -> Any:
    import contextlib
    import tempfile

    @contextlib.contextmanager
    def made() -> Any:
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "file").write_text("state")
            yield tune.Checkpoint.from_directory(directory)

    return made()


def test_states_of_callbacks_that_cannot_be_opened_do_not_end_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unopened:
        def __reduce__(self) -> Any:
            return int, ("no number",)

    class Keeps(tune.Callback):
        def get_state(self) -> dict[str, Any]:
            return {"state": Unopened()}

    make(tmp_path, run={"callbacks": [Keeps()]}).fit()
    assert len(make(tmp_path, num_samples=2, run={"callbacks": [Keeps()]}).fit()) == 2
    assert "callbacks begin without their earlier states" in capsys.readouterr().out


# --------------------------------------------------------------------------- what was given


def test_a_sweep_without_a_space_is_restored(tmp_path: Path) -> None:
    run = RunConfig(name="sweep", storage_path=str(tmp_path), verbose=0)
    tune.Tuner(inline(lambda config: tune.report({"loss": 1.0})), run_config=run).fit()
    assert len(tune.Tuner.restore(tmp_path / "sweep").fit()) == 1


@pytest.mark.parametrize("function", [lambda: None, lambda config, data: None], ids=["none", "two"])
def test_a_function_that_does_not_take_a_configuration_is_refused_before_any_trial(function: Any) -> None:
    with pytest.raises(ConfigError, match=r"a trial calls it with its configuration alone, and it takes \("):
        tune.Tuner(function)


def test_a_trial_that_begins_anew_several_times_keeps_a_short_name(tmp_path: Path) -> None:
    def fails(config: dict[str, Any]) -> None:
        raise RuntimeError("always")

    make(tmp_path, fails, trial_name_creator=lambda _: "n" * NAME_LIMIT_BYTES).fit()
    for start in (2, 3):
        (trial,) = tune.Tuner.restore(tmp_path / "sweep", inline(fails), restart_errored=True).fit().trials
        assert trial.name.endswith(f"n-restart{start}")
        assert "RuntimeError: always" in trial.reason


def test_a_limit_for_a_metric_that_is_never_reported_is_mentioned_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, num_samples=2, run={"stop": {"los": 1, "training_iteration": 2}}).fit()
    lines = [line for line in capsys.readouterr().out.splitlines() if "RunConfig(stop=...)" in line]
    assert len(lines) == 1
    assert "has a limit for 'los', which no trial has reported so far" in lines[0]
    assert "'loss'" in lines[0]


def test_a_metric_that_is_no_number_is_named_with_its_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="It reported 'loss' as str, not as a number"):
        make(tmp_path, lambda config: tune.report({"loss": "small"})).fit()


# --------------------------------------------------------------------------- results


def test_a_missing_mode_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="small or large is not known"):
        make(tmp_path, mode=None, num_samples=2).fit().get_best_result()


def test_the_best_of_a_single_trial_needs_no_metric(tmp_path: Path) -> None:
    grid = make(tmp_path, metric=None, mode=None).fit()
    assert grid.get_best_result().config == grid[0].config
    with pytest.raises(ConfigError, match="Did you mean 'loss'"):
        grid.get_best_result("los", "min")


def test_metric_and_mode_of_the_searcher_are_those_of_the_results(tmp_path: Path) -> None:
    search = OptunaSearch(metric="loss", mode="max", seed=1)
    grid = make(tmp_path, metric=None, mode=None, search_alg=search, num_samples=2).fit()
    best: Any = grid.get_best_result()
    assert best.metrics["loss"] == max(trial.last_result["loss"] for trial in grid.trials)
    assert record.read(record_storage(tmp_path / "sweep"))["metric"] == ["loss"]


def test_a_lambda_gives_its_trials_names_without_brackets(tmp_path: Path) -> None:
    train: Any = lambda config: {"loss": config["x"]}  # noqa: E731
    space = {"x": tune.uniform(0, 1)}
    run = RunConfig(name="sweep", storage_path=str(tmp_path), verbose=0)
    (trial,) = tune.Tuner(train, param_space=space, run_config=run).fit().trials
    assert trial.name.startswith("lambda_")
