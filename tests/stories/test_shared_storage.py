"""Runs on storage that another user can write to, who has prepared the run directory."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.other_user import OtherUser

import powertrain as train
from powertrain import Checkpoint, DataParallelTrainer, Result, RunConfig, ScalingConfig
from powertrain.errors import StorageError

NAME = "prepared"


@pytest.fixture
def own_files(tmp_path: Path) -> Path:
    """A directory of the user who trains."""
    directory = tmp_path / "own"
    (directory / "thesis").mkdir(parents=True)
    (directory / "thesis" / "chapter").write_text("private")
    (directory / ".bashrc").write_text("# mine\n")
    return directory


def loop(config: dict[str, Any]) -> None:
    for step in range(3):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state").write_text(str(step))
            train.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))


def fit(storage: Path, **options: Any) -> Result:
    return DataParallelTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=NAME, storage_path=storage, verbose=0, **options),
    ).fit()


def everything_in(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text() if path.is_file() else ""
        for path in sorted(directory.rglob("*"))
    }


def plant(run: str, name: str, target: str, link: Callable[[str, str], None] = os.symlink) -> None:
    path = os.path.join(run, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    link(target, path)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        ".staging",
        ".staging/left",
        "checkpoints",
        "checkpoints/checkpoint_000001",
        "journal",
        "journal/0001-000001.jsonl",
        "metrics",
        "metrics/0001.open",
        "telemetry/0001.open",
        "logs",
        "logs/attempt-0",
        "lease",
        "lease/lock",
        "run.json",
        "trainer.pickle",
    ],
)
def test_a_link_in_a_run_directory_is_refused_and_nothing_behind_it_changes(
    shared_directory: Path, own_files: Path, other_user: OtherUser, name: str, shared: bool
) -> None:
    before = everything_in(own_files)
    target = own_files / (".bashrc" if name.endswith((".jsonl", ".open", "lock", ".json")) else "thesis")
    other_user.run(plant, str(shared_directory / NAME), name, str(target))
    with pytest.raises(StorageError, match="is a symbolic link"):
        fit(shared_directory, shared_storage=shared)
    assert everything_in(own_files) == before


@pytest.mark.smoke
def test_a_run_directory_that_is_a_link_is_refused(
    shared_directory: Path, own_files: Path, other_user: OtherUser
) -> None:
    other_user.run(os.symlink, str(own_files / "thesis"), str(shared_directory / NAME))
    before = everything_in(own_files)
    with pytest.raises(StorageError, match="is a symbolic link"):
        fit(shared_directory, shared_storage=True)
    assert everything_in(own_files) == before


def test_a_run_directory_of_another_user_is_refused_unless_storage_is_shared(
    shared_directory: Path, other_user: OtherUser
) -> None:
    other_user.run(os.mkdir, str(shared_directory / NAME), 0o777)
    with pytest.raises(StorageError, match=f"uid {other_user.uid}.*shared_storage=True"):
        fit(shared_directory)
    assert fit(shared_directory, shared_storage=True).metrics == {"step": 2}


def test_a_part_of_another_user_is_refused(shared_directory: Path, other_user: OtherUser) -> None:
    assert fit(shared_directory).metrics == {"step": 2}
    journal = shared_directory / NAME / "journal"
    journal.chmod(0o777)
    other_user.run(Path.write_text, journal / "0009-000001.jsonl", "{}")
    with pytest.raises(StorageError, match=r"0009-000001\.jsonl.*belongs to another user"):
        fit(shared_directory)


@pytest.mark.parametrize("name", ["journal/0001-000001.jsonl", "metrics/0001.open", "telemetry/0001.open"])
def test_a_file_with_a_second_name_is_not_written_to(
    shared_directory: Path, own_files: Path, other_user: OtherUser, name: str
) -> None:
    before = everything_in(own_files)
    other_user.run(os.mkdir, str(shared_directory / NAME), 0o777)
    path = shared_directory / NAME / name
    other_user.run(os.mkdir, str(path.parent), 0o777)
    try:
        os.link(
            own_files / ".bashrc", path
        )  # as another user may where the kernel does not protect hard links
    except OSError:
        pytest.skip("the temporary directories are on different file systems")
    assert fit(shared_directory, shared_storage=True).metrics == {"step": 2}
    assert everything_in(own_files) == before


def test_checkpoints_are_staged_where_others_cannot_change_them(
    shared_directory: Path, other_user: OtherUser
) -> None:
    from powertrain.run.record import directories
    from powertrain.storage import open_storage

    other_user.run(os.mkdir, str(shared_directory / NAME), 0o777)
    staging = directories.staging_directory(
        open_storage(shared_directory).child(NAME), RunConfig().checkpoint_config, "start"
    )
    assert not Path(staging).is_relative_to(shared_directory)


def test_another_user_can_neither_take_the_lock_nor_read_pickles(
    shared_directory: Path, other_user: OtherUser
) -> None:
    assert fit(shared_directory).metrics == {"step": 2}
    run = shared_directory / NAME
    for name in ("lease/lock", "trainer.pickle"):
        if not (run / name).exists():
            continue  # the inline engine keeps no trainer
        assert stat.S_IMODE((run / name).stat().st_mode) == 0o600
        with pytest.raises(PermissionError):
            other_user.run(os.open, str(run / name), os.O_RDONLY)
