"""Checkpoints of version 0.1, whose manifest is ``MANIFEST.json``: read, gone on from and deleted as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import powertrain
from powertrain import Checkpoint, DataParallelTrainer, Result, RunConfig, ScalingConfig
from powertrain.checkpoint import cleanup
from powertrain.checkpoint import committed as checkpoint_committed
from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.cleanup import discard
from powertrain.checkpoint.commit import commit
from powertrain.checkpoint.committed import checkpoint_of, committed, verify
from powertrain.checkpoint.manifest import ManifestFile
from powertrain.errors import CheckpointError
from powertrain.storage import Storage, open_storage

NEW, OLD = ".powertrain-manifest.json", "MANIFEST.json"


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """A run with one checkpoint, committed by version 0.1."""
    storage = open_storage(tmp_path / "run")
    save(storage, Chain.take_over(storage, 1), "c1", row=1)
    age(tmp_path / "run" / "checkpoints" / "c1")
    return storage


def save(storage: Storage, chain: Chain, name: str, row: int) -> None:
    digest = storage.put_file(f"checkpoints/{name}/model", __file__)
    file = ManifestFile(name="model", size=digest.size, xxh3=digest.xxh3, rank=0)
    commit(storage, chain, name=name, row=row, attempt=0, files=[file], metrics={}, world_size=1)


def age(directory: Path) -> None:
    (directory / NEW).rename(directory / OLD)


def test_it_is_committed_and_can_be_read(storage: Storage, tmp_path: Path) -> None:
    (manifest,) = committed(storage)
    verify(storage, manifest)
    checkpoint = checkpoint_of(storage, manifest)
    checkpoint_committed.verify_alone(checkpoint)
    copy = checkpoint.to_directory(tmp_path / "copy")
    assert sorted(path.name for path in Path(copy).iterdir()) == ["model"]


def test_a_start_that_takes_the_run_over_does_not_void_it(storage: Storage) -> None:
    chain = Chain.take_over(storage, 2)
    cleanup.sweep_uncommitted(storage)
    assert [manifest.name for manifest in committed(storage)] == ["c1"]
    assert cleanup.void_names(storage) == []
    with pytest.raises(CheckpointError, match="c1"):
        save(storage, chain, "c1", row=2)
    save(storage, chain, "c2", row=2)
    assert [manifest.name for manifest in committed(storage)] == ["c1", "c2"]


def test_it_is_deleted_and_set_aside_whole(storage: Storage) -> None:
    assert cleanup.set_aside_newer(storage, None) == ["broken/c1-1"]
    assert {entry.key for entry in storage.list("broken")} == {f"broken/c1-1/{OLD}", "broken/c1-1/model"}
    chain = Chain.take_over(storage, 2)
    save(storage, chain, "c3", row=3)
    path = storage.local_path("checkpoints/c3")
    assert path is not None
    age(path)
    discard(storage, "c3")
    assert not path.exists()


def count(config: dict[str, Any]) -> list[str]:
    """Add one to the number in the checkpoint; return what a loop over its files meets."""
    number, names = 0, []
    if checkpoint := powertrain.get_checkpoint():
        with checkpoint.as_directory() as directory:
            number = int(Path(directory, "number").read_text())
            names = sorted(path.name for path in Path(directory).glob("[!.]*"))
    with powertrain.checkpoint_dir() as directory:
        Path(directory, "number").write_text(str(number + 1))
        powertrain.report({"number": number + 1}, Checkpoint(directory))
    return names


def test_a_run_of_it_is_resumed(tmp_path: Path) -> None:
    def fit() -> Result:
        return DataParallelTrainer(
            count,
            train_loop_config={},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name="old", storage_path=str(tmp_path)),
        ).fit()

    first = fit().checkpoint
    assert first is not None
    age(Path(first.path))
    second = fit()
    assert second.metrics == {"number": 2}
    assert second.return_value == [OLD, "number"]
    third = fit()
    assert third.metrics == {"number": 3}
    assert third.return_value == ["number"]
