"""Staging: a reported directory becomes ours by rename or copy, and what a killed rank reported can be found."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from powertrain.checkpoint.staging import Staging, give_back, sealed_reports, source_of
from powertrain.errors import CheckpointError
from powertrain.storage import boundaries
from powertrain.wire.values import CheckpointPart, Point


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path / "staging")


def fill(directory: str | Path, **files: str) -> str:
    os.makedirs(directory, exist_ok=True)
    for name, content in files.items():
        Path(directory, name).write_text(content)
    return str(directory)


def point(row: int, part: CheckpointPart) -> Point:
    return Point(row=row, at=1.0, metrics={"loss": 0.5}, part=part)


def test_a_directory_of_the_users_is_copied_and_may_be_changed_at_once(root: str, tmp_path: Path) -> None:
    own = fill(tmp_path / "own", weights="1", other="2")
    (tmp_path / "own" / "empty").mkdir()
    part = Staging(root, 0, 0).stage(1, own)
    fill(own, weights="changed")
    assert source_of(part.staged, "weights").read_text() == "1"
    assert [(file.name, file.size) for file in part.files] == [("other", 1), ("weights", 1), ("empty/", 0)]
    assert source_of(part.staged, "empty").is_dir()


def test_other_users_cannot_read_what_is_staged(root: str, tmp_path: Path) -> None:
    Staging(root, 0, 0).stage(1, fill(tmp_path / "own", weights="1"))
    assert os.stat(root).st_mode & 0o777 == 0o700


def test_a_checkpoint_dir_is_renamed(root: str) -> None:
    staging = Staging(root, 0, 0)
    own = staging.new_directory()
    fill(own, weights="1")
    inode = os.stat(os.path.join(own, "weights")).st_ino
    part = staging.stage(1, own)
    assert not os.path.exists(own)
    assert source_of(part.staged, "weights").stat().st_ino == inode


def test_a_checkpoint_dir_that_is_not_reported_goes_with_its_context(root: str) -> None:
    with Staging(root, 0, 0).new_directory() as own:
        fill(own, weights="1")
    assert not os.path.exists(own)


def test_a_directory_that_may_be_taken_is_moved(root: str, tmp_path: Path) -> None:
    own = fill(tmp_path / "own", weights="1")
    inode = os.stat(os.path.join(own, "weights")).st_ino
    part = Staging(root, 0, 0).stage(1, own, take=True)
    assert source_of(part.staged, "weights").stat().st_ino == inode
    assert not os.path.exists(own)


def test_a_share_is_given_back_beside_a_directory_that_was_made_again(root: str, tmp_path: Path) -> None:
    directory = tmp_path / "mine"
    staged = Staging(root, 0, 0).stage(1, fill(directory, file="old"), take=True).staged
    fill(directory, file="new")
    assert give_back(staged, str(directory)) == f"{directory}.unsaved-1"
    assert (directory / "file").read_text() == "new"
    assert (tmp_path / "mine.unsaved-1" / "file").read_text() == "old"
    assert give_back(staged, str(directory)) == "", "it is gone from the staging area"


def test_a_directory_with_a_link_inside_is_copied_even_if_it_may_be_taken(root: str, tmp_path: Path) -> None:
    own = fill(tmp_path / "own", weights="1")
    os.symlink("weights", os.path.join(own, "latest"))
    part = Staging(root, 0, 0).stage(1, own, take=True)
    assert source_of(part.staged, "latest").read_text() == "1"
    assert not source_of(part.staged, "latest").is_symlink()
    assert not os.path.exists(own)


def test_what_cannot_be_a_checkpoint_is_refused_and_nothing_is_staged(root: str, tmp_path: Path) -> None:
    own = fill(tmp_path / "own", weights="1")
    os.mkfifo(Path(own, "pipe"))
    with pytest.raises(CheckpointError, match="not a regular file"):
        Staging(root, 0, 0).stage(1, own)
    assert not list(Path(root).glob("*/*/row-*"))


def test_an_empty_directory_is_a_share_without_files(root: str, tmp_path: Path) -> None:
    staging = Staging(root, 0, 0)
    part = staging.stage(1, fill(tmp_path / "own"))
    assert part.files == []
    staging.seal(point(1, part))
    assert sealed_reports(root, 0, 0) == {1: point(1, part)}


def test_a_report_counts_once_it_is_sealed(root: str, tmp_path: Path) -> None:
    staging = Staging(root, 0, 3)
    part = staging.stage(7, fill(tmp_path / "own", weights="1"))
    assert sealed_reports(root, 0, 3) == {}
    staging.seal(point(7, part))
    assert sealed_reports(root, 0, 3) == {7: point(7, part)}
    assert sealed_reports(root, 0, 2) == {}


def test_a_full_disk_leaves_nothing_of_the_share_and_the_directory_as_it_was(
    root: str, tmp_path: Path
) -> None:
    own = fill(tmp_path / "own", weights="1")

    def full(kind: str, target: str) -> None:
        if kind == "write":
            raise OSError(28, "No space left on device")

    boundaries.install(full)
    try:
        with pytest.raises(OSError, match="No space"):
            Staging(root, 0, 0).stage(1, own)
    finally:
        boundaries.install(None)
    assert not list(Path(root).glob("*/*/row-*"))
    assert Path(own, "weights").read_text() == "1"


def test_beyond_the_limit_it_waits_until_an_older_one_has_left(root: str, tmp_path: Path) -> None:
    asked = threading.Event()
    staging = Staging(root, 0, 0, limit=10, full=lambda row, needed, limit: asked.set())
    staging.stage(1, fill(tmp_path / "own", weights="12345678"))
    second = threading.Thread(target=staging.stage, args=(2, str(tmp_path / "own")))
    second.start()
    assert asked.wait(5)
    assert second.is_alive()
    assert not list(Path(root).glob("*/*/row-00000002"))
    staging.free_share(1)
    second.join(5)
    assert list(Path(root).glob("*/*/row-00000002"))


def test_a_single_share_larger_than_the_limit_is_allowed(root: str, tmp_path: Path) -> None:
    Staging(root, 0, 0, limit=1).stage(1, fill(tmp_path / "own", weights="12345678"))


def test_the_limit_is_divided_among_the_ranks_of_a_node(root: str, tmp_path: Path) -> None:
    asked: list[tuple[int, ...]] = []

    def full(*a: int) -> None:
        asked.append(a)
        staging.free_share(1)

    staging = Staging(root, 0, 0, limit=20, shared_by=2, full=full)
    staging.stage(1, fill(tmp_path / "own", weights="12345678"))
    staging.stage(2, str(tmp_path / "own"))
    assert asked == [(2, 8, 10)]


def test_a_thread_that_waits_for_room_is_let_go_when_the_run_ends(root: str, tmp_path: Path) -> None:
    asked = threading.Event()
    staging = Staging(root, 0, 0, limit=10, full=lambda *_: asked.set())
    staging.stage(1, fill(tmp_path / "own", weights="12345678"))
    second = threading.Thread(target=staging.stage, args=(2, str(tmp_path / "own")))
    second.start()
    assert asked.wait(5)
    staging.close()
    second.join(5)
    assert not second.is_alive()
