"""What ``fit`` raises: the class says who failed, as in Ray Train, and the errors of the ranks are in it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.stories.engines import on

import powertrain
from powertrain import CheckpointConfig, Result, TrainingFailedError
from powertrain.errors import (
    ControllerError,
    NCCLHangError,
    PreemptedError,
    PreemptionError,
    WorkerGroupError,
)


class DataIsGoneError(RuntimeError):
    """An error of the user's own, with an attribute."""

    def __init__(self, shard: int) -> None:
        super().__init__(f"shard {shard} is gone")
        self.shard = shard


def raise_an_error_of_its_own() -> None:
    if powertrain.get_context().get_world_rank() == 0:
        try:
            Path("/nowhere/at/all").read_text()
        except FileNotFoundError as error:
            raise DataIsGoneError(7) from error


def save_without_the_score() -> None:
    for epoch in range(3):
        with powertrain.checkpoint_dir() as directory:
            Path(directory, "epoch").write_text(str(epoch))
            checkpoint = powertrain.Checkpoint.from_directory(directory)
            powertrain.report({"loss": 1.0 - epoch / 10}, checkpoint)


@on("local", "inline", "ray", smoke=["local"])
def test_the_error_of_fit_holds_what_the_rank_raised(fits: Any, engine: str) -> None:
    with pytest.raises(WorkerGroupError) as caught:
        fits.trainer(raise_an_error_of_its_own).fit()

    error = caught.value.worker_failures[0]
    assert isinstance(error, DataIsGoneError)
    assert (str(error), error.shard) == ("shard 7 is gone", 7)
    assert isinstance(error.__cause__, FileNotFoundError)
    assert error.failure.rank == 0  # type: ignore[attr-defined]
    assert "caused by FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/at/all'" in str(
        caught.value
    )
    later = Result.from_path(caught.value.result.path)
    assert str(later.error) == str(caught.value)
    assert type(later.error.worker_failures[0]).__name__ == "DataIsGoneError"


def test_errors_can_be_made_by_hand_and_are_caught_by_their_usual_classes() -> None:
    group = WorkerGroupError("rank 0 failed", {0: ValueError("x")})
    assert (str(group), str(group.worker_failures[0])) == ("rank 0 failed", "x")
    controller = ControllerError(RuntimeError("no room"))
    assert (str(controller), type(controller.controller_failure)) == ("no room", RuntimeError)
    info = powertrain.PreemptionInfo(None, {"node": [1, 0]})
    preempted = PreemptionError(info, drain_timed_out=True)
    assert (preempted.preemption_info, preempted.drain_timed_out) == (info, True)
    assert "[0, 1]" in str(preempted)
    for error in (group, controller, preempted, NCCLHangError("hung", {})):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (type(error), str(error))
    assert issubclass(NCCLHangError, WorkerGroupError)
    assert issubclass(WorkerGroupError, TrainingFailedError)
    assert issubclass(ControllerError, TrainingFailedError)
    assert issubclass(PreemptedError, PreemptionError)
    assert pickle.loads(pickle.dumps(PreemptedError("leaving"))).code == 143


def test_a_score_attribute_that_is_never_reported_is_warned_about_once(
    fits: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="accuracy")
    result = fits.trainer(save_without_the_score, workers=1, checkpoint_config=config).fit()

    shown = " ".join(capfd.readouterr().out.split())
    assert shown.count("No checkpoint has a number under checkpoint_score_attribute='accuracy'") == 1
    assert "Their metrics are loss." in shown
    assert len(result.best_checkpoints) == 1
