"""The checkpoint blocks of seeds/001 to 004, written anew: save, keep the best, go on, restore, load the result."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.s3_server import S3Server

import powertrain
import powertrain as train
from powertrain import Checkpoint, CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from powertrain.errors import TrainingFailedError
from powertrain.torch import TorchTrainer, prepare_model

TWO = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def train_one_epoch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> float:
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(epoch))
    optimizer.zero_grad()
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


# --------------------------------------------------------------------------- seeds/001: rank 0 saves

EVAL_LOSSES = (0.9, 0.3, 0.2, 0.8, 0.1, 0.7)


def rank_zero_saves(config: dict[str, Any]) -> list[int]:
    model = prepare_model(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    checkpoint = powertrain.get_checkpoint()
    start_epoch = 0
    if checkpoint:
        with checkpoint.as_directory() as ckpt_dir:
            state = torch.load(os.path.join(ckpt_dir, "model.pt"))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            start_epoch = state["epoch"] + 1

    for epoch in range(start_epoch, config["epochs"]):
        loss = train_one_epoch(model, optimizer, epoch)
        with tempfile.TemporaryDirectory() as tmp:
            checkpoint = None
            if powertrain.get_context().get_world_rank() == 0:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                    os.path.join(tmp, "model.pt"),
                )
                checkpoint = Checkpoint.from_directory(tmp)
            powertrain.report(
                metrics={"loss": loss, "eval_loss": EVAL_LOSSES[epoch], "epoch": epoch}, checkpoint=checkpoint
            )
        if epoch == config.get("fault") and start_epoch == 0:
            powertrain.collective.barrier()  # every rank's report has returned by then
            raise RuntimeError("a fault")
    return list(range(start_epoch, config["epochs"]))


def state_of(checkpoint: Checkpoint | None) -> dict[str, Any]:
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        state: dict[str, Any] = torch.load(os.path.join(directory, "model.pt"), weights_only=True)
    return state


def test_rank_zero_saves_the_best_three_stay_and_a_fault_is_survived(tmp_path: Path) -> None:
    run_config = RunConfig(
        name="my-training-run",
        storage_path=str(tmp_path / "shared-checkpoints"),
        checkpoint_config=CheckpointConfig(
            num_to_keep=3, checkpoint_score_attribute="eval_loss", checkpoint_score_order="min"
        ),
        failure_config=FailureConfig(max_failures=3, fail_fast=False),
        log_to_file=True,
    )
    result = TorchTrainer(
        train_loop_per_worker=rank_zero_saves,
        train_loop_config={"epochs": 6, "fault": 2},
        scaling_config=TWO,
        run_config=run_config,
    ).fit()
    assert result.return_value == [3, 4, 5], "the second attempt begins after what epoch 2 saved"
    kept = [metrics["epoch"] for _, metrics in result.best_checkpoints]
    assert kept == [1, 2, 4, 5], "the three best, and the newest because a restart needs it"
    assert state_of(result.get_best_checkpoint("eval_loss", "min"))["epoch"] == 4
    assert state_of(result.checkpoint)["epoch"] == 5
    assert result.path == str(tmp_path / "shared-checkpoints" / "my-training-run")
    names = [os.path.basename(checkpoint.path) for checkpoint, _ in result.best_checkpoints]
    assert sorted(os.listdir(Path(result.path, "checkpoints"))) == sorted(names), "nothing else lies there"


def test_an_interrupted_run_ends_with_the_same_bits_as_an_uninterrupted_one(tmp_path: Path) -> None:
    states = []
    for name, fault in (("whole", None), ("interrupted", 1)):
        trainer = TorchTrainer(
            rank_zero_saves,
            train_loop_config={"epochs": 4, "fault": fault},
            scaling_config=TWO,
            run_config=RunConfig(
                name=name, storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)
            ),
        )
        states.append(state_of(trainer.fit().checkpoint))
    for part in ("weight", "bias"):
        assert torch.equal(states[0]["model"][part], states[1]["model"][part])
    momenta = [state["optimizer"]["state"] for state in states]
    assert all(
        torch.equal(momenta[0][k]["momentum_buffer"], momenta[1][k]["momentum_buffer"]) for k in momenta[0]
    )


def test_another_run_begins_from_a_checkpoint_of_the_first(tmp_path: Path) -> None:
    first = TorchTrainer(
        rank_zero_saves,
        train_loop_config={"epochs": 2},
        run_config=RunConfig(name="first", storage_path=str(tmp_path)),
    ).fit()
    second = TorchTrainer(
        rank_zero_saves,
        train_loop_config={"epochs": 4},
        run_config=RunConfig(name="second", storage_path=str(tmp_path)),
        resume_from_checkpoint=first.checkpoint,
    ).fit()
    assert second.return_value == [2, 3]
    assert [metrics["epoch"] for _, metrics in second.best_checkpoints] == [2, 3]
    assert [metrics["epoch"] for _, metrics in first.best_checkpoints] == [0, 1]


# --------------------------------------------------------------------------- seeds/002: dicts, S3, restore


@pytest.fixture
def bucket() -> Iterator[str]:
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield "s3://bucket/checkpoints"


def saves_dicts(config: dict[str, Any]) -> list[int]:
    model = prepare_model(build_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    start = 0
    if checkpoint := powertrain.get_checkpoint():
        state = checkpoint.to_dict()
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        train_one_epoch(model, optimizer, epoch)
        powertrain.report(
            {"val_loss": EVAL_LOSSES[epoch], "epoch": epoch},
            checkpoint=Checkpoint.from_dict(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            ),
        )
        if epoch == 2 and start == 0:
            powertrain.collective.barrier()
            raise RuntimeError("the machine is taken away")
    return list(range(start, config["epochs"]))


def interrupted(storage_path: str) -> None:
    trainer = TorchTrainer(
        saves_dicts,
        train_loop_config={"epochs": 6},
        scaling_config=TWO,
        run_config=RunConfig(
            name="experiment",
            storage_path=storage_path,
            checkpoint_config=CheckpointConfig(
                num_to_keep=3, checkpoint_score_attribute="val_loss", checkpoint_score_order="min"
            ),
        ),
    )
    with pytest.raises(TrainingFailedError, match="taken away") as caught:
        trainer.fit()
    partial = caught.value.result
    assert partial.checkpoint.to_dict()["epoch"] == 2


def check_restored(path: str) -> None:
    assert TorchTrainer.can_restore(path)
    trainer = TorchTrainer.restore(path)
    result = trainer.fit()
    assert result.return_value == [3, 4, 5]
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [1, 2, 4, 5]
    best = result.get_best_checkpoint("val_loss", "min")
    assert best is not None
    assert best.to_dict()["epoch"] == 4
    assert set(best.to_dict()["model"]) == {"weight", "bias"}
    frame = result.dataframe(ranks="all")
    assert sorted(frame[frame["rank"] == 0]["epoch"]) == [0, 1, 2, 3, 4, 5]


def test_a_previous_run_is_restored_by_its_path(tmp_path: Path) -> None:
    assert not TorchTrainer.can_restore(str(tmp_path / "experiment"))
    interrupted(str(tmp_path))
    check_restored(str(tmp_path / "experiment"))


def test_a_previous_run_is_restored_from_s3(bucket: str) -> None:
    assert not TorchTrainer.can_restore(f"{bucket}/experiment/")
    interrupted(bucket)
    check_restored(f"{bucket}/experiment/")
    result = Result.from_path(f"{bucket}/experiment/")
    assert result.checkpoint is not None
    assert result.checkpoint.path.startswith(f"{bucket}/experiment/checkpoints/")
    assert result.checkpoint.to_dict()["epoch"] == 5


# --------------------------------------------------------------------------- seeds/003: load the result, go on by name


def save_checkpoint_and_report_metrics(model: torch.nn.Module, metrics: dict[str, float]) -> None:
    with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
        checkpoint = None
        if powertrain.get_context().get_world_rank() == 0:
            torch.save(model.module.state_dict(), os.path.join(temp_checkpoint_dir, "model.pt"))  # type: ignore[union-attr]
            checkpoint = powertrain.Checkpoint.from_directory(temp_checkpoint_dir)
        powertrain.report(metrics, checkpoint=checkpoint)


def reports_per_epoch(config: dict[str, Any]) -> int:
    began_with = powertrain.get_checkpoint()
    model = prepare_model(build_model())
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        metrics = {"loss": train_one_epoch(model, optimizer, epoch), "epoch": epoch}
        save_checkpoint_and_report_metrics(model, metrics)
    return 0 if began_with is None else 1


def test_the_trained_model_is_loaded_from_the_result_and_the_same_name_goes_on(tmp_path: Path) -> None:
    def trainer() -> TorchTrainer:
        return TorchTrainer(
            train_loop_per_worker=reports_per_epoch,
            train_loop_config={"lr": 1e-2, "epochs": 2},
            scaling_config=TWO,
            run_config=RunConfig(
                name="mnist_demo", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=3)
            ),
        )

    result = trainer().fit()
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as ckpt_dir:
        loaded = build_model()
        loaded.load_state_dict(torch.load(os.path.join(ckpt_dir, "model.pt"), map_location="cpu"))
    assert not torch.equal(loaded.weight, build_model().weight), "it has learned something"  # type: ignore[arg-type]
    assert result.return_value == 0
    again = trainer().fit()
    assert again.return_value == 1, "the same name and storage path go on from the newest checkpoint"
    assert len(again.best_checkpoints) == 4


# --------------------------------------------------------------------------- seeds/004: the working directory


def saves_its_working_directory(config: dict[str, Any]) -> tuple[int, list[str]]:
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as ckpt_dir:
            state = torch.load(f"{ckpt_dir}/model.pt")
            model.load_state_dict(state["model"])
            start_epoch = state["epoch"]
    else:
        start_epoch = 0
    model = train.torch.prepare_model(model)
    for epoch in range(start_epoch, 12):
        loss = train_one_epoch(model, optimizer, epoch)
        if epoch % 5 == 0:
            torch.save({"model": model.state_dict(), "epoch": epoch}, "model.pt")
            if train.get_context().get_world_rank() == 0:
                write_more_than_a_model()
            train.report({"loss": loss}, checkpoint=Checkpoint.from_directory("."))
        if epoch == 6 and start_epoch == 0:
            train.collective.barrier()
            raise RuntimeError("a fault")
    return start_epoch, sorted(os.listdir("."))


def write_more_than_a_model() -> None:
    """A hidden file, a copy that has the times of its original, a link to the model, and one to somewhere else."""
    Path(".state").write_text("hidden")
    shutil.copy2(Path(train.get_context().launch_dir, "secret.txt"), "copy.txt")
    for link, target in {"latest.pt": "model.pt", "outside": "/dev/null"}.items():
        if not os.path.lexists(link):
            os.symlink(target, link)


@pytest.fixture
def launch_directory(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "secret.txt").write_text("not part of any checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "launch")
        yield tmp_path / "launch"


@contextmanager
def standard_error_to(path: Path) -> Iterator[None]:
    """As after ``python train.py 2> train.log``, with a script that prints without a pause."""
    before, log, over = os.dup(2), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), threading.Event()

    def print_lines() -> None:
        while not over.wait(0.02):
            os.write(log, b"a line\n")

    printing = threading.Thread(target=print_lines)
    printing.start()
    os.dup2(log, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        over.set()
        printing.join()
        os.close(before)
        os.close(log)


@pytest.mark.parametrize(("workers", "working_dir"), [(1, None), (2, None), (2, "scratch")])
def test_the_working_directory_itself_can_be_reported(
    tmp_path: Path, launch_directory: Path, workers: int, working_dir: str | None, capfd: Any
) -> None:
    trainer = TorchTrainer(
        saves_its_working_directory,
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            storage_path=str(tmp_path / "runs"),
            failure_config=FailureConfig(max_failures=1),
            working_dir=working_dir,
        ),
    )
    with standard_error_to(launch_directory / "train.log"):
        result = trainer.fit()
    assert result.return_value[0] == 5, "the second attempt begins at what epoch 5 saved"
    written = [".state", "copy.txt", "latest.pt", "model.pt"]
    there = [*written, "outside"] if working_dir else [*written, "outside", "secret.txt", "train.log"]
    assert result.return_value[1] == there, "report copies; the directory stays as it is"
    shown = " ".join(capfd.readouterr().out.split())
    assert ("Several ranks report" in shown) == (workers > 1)
    assert shown.count("'outside', because it is a link out of the directory, to '/dev/null'") == 1
    assert "train.log" not in shown
    assert len(result.best_checkpoints) == 4, "epochs 0 and 5, then 5 and 10 after the fault"
    with result.checkpoint.as_directory() as directory:  # type: ignore[union-attr]
        assert torch.load(Path(directory, "model.pt"))["epoch"] == 10
        assert sorted(os.listdir(directory)) == [".powertrain-manifest.json", *written]


def reports_its_home(config: dict[str, Any]) -> None:
    train.report({}, checkpoint=Checkpoint.from_directory(".."))


def test_a_directory_that_contains_the_launch_directory_is_refused(
    tmp_path: Path, launch_directory: Path
) -> None:
    trainer = TorchTrainer(
        reports_its_home,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(storage_path=str(tmp_path.parent / f"{tmp_path.name}-runs")),
    )
    with pytest.raises(TrainingFailedError, match="was launched from"):
        trainer.fit()
