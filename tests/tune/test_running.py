"""``tune.run`` takes the arguments of Ray Tune's, and its analysis has the names of Ray's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import powertrain
from powertrain import DataParallelTrainer, ScalingConfig, tune
from powertrain.errors import ConfigError
from powertrain.tune import ResumeConfig, registry


def inline(function: Callable[..., Any]) -> DataParallelTrainer:
    return DataParallelTrainer(function, scaling_config=ScalingConfig(num_workers=0))


def run(place: Path, function: Callable[..., Any], **arguments: Any) -> tune.ExperimentAnalysis:
    arguments = {"config": {"x": 1}, "storage_path": str(place), "name": "sweep", "verbose": 0, **arguments}
    return tune.run(inline(function), **arguments)


@pytest.mark.parametrize(
    ("arguments", "began"),
    [
        ({"resume": "AUTO"}, []),
        ({"resume": "ERRORED_ONLY"}, [1]),
        ({"resume": "AUTO+ERRORED"}, [1]),
        ({"resume": "AUTO+RESTART_ERRORED_ONLY"}, [0]),
        ({"resume_config": ResumeConfig(errored=ResumeConfig.ResumeType.RESTART)}, [0]),
    ],
    ids=str,
)
def test_a_failed_trial_runs_again_as_resume_says(
    tmp_path: Path, arguments: dict[str, Any], began: list[int]
) -> None:
    starts: list[int] = []

    def train(config: dict[str, Any]) -> None:
        checkpoint = tune.get_checkpoint()
        starts.append(0 if checkpoint is None else json.loads(Path(checkpoint.path, "step").read_text()))
        with powertrain.checkpoint_dir() as directory:
            Path(directory, "step").write_text("1")
            tune.report({"loss": 1.0}, checkpoint=powertrain.Checkpoint.from_directory(directory))
        if len(starts) == 1:
            raise ValueError("the first time")

    run(tmp_path, train, raise_on_failed_trial=False)
    starts[1:] = []
    analysis = run(tmp_path, train, raise_on_failed_trial=False, **arguments)
    assert starts[1:] == began
    assert analysis.trials[0].status == ("TERMINATED" if began else "ERROR")


def test_a_resume_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    for wrong in ("PROMPT", "AUTO+ERORED", "ERRORED+AUTO", 3):
        with pytest.raises(ConfigError, match="is none of True, False, 'AUTO', 'AUTO"):
            run(tmp_path, lambda config: None, resume=wrong)


def test_older_arguments_have_their_effect_or_say_that_they_have_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(config: dict[str, Any]) -> None:
        begun = tune.get_checkpoint()
        first = int(Path(begun.path, "step").read_text()) if begun is not None else 0
        for step in range(first, first + 3):
            with powertrain.checkpoint_dir() as directory:
                Path(directory, "step").write_text(str(step))
                tune.report({"loss": step}, checkpoint=powertrain.Checkpoint.from_directory(directory))

    options = {"keep_checkpoints_num": 1, "checkpoint_score_attr": "min-loss"}
    first = run(tmp_path, train, storage_path=None, local_dir=str(tmp_path), **options)
    (result,) = first.result_grid
    assert Path(result.path).parent == tmp_path / "sweep"
    kept = {metrics["loss"] for _, metrics in result.best_checkpoints}
    assert 0 in kept, "the smallest"
    assert 1 not in kept
    last = first.get_last_checkpoint(first.trials[0])
    assert last is not None
    second = run(
        tmp_path, train, name="b", restore=last.path, chdir_to_trial_dir=True, export_formats=["onnx"]
    )
    assert second.trials[0].last_result["loss"] == 4, "it begins where the first one ended"
    assert "TuneConfig(chdir_to_trial_dir=True)" in capsys.readouterr().out
    assert "tune.run(export_formats=['onnx'])" in caplog.text


def test_a_registered_name_can_have_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_trainables", {})
    tune.register_trainable("named", lambda config: {"loss": 1})
    assert tune.run("named", resources_per_trial={"cpu": 0.5}, storage_path=str(tmp_path), verbose=0).trials


def test_an_analysis_has_the_configurations_and_frames_of_its_trials(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        for step in range(3):
            tune.report({"loss": config["deep"]["x"] + step})

    space = {"deep": {"x": tune.grid_search([2, 1])}}
    analysis = run(tmp_path, train, config=space, metric="loss", mode="min")
    best = analysis.best_trial.trial_id
    assert analysis.get_all_configs()[best] == {"deep": {"x": 1}}
    assert analysis.get_all_configs(prefix=True)[best] == {"config/deep/x": 1}
    assert list(analysis.best_dataframe["loss"]) == [1, 2, 3]
    assert list(analysis.best_result_df["loss"]) == [3]
    assert list(analysis.best_result_df.index) == [best]
