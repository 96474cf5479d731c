"""The blocks of seeds/004, written anew: quick start, scaling existing code, checkpointing and fault tolerance."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import powertrain as train
from powertrain import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer

SCRIPTS = Path(__file__).parent / "scripts"


def test_the_quick_start_runs_as_a_plain_script() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "quick_start.py")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = dict(
        line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith(("Final", "Path"))
    )
    frame = Result.from_path(said["Path"]).dataframe(ranks="all")
    assert sorted(zip(frame["rank"], frame["epoch"], strict=True)) == [
        (r, e) for r in range(2) for e in range(10)
    ]
    last = frame[(frame["rank"] == 0) & (frame["epoch"] == 9)]
    assert float(said["Final loss"]) == last["loss"].item()


# --------------------------------------------------------------------------- scale existing PyTorch code


class Numbers(Dataset[torch.Tensor]):
    """Rows that say which they are."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class MyModel(torch.nn.Module):
    """A model whose output is its loss, as the block has it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layer(batch / 64), batch.mean(1, keepdim=True) / 64)


def test_existing_code_scales_with_two_calls() -> None:
    def train_func(config: dict[str, Any]) -> list[float]:
        model: torch.nn.Module = MyModel()
        optimizer = torch.optim.Adam(model.parameters())
        model = train.torch.prepare_model(model)
        dataloader = train.torch.prepare_data_loader(DataLoader(Numbers(), batch_size=8))
        seen: list[float] = []
        for batch in dataloader:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen += batch[:, 0].tolist()
            train.report({"loss": loss.item(), "first": seen[-len(batch)]})
        return seen

    result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2, use_gpu=False)).fit()
    assert len(result.return_value) == 32, "each of two workers takes half of the 64 rows"
    frame = result.dataframe(ranks="all")
    assert set(frame[frame["rank"] == 0]["first"]).isdisjoint(frame[frame["rank"] == 1]["first"])
    assert len(frame) == 8


# --------------------------------------------------------------------------- checkpointing and fault tolerance


def train_with_checkpoints(config: dict[str, Any]) -> dict[str, Any]:
    """Saves into the working directory, which the ranks of a node share."""
    model: torch.nn.Module = MyModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as ckpt_dir:
            state = torch.load(f"{ckpt_dir}/model.pt")
            model.load_state_dict(state["model"])
            start_epoch = state["epoch"]
    else:
        start_epoch = 0
    begun_with = model.state_dict()["layer.weight"].tolist()
    model = train.torch.prepare_model(model)
    for epoch in range(start_epoch, config["epochs"]):
        loss = model(torch.rand(8, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if epoch % 10 == 0:
            torch.save({"model": model.state_dict(), "epoch": epoch}, "model.pt")
            train.report({"loss": loss.item(), "epoch": epoch}, checkpoint=Checkpoint.from_directory("."))
        if epoch == config.get("fail_at") and checkpoint is None:
            train.collective.barrier()  # all ranks' reports are with the run by then
            if train.get_context().get_world_rank() == 1:
                raise RuntimeError("a fault at epoch 25")
    return {"start_epoch": start_epoch, "begun_with": begun_with}


@pytest.fixture
def _in_own_directory(tmp_path: Path) -> Iterator[None]:
    """Undone before the check for what the test left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        yield


def _fit(name: str, **config: Any) -> Result:
    return TorchTrainer(
        train_with_checkpoints,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(name=name, failure_config=FailureConfig(max_failures=1)),
    ).fit()


@pytest.mark.usefixtures("_in_own_directory")
def test_a_failed_worker_goes_on_from_the_last_checkpoint() -> None:
    result = _fit("fault", epochs=40, fail_at=25)
    assert result.return_value["start_epoch"] == 20
    assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0, 10, 20, 20, 30]
    saved_at_twenty = result.best_checkpoints[2][0]
    assert result.return_value["begun_with"] == _weight(saved_at_twenty)
    frame = result.dataframe(ranks="all")
    assert frame[frame["rank"] == 0]["epoch"].tolist() == [0, 10, 20, 20, 30]


@pytest.mark.usefixtures("_in_own_directory")
def test_the_same_name_again_goes_on_from_the_newest_checkpoint() -> None:
    first = _fit("again", epochs=11)
    assert first.return_value["start_epoch"] == 0
    assert first.checkpoint is not None
    saved = _weight(first.checkpoint)
    second = _fit("again", epochs=21)
    assert second.path == first.path
    assert second.return_value["start_epoch"] == 10
    assert second.return_value["begun_with"] == saved


def _weight(checkpoint: Checkpoint) -> Any:
    with checkpoint.as_directory() as directory:
        return torch.load(f"{directory}/model.pt")["model"]["layer.weight"].tolist()
