"""Checkpoints that were reported and could not be saved: the run says how many, why and where."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.stories.engines import ON_ALL
from typer.testing import CliRunner

import powertrain
from powertrain import Checkpoint, CheckpointConfig, DataParallelTrainer, Result, RunConfig, ScalingConfig
from powertrain.cli.main import app
from powertrain.config.checkpoint import CheckpointUploadMode, SyncConfig
from powertrain.errors import CheckpointError, TrainingFailedError

ONE_WORKER = ScalingConfig(num_workers=1, engine="local")


def save_sizes(config: dict[str, Any]) -> str:
    """Report a checkpoint of each size in MiB; the first is committed before the next is begun."""
    for number, megabytes in enumerate(config["sizes"]):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state").write_bytes(os.urandom(megabytes << 20))
            powertrain.report(
                {"megabytes": megabytes},
                checkpoint=Checkpoint(directory),
                checkpoint_upload_mode="ASYNC" if number else config.get("first", "SYNC"),
            )
    return "trained"


def fit_on(disk: Path, sizes: list[int], **checkpoint: Any) -> Result:
    return DataParallelTrainer(
        save_sizes,
        train_loop_config={"sizes": sizes, "first": "ASYNC" if sizes[0] > 8 else "SYNC"},
        scaling_config=ONE_WORKER,
        run_config=RunConfig(
            name="full",
            storage_path=str(disk),
            checkpoint_config=CheckpointConfig(num_to_keep=1, **checkpoint),
            sync_config=SyncConfig(sync_timeout=5),
        ),
    ).fit()


@pytest.fixture
def disk(mount_small_disk: Callable[[str], Path]) -> Path:
    return mount_small_disk("8m")


def test_fit_raises_when_every_checkpoint_was_lost_to_a_full_disk(
    disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError) as raised:
        fit_on(disk, [20, 20])

    result = raised.value.result
    assert (result.state, result.metrics, result.return_value) == ("finished", {"megabytes": 20}, "trained")
    assert result.checkpoint is None
    assert [lost.row for lost in result.unsaved_checkpoints] == [1, 2]
    for lost in result.unsaved_checkpoints:
        assert "No space left" in lost.reason
        assert f"the file system at {str(disk)!r} (tmpfs, 8.0 MiB) is full" in lost.reason
        assert lost.place == str(disk)
    assert "The run has no saved checkpoint." in str(raised.value)
    assert str(disk) in str(raised.value)
    printed = "".join(capfd.readouterr())
    assert "2 checkpoints were NOT saved (rows 1, 2)" in printed
    assert "unsaved_checkpoints=2" in repr(result)

    read = Result.from_path(disk / "full")
    assert read.unsaved_checkpoints == result.unsaved_checkpoints
    assert read.error is None


def test_a_checkpoint_lost_before_a_saved_one_is_listed_and_fit_returns(disk: Path) -> None:
    result = fit_on(disk, [1, 20, 1])
    assert [lost.row for lost in result.unsaved_checkpoints] == [2]
    assert result.checkpoint is not None


def test_on_lost_warn_returns_the_result_and_the_command_line_lists_the_loss(disk: Path) -> None:
    result = fit_on(disk, [1, 20], on_lost="warn")
    assert [lost.row for lost in result.unsaved_checkpoints] == [2]

    shown = CliRunner().invoke(app, ["show", "full", "--storage", str(disk)]).output
    assert "checkpoints that were not saved" in shown
    assert "No space left" in shown
    listed = CliRunner().invoke(app, ["ls", str(disk)]).output
    assert "finished, 1 unsaved" in listed


def test_a_run_that_is_started_again_with_room_loses_nothing(disk: Path) -> None:
    with pytest.raises(CheckpointError, match=r"The newest saved checkpoint is of row 1\."):
        fit_on(disk, [1, 20])
    assert fit_on(disk, [1]).unsaved_checkpoints == []
    assert Result.from_path(disk / "full").unsaved_checkpoints == []


def upload_with(config: dict[str, Any]) -> None:
    """Report once for each word: "raise" has the upload function fail on rank 0."""

    def refuse(checkpoint: Checkpoint, name: str) -> Checkpoint:
        raise RuntimeError("the bucket is closed on Sundays")

    for word in config["words"]:
        with powertrain.checkpoint_dir() as directory:
            Path(directory, f"rank-{powertrain.get_context().get_world_rank()}").write_text(word)
            fails = word == "raise" and powertrain.get_context().get_world_rank() == 0
            powertrain.report(
                {"word": word},
                checkpoint=Checkpoint(directory),
                checkpoint_upload_fn=refuse if fails else None,
            )


@ON_ALL
def test_fit_raises_when_the_last_checkpoint_upload_fn_raised(fits: Any, engine: str) -> None:
    outcome = fits.outcome(upload_with, train_loop_config={"words": ["save", "raise"]})

    assert (outcome["raised"], outcome["state"]) == ("CheckpointError", "finished"), outcome
    (lost,) = outcome["unsaved"]
    assert lost["row"] == 2
    assert "the bucket is closed on Sundays" in lost["reason"]
    assert lost["place"] == "checkpoint_upload_fn of rank 0"
    assert "newest saved checkpoint is of row 1" in outcome["message"]


@ON_ALL
def test_an_upload_that_fails_before_the_last_one_is_only_listed(fits: Any, engine: str) -> None:
    outcome = fits.outcome(upload_with, train_loop_config={"words": ["raise", "save"]})

    assert outcome["raised"] == "", outcome
    assert [lost["row"] for lost in outcome["unsaved"]] == [1]


def hand_over_directories(config: dict[str, Any]) -> None:
    """Give directories away; storage has something else in the place of rank 1's file of each "refused" one."""
    rank = powertrain.get_context().get_world_rank()
    for name in ("refused", "saved", "refused-at-the-end", "saved-last"):
        mine = Path(config["mine"], f"{name}-{rank}")
        mine.mkdir(parents=True)
        Path(mine, f"state-{rank}").write_text(name)
        if name.startswith("refused") and rank == 1:
            Path(config["checkpoints"], name, "state-1", "in the way").mkdir(parents=True)
        powertrain.report(
            {},
            checkpoint=Checkpoint(mine),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=CheckpointUploadMode.SYNC
            if name == "saved"
            else CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=True if name == "saved" else None,
        )


def test_directories_handed_over_for_upload_are_given_back_when_it_fails(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    config = {"mine": str(mine), "checkpoints": str(tmp_path / "run" / "checkpoints")}
    result = DataParallelTrainer(
        hand_over_directories,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, engine="local"),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    ).fit()

    assert [lost.name for lost in result.unsaved_checkpoints] == ["refused", "refused-at-the-end"]
    for lost in result.unsaved_checkpoints:
        places = [mine / f"{lost.name}-{rank}" for rank in range(2)]
        assert "Is a directory" in lost.reason
        assert lost.reason.endswith(f"Its files are in {places[0]}, {places[1]}.")
        assert [(place / f"state-{n}").read_text() for n, place in enumerate(places)] == [lost.name] * 2
    assert len(os.listdir(mine)) == 4, "what was saved is gone"
    assert result.checkpoint is not None
    assert Path(result.checkpoint.path).name == "saved-last"
    assert sorted(os.listdir(result.checkpoint.path))[-2:] == ["state-0", "state-1"]
    assert not (tmp_path / "run" / ".staging").exists()


def write_until_full(config: dict[str, Any]) -> None:
    os.chdir(config["disk"])
    with open("filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))


def test_a_training_function_that_fills_a_disk_gets_an_error_that_names_it(
    disk: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingFailedError) as raised:
        DataParallelTrainer(
            write_until_full,
            train_loop_config={"disk": str(disk)},
            scaling_config=ONE_WORKER,
            run_config=RunConfig(name="filler", storage_path=str(tmp_path / "runs")),
        ).fit()
    assert f"full file systems: {str(disk)!r} (tmpfs, 8.0 MiB)" in str(raised.value)
