"""The blocks of seeds/001, written anew: local mode, the checkpointing loop, all configs together."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import powertrain
from powertrain import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
)
from powertrain.torch import TorchConfig, TorchTrainer


def train_and_save_from_rank_zero(config: dict[str, Any]) -> tuple[int, int]:
    """Resumes if it can, saves from rank 0 in a temporary directory, reports from every rank."""
    model: torch.nn.Module = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint = powertrain.get_checkpoint()
    start_epoch = 0
    if checkpoint:
        with checkpoint.as_directory() as ckpt_dir:
            state = torch.load(os.path.join(ckpt_dir, "model.pt"))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            start_epoch = state["epoch"] + 1
    model = powertrain.torch.prepare_model(model)
    print("begins at epoch", start_epoch)
    for epoch in range(start_epoch, config["epochs"]):
        loss = model(torch.rand(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as tmp:
            checkpoint = None
            if powertrain.get_context().get_world_rank() == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(tmp, "model.pt"))
                checkpoint = Checkpoint.from_directory(tmp)
            powertrain.report(metrics={"loss": loss.item(), "epoch": epoch}, checkpoint=checkpoint)
        if epoch == config.get("fault_after") and start_epoch == 0:
            powertrain.collective.barrier()  # all ranks' reports are with the run by then
            raise RuntimeError("a fault")
    return start_epoch, os.getpid()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_checkpointing_loop_resumes_after_a_fault(num_workers: int) -> None:
    result = TorchTrainer(
        train_and_save_from_rank_zero,
        train_loop_config={"epochs": 4, "fault_after": 1},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3, fail_fast=False)),
    ).fit()
    start_epoch, pid = result.return_value
    assert start_epoch == 2
    assert (pid == os.getpid()) == (num_workers == 0), (
        "local mode trains in the calling process, others do not"
    )
    assert result.metrics is not None
    assert result.metrics["epoch"] == 3
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as directory:
        assert os.listdir(directory).count("model.pt") == 1
        assert torch.load(os.path.join(directory, "model.pt"))["epoch"] == 3


def test_an_error_in_local_mode_leads_to_the_users_own_exception(capsys: pytest.CaptureFixture[str]) -> None:
    def train_func() -> None:
        raise LookupError("no such batch")

    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    )
    with pytest.raises(TrainingFailedError, match="no such batch") as caught:
        trainer.fit()
    assert isinstance(caught.value.__cause__, LookupError)
    said = str(caught.value) + capsys.readouterr().out
    assert "the run continues" in said
    assert "is kept in" not in said, "the output stayed here, no log was written"


def test_local_mode_leaves_the_process_as_it_was() -> None:
    """Afterwards the same function trains with workers, and the other way round, without a change."""
    for num_workers in (0, 2, 0):
        result = TorchTrainer(
            train_loop_per_worker=train_and_save_from_rank_zero,
            train_loop_config={"epochs": 1},
            scaling_config=ScalingConfig(num_workers=num_workers),
        ).fit()
        assert result.metrics is not None
        assert result.metrics["epoch"] == 0
        assert not torch.distributed.is_initialized()


def test_every_config_of_the_seed_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = TorchTrainer(
        train_loop_per_worker=train_and_save_from_rank_zero,
        train_loop_config={"epochs": 5},
        scaling_config=ScalingConfig(
            num_workers=2,
            use_gpu=False,
            resources_per_worker={"CPU": 0.5},
            placement_strategy="PACK",
            trainer_resources={"CPU": 0},
        ),
        run_config=RunConfig(
            name="my-training-run",
            storage_path=str(tmp_path),
            checkpoint_config=CheckpointConfig(
                num_to_keep=3, checkpoint_score_attribute="loss", checkpoint_score_order="min"
            ),
            failure_config=FailureConfig(max_failures=3, fail_fast=False),
            log_to_file=True,
        ),
        torch_config=TorchConfig(backend="gloo", timeout_s=3600),
    )
    result = trainer.fit()
    assert result.path == str(tmp_path / "my-training-run")
    assert len(result.best_checkpoints) in (3, 4)  # the newest is kept even where it is not among the best
    logs = sorted((tmp_path / "my-training-run" / "logs").rglob("*.log"))
    assert [log.read_text() for log in logs] == ["begins at epoch 0\n"] * 2
    assert "begins at epoch" not in capsys.readouterr().out, "log_to_file=True keeps it out of the terminal"


def test_resume_from_checkpoint_starts_a_new_run_from_an_old_state() -> None:
    first = TorchTrainer(
        train_and_save_from_rank_zero,
        train_loop_config={"epochs": 2},
        scaling_config=ScalingConfig(num_workers=0),
    ).fit()
    second = TorchTrainer(
        train_and_save_from_rank_zero,
        train_loop_config={"epochs": 3},
        scaling_config=ScalingConfig(num_workers=0),
        resume_from_checkpoint=first.checkpoint,
    ).fit()
    assert second.path != first.path
    assert second.return_value[0] == 2
