"""Loops that write checkpoints to the run's storage by themselves, by ``get_context().get_storage()``."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.s3_server import S3Server
from tests.stories.engines import ON_ALL

import powertrain
from powertrain import (
    Checkpoint,
    CheckpointUploadMode,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    get_context,
    report,
)


def content(checkpoint: Checkpoint | None) -> dict[str, str]:
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        return {path.name: path.read_text() for path in Path(directory).iterdir() if path.name[0] != "."}


def save_in_place(config: dict[str, Any]) -> None:
    """Rank 0 writes straight into the storage, and only says where."""
    storage = get_context().get_storage()
    for epoch in range(2):
        if get_context().get_world_rank() > 0:
            report({"epoch": epoch})
            continue
        path = storage.build_checkpoint_path_from_name(str(epoch))
        os.makedirs(path)
        Path(path, "model").write_text(f"epoch {epoch}")
        report({"epoch": epoch}, Checkpoint(path), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


@ON_ALL
def test_a_loop_saves_into_the_storage_with_no_upload(fits: Any, engine: str) -> None:
    outcome = fits.outcome(save_in_place)
    assert outcome["raised"] == "", outcome["message"]
    assert outcome["checkpoint"] == os.path.join(outcome["path"], "1")
    assert content(Result.from_path(outcome["path"]).checkpoint) == {"model": "epoch 1"}


def save_beside_training(config: dict[str, Any]) -> None:
    """Something else writes the files while training continues; the upload function waits for it, and returns the
    checkpoint as it is."""
    storage = get_context().get_storage()
    path = Path(storage.build_checkpoint_path_from_name("beside"))
    has_reported = threading.Event()

    def write() -> None:
        has_reported.wait()
        path.mkdir()
        (path / "model").write_text("written after report")

    writer = threading.Thread(target=write)
    writer.start()

    def wait_for_writer(checkpoint: Checkpoint, name: str) -> Checkpoint:
        writer.join()
        return checkpoint

    report(
        {},
        Checkpoint(str(path)),
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=wait_for_writer,
        delete_local_checkpoint_after_upload=False,
    )
    has_reported.set()


@ON_ALL
def test_an_upload_function_waits_for_an_asynchronous_save_and_returns_its_checkpoint(
    fits: Any, engine: str
) -> None:
    outcome = fits.outcome(save_beside_training, workers=1)
    assert outcome["raised"] == "", outcome["message"]
    assert content(Result.from_path(outcome["path"]).checkpoint) == {"model": "written after report"}


def upload_by_hand(config: dict[str, Any]) -> None:
    def copy(checkpoint: Checkpoint, name: str) -> Checkpoint:
        target = get_context().get_storage().build_checkpoint_path_from_name(name)
        shutil.copytree(checkpoint.path, target)
        return Checkpoint.from_directory(target)

    def persist(checkpoint: Checkpoint, name: str) -> Checkpoint:
        return get_context().get_storage().persist_current_checkpoint(checkpoint, name)

    for number, upload in enumerate((copy, persist)):
        with powertrain.checkpoint_dir() as directory:
            Path(directory, "model").write_text(upload.__name__)
            report(
                {"number": number},
                Checkpoint(directory),
                checkpoint_dir_name=f"mine-{number}",
                checkpoint_upload_fn=upload,
            )


def test_an_upload_function_copies_into_the_storage(fits: Any) -> None:
    outcome = fits.outcome(upload_by_hand, workers=1)
    assert outcome["raised"] == "", outcome["message"]
    kept = Result.from_path(outcome["path"]).best_checkpoints
    assert [content(checkpoint)["model"] for checkpoint, _ in kept] == ["copy", "persist"]
    assert [checkpoint.path for checkpoint, _ in kept] == [
        os.path.join(outcome["path"], name) for name in ("mine-0", "mine-1")
    ]


def leave_in_own_directory(config: dict[str, Any]) -> None:
    directory = Path(os.environ["STORY_DIRECTORY"], "kept-here")
    directory.mkdir()
    (directory / "model").write_text("as it is")
    report({}, Checkpoint(str(directory)), checkpoint_upload_fn=lambda checkpoint, name: checkpoint)


def test_a_checkpoint_that_an_upload_function_returns_as_it_is_stays_where_it_was_reported(fits: Any) -> None:
    outcome = fits.outcome(leave_in_own_directory, workers=1)
    assert (outcome["raised"], outcome["checkpoint"]) == ("", str(fits.directory / "kept-here")), outcome
    assert content(Result.from_path(outcome["path"]).checkpoint) == {"model": "as it is"}


def look_at_the_storage(config: dict[str, Any]) -> None:
    storage = get_context().get_storage()
    expected = os.path.join(os.environ["STORY_DIRECTORY"], "storage")
    assert str(storage) == f"{storage}" == storage.storage_fs_path == expected
    assert os.path.join(storage, "x") == os.path.join(expected, "x")
    assert storage.experiment_fs_path == get_context().get_trial_dir()
    path = storage.build_checkpoint_path_from_name("a")
    assert storage.extract_checkpoint_dir_name_from_path(path) == "a"
    storage.storage_filesystem.create_dir(path)
    assert os.path.isdir(path)
    for entry in os.listdir(storage.experiment_fs_path):
        if entry != "a":
            with pytest.raises(powertrain.errors.ReportError, match="for its own files"):
                storage.build_checkpoint_path_from_name(entry)
    with pytest.raises(powertrain.errors.ReportError, match="not the name"):
        storage.build_checkpoint_path_from_name("../other")


def test_the_storage_prints_as_its_path_and_keeps_the_names_of_the_run(fits: Any) -> None:
    outcome = fits.outcome(look_at_the_storage, workers=1)
    assert outcome["raised"] == "", outcome["message"]


def persist_in_a_bucket() -> None:
    storage = get_context().get_storage()
    assert storage.storage_fs_path == "bucket/own-uploads"
    with powertrain.checkpoint_dir() as directory:
        Path(directory, "model").write_text("first")
        kept = storage.persist_current_checkpoint(Checkpoint(directory), "first")
    report({}, kept, checkpoint_upload_mode="NO_UPLOAD")
    path = storage.build_checkpoint_path_from_name("second")
    with storage.storage_filesystem.open_output_stream(f"{path}/model") as stream:
        stream.write(b"second")
    report(
        {}, Checkpoint(f"s3://{path}"), checkpoint_upload_mode="ASYNC", checkpoint_upload_fn=lambda c, name: c
    )


def test_a_loop_saves_into_a_bucket_by_itself() -> None:
    """The keys come from the environment, so that an address may be made of the path alone."""
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        result = DataParallelTrainer(
            persist_in_a_bucket,
            scaling_config=ScalingConfig(num_workers=1, engine="local"),
            run_config=RunConfig(
                name="own",
                storage_path="s3://bucket/own-uploads",
                worker_runtime_env={"env_vars": server.environment},
            ),
        ).fit()
        assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == [
            {"model": "first"},
            {"model": "second"},
        ]
