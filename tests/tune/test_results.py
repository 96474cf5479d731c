"""What is read of a sweep afterwards is of the right trial, and as it was."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import powertrain
from powertrain import DataParallelTrainer, RunConfig, ScalingConfig, tune
from powertrain.errors import ConfigError
from powertrain.tune.sweep.journal.state import json_form
from powertrain.tune.trial import Trial


def report_x(config: dict[str, Any]) -> None:
    for step in range(3):
        tune.report({"loss": config["x"] + step, "nested": {"twice": 2 * config["x"]}})


def tuner(
    place: Path, function: Callable[..., Any] = report_x, space: Any = None, **arguments: Any
) -> tune.Tuner:
    return tune.Tuner(
        DataParallelTrainer(function, scaling_config=ScalingConfig(num_workers=0)),
        param_space=space or {"x": tune.grid_search([3, 1, 2])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", **arguments),
        run_config=RunConfig(name="sweep", storage_path=str(place), verbose=0),
    )


@pytest.mark.parametrize("function", ["trial_name_creator", "trial_dirname_creator"])
def test_trials_that_are_named_alike_have_runs_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    with caplog.at_level(logging.WARNING, "powertrain"):
        grid = tuner(tmp_path, **{function: lambda trial: "same"}).fit()
    assert [Path(result.path).name for result in grid] == ["same", "same_1", "same_2"]
    assert [len(result.metrics_dataframe) for result in grid] == [3, 3, 3]
    assert caplog.text.count(f"TuneConfig({function}=...) returned 'same' for several trials") == 1
    again = tuner(tmp_path, **{function: lambda trial: "same"}).fit()
    assert [result.path for result in again] == [result.path for result in grid]


def test_the_best_trial_of_an_analysis_is_that_trial_also_where_a_name_ends_like_another(
    tmp_path: Path,
) -> None:
    grid = tuner(
        tmp_path,
        space={"x": tune.grid_search([2, 1])},
        trial_dirname_creator=lambda t: "a" * (2 - t.config["x"]) + "a",
    ).fit()
    assert [trial.name for trial in grid.trials] == ["a", "aa"]
    analysis = tune.ExperimentAnalysis(grid, "loss", "min")
    assert analysis.best_trial is grid.trials[1]
    assert analysis.best_config == {"x": 1}
    assert analysis.best_logdir == grid[1].path


def test_a_large_parameter_is_kept_once_for_all_trials(tmp_path: Path) -> None:
    def train(config: dict[str, Any], data: bytes) -> None:
        tune.report({"loss": config["x"] + len(data)})

    sized = tune.with_parameters(train, data=secrets.token_bytes(1 << 20))
    sweep = tune.Tuner(
        sized,
        param_space={"x": tune.grid_search([1, 2])},
        run_config=RunConfig(name="sweep", storage_path=str(tmp_path), verbose=0),
    )
    grid = sweep.fit()
    assert grid.num_errors == 0
    large = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 1 << 19]
    assert large == ["sweep.pickle"]
    with pytest.raises(
        ConfigError, match=r"is a trial of the sweep 'sweep'.* Continue the sweep: .*Tuner\.restore"
    ):
        DataParallelTrainer.restore(grid[0].path)
    assert len(tune.Tuner.restore(tmp_path / "sweep").fit()) == 2


def test_configurations_are_read_back_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    space = {"x": tune.grid_search([np.int64(1), np.float32(0.5)]), "deep": {"pair": tune.choice([(1, "a")])}}
    sweep = tuner(tmp_path, space=space)
    grids = [sweep.fit(), tune.ResultGrid.from_path(tmp_path / "sweep")]
    grids.append(tune.Tuner.restore(tmp_path / "sweep").get_results())
    for grid in grids:
        assert [result.config for result in grid] == [
            {"x": x, "deep": {"pair": (1, "a")}} for x in (np.int64(1), np.float32(0.5))
        ]
        first = grid.trials[0]
        assert isinstance(first.config["x"], np.int64)
        assert first.evaluated_params == {"x": 1, "deep/pair": (1, "a")}
    assert not caplog.records
    for pickled in (tmp_path / "sweep" / "configs").iterdir():
        pickled.write_bytes(b"of somebody else")
    foreign = tune.ResultGrid.from_path(tmp_path / "sweep")
    assert [result.config for result in foreign] == [{"x": x, "deep": {"pair": [1, "a"]}} for x in (1, 0.5)]
    assert caplog.text.count("have text in place of values that JSON cannot hold") == 1


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.float64("nan"), "nan"),
        ((1, (2,)), [1, [2]]),
        ({"a": np.int32(1)}, {"a": 1}),
    ],
    ids=str,
)
def test_numbers_of_numpy_are_numbers_in_the_journal(value: Any, form: Any) -> None:
    assert json_form(value) == (form, False)


def test_a_data_frame_has_columns_for_nested_metrics_and_the_time_of_the_chosen_report(
    tmp_path: Path,
) -> None:
    grid = tuner(tmp_path).fit()
    for frame in (
        grid.get_dataframe(),
        grid.get_dataframe("nested/twice", "max"),
        grid.get_dataframe("loss", "min"),
    ):
        assert list(frame["nested/twice"]) == [6, 2, 4]
        assert "nested" not in frame
        assert (frame["time_this_iter_s"] >= 0).all()
    assert list(grid.get_dataframe("loss", "min")["training_iteration"]) == [1, 1, 1]


def test_a_metric_without_a_finite_value_is_said_to_be_just_that(tmp_path: Path) -> None:
    grid = tuner(tmp_path, lambda config: tune.report({"loss": math.nan}), {"x": 1}).fit()
    with pytest.raises(
        ConfigError, match=r"No trial has a finite 'loss': what they reported is NaN or infinite\.$"
    ):
        grid.get_best_result()


def test_a_trial_has_what_ray_calls_its_checkpoint_directory_and_error(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        with powertrain.checkpoint_dir() as directory:
            Path(directory, "x").write_text(str(config["x"]))
            tune.report({"loss": config["x"]}, checkpoint=powertrain.Checkpoint.from_directory(directory))
        tune.report({"loss": 7.0})
        if config["x"] == 2:
            raise ValueError("two")

    live = tuner(tmp_path, train, {"x": tune.grid_search([1, 2])}).fit()
    for grid in (live, tune.ResultGrid.from_path(tmp_path / "sweep")):
        well, failed = grid.trials
        assert well.checkpoint is not None
        assert Path(well.checkpoint.path, "x").read_text() == "1"
        assert well.logdir == well.local_path == grid[0].path
        assert well.is_finished()
        assert well.get_error() is None
        assert "two" in str(failed.get_error())
        assert well.metric_analysis["loss"] == {
            "max": 7,
            "min": 1,
            "avg": 4,
            "last": 7,
            "last-5-avg": 4,
            "last-10-avg": 4,
        }
    assert Trial("a_00000", 0, "never-started", {}).checkpoint is None
