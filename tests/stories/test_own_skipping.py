"""Loops that save the number of their batch and skip by it after a restart, as they must where data begin again."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import powertrain
from powertrain import Checkpoint, DataConfig, FailureConfig
from powertrain.torch import TorchTrainer, prepare_data_loader, prepare_model

ROWS, BATCH = 40, 4
BATCHES, SAVED_AT = ROWS // BATCH, 5


def batches_of(config: dict[str, Any]) -> Any:
    """Something to iterate over once for each epoch, in an order that is the same after a restart."""
    if config["reads"] == "a dataset":
        return powertrain.get_dataset_shard("train").iter_torch_batches(
            batch_size=BATCH, dtypes=torch.float32
        )
    loader = DataLoader(TensorDataset(torch.arange(ROWS, dtype=torch.float32)), batch_size=BATCH)
    return prepare_data_loader(loader, resume=config["resume"])


def ids_in(batch: Any) -> torch.Tensor:
    ids: torch.Tensor = batch["id"] if isinstance(batch, dict) else batch[0]
    return ids


def skip_by_hand(config: dict[str, Any]) -> None:
    """Trains two epochs, saves in the first one, and fails two batches later."""
    start_epoch, start_batch = 0, -1
    restarted = (checkpoint := powertrain.get_checkpoint()) is not None
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            start_epoch, start_batch = json.loads(Path(directory, "place.json").read_text())
    model: Any = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batches = batches_of(config)
    for epoch in range(start_epoch, 2):
        for number, batch in enumerate(batches):
            if config["skips"] and epoch == start_epoch and number <= start_batch:
                continue
            ids = ids_in(batch)
            model(ids.reshape(-1, 1)).sum().backward()
            optimizer.step()
            with open(config["diary"], "a") as diary:
                diary.writelines(f"{int(restarted)} {epoch} {int(id)}\n" for id in ids)
            if epoch == 0 and not restarted and number == SAVED_AT:
                save(epoch, number)
            if epoch == 0 and not restarted and number == SAVED_AT + 2:
                raise RuntimeError("fails after its checkpoint")


def save(epoch: int, number: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "place.json").write_text(json.dumps([epoch, number]))
        checkpoint = Checkpoint.from_directory(directory)
        powertrain.report({"epoch": epoch}, checkpoint=checkpoint, checkpoint_upload_mode="SYNC")


@pytest.fixture(params=["a dataset", "a loader"])
def reads(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def play(fits: Any, reads: str) -> Any:
    def play(*, skips: bool, resume: Any) -> dict[str, Any]:
        config = {"reads": reads, "skips": skips, "resume": resume, "diary": str(fits.directory / "diary")}
        data = [{"id": float(number)} for number in range(ROWS)]
        outcome: dict[str, Any] = fits.outcome(
            skip_by_hand,
            kind=TorchTrainer,
            workers=1,
            train_loop_config=config,
            datasets={"train": powertrain.data.from_items(data)} if reads == "a dataset" else None,
            dataset_config=DataConfig(resume=resume or "batch"),
            failure_config=FailureConfig(max_failures=1),
        )
        return outcome

    return play


def trained_in(directory: Path) -> Iterator[tuple[bool, int, int]]:
    for line in (directory / "diary").read_text().splitlines():
        restarted, epoch, id = map(int, line.split())
        yield bool(restarted), epoch, id


def test_a_loop_that_skips_what_was_skipped_for_it_is_stopped_with_the_remedy(
    play: Any, fits: Any, reads: str
) -> None:
    outcome = play(skips=True, resume=None)

    assert outcome["raised"] == "TrainingFailedError"
    assert f"resumed at batch {SAVED_AT + 1} of {BATCHES}" in outcome["message"]
    assert "resume='epoch'" in outcome["message"]
    assert not [row for row in trained_in(fits.directory) if row[0]], "nothing was trained on the wrong rows"


def test_a_loop_that_skips_nothing_gets_its_position_and_sees_each_row_once(
    play: Any, fits: Any, reads: str, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = play(skips=False, resume=None)

    assert outcome["raised"] == "", outcome.get("message")
    name = "train" if reads == "a dataset" else "loader"
    told = f"data: resuming epoch 0 of {name!r} at batch {SAVED_AT + 1} of {BATCHES}; batches already consumed are"
    assert capfd.readouterr().out.count(told) == 1
    check_each_row_once(fits.directory)


def test_a_loop_that_skips_by_hand_sees_each_row_once_where_epochs_begin_again(
    play: Any, fits: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = play(skips=True, resume="epoch")

    assert outcome["raised"] == "", outcome.get("message")
    assert "data: resuming" not in capfd.readouterr().out
    check_each_row_once(fits.directory)


def check_each_row_once(directory: Path) -> None:
    """Rows up to the checkpoint count, and those of the attempt that went on from it."""
    saved = (SAVED_AT + 1) * BATCH
    rows = list(trained_in(directory))
    counted = [row for row in rows if not row[0]][:saved] + [row for row in rows if row[0]]
    for epoch in (0, 1):
        assert sorted(id for _, of, id in counted if of == epoch) == list(range(ROWS))
