"""Where a run keeps what is not in its storage yet, and what of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from powertrain.config.checkpoint import CheckpointConfig
from powertrain.config.data import DataConfig
from powertrain.run.record import directories
from powertrain.storage import open_storage
from powertrain.storage.files import private_roots


def test_each_start_waits_in_a_directory_of_its_own_beside_local_storage(tmp_path: Path) -> None:
    storage, config = open_storage(tmp_path), CheckpointConfig()
    first = directories.staging_directory(storage, config, "run-1")
    assert first != directories.staging_directory(storage, config, "run-2")
    assert Path(first).is_relative_to(tmp_path)


def test_a_directory_that_was_asked_for_is_used(tmp_path: Path) -> None:
    config = CheckpointConfig(staging_dir=tmp_path / "fast")
    staging = directories.staging_directory(open_storage(tmp_path), config, "run-1")
    assert Path(staging).parent == tmp_path / "fast"


def test_leftovers_of_a_killed_start_are_swept_but_not_files_that_the_user_knows(tmp_path: Path) -> None:
    storage, config = open_storage(tmp_path), CheckpointConfig()
    killed = Path(directories.staging_directory(storage, config, "killed"), "attempt-0")
    told = Path(directories.staging_directory(storage, config, "told"), "attempt-0")
    for directory in (killed, told):
        directory.mkdir(parents=True)
    directories.remove_unless_needed(str(told.parent), [str(told)])
    assert directories.sweep_staging(storage) == [str(told.parent)]
    assert told.exists()
    assert not killed.parent.exists()


def test_at_a_good_end_nothing_stays(tmp_path: Path) -> None:
    staging = Path(directories.staging_directory(open_storage(tmp_path), CheckpointConfig(), "run-1"))
    (staging / "attempt-0").mkdir(parents=True)
    directories.remove_unless_needed(str(staging), [])
    assert list(tmp_path.iterdir()) == []


def test_the_spool_of_a_run_is_the_same_at_every_start(tmp_path: Path) -> None:
    one, other = open_storage(tmp_path / "a"), open_storage(tmp_path / "b")
    assert directories.spool_directory(one) == directories.spool_directory(open_storage(tmp_path / "a"))
    assert directories.spool_directory(one) != directories.spool_directory(other)


def test_blocks_of_data_of_each_start_lie_beside_those_of_the_same_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_roots, "_LASTING", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    run, other = open_storage(tmp_path / "a"), open_storage(tmp_path / "b")
    killed = Path(directories.data_cache_directory(run, DataConfig(), "killed"))
    mine = Path(directories.data_cache_directory(run, DataConfig(), "mine"))
    theirs = Path(directories.data_cache_directory(other, DataConfig(), "mine"))
    for directory in (killed, mine, theirs):
        (directory / "blocks").mkdir(parents=True)
    directories.sweep_data_caches(str(mine))
    assert (killed.exists(), mine.exists(), theirs.exists()) == (False, True, True)
    directories.remove_data_cache(str(mine))
    assert theirs.exists()
    assert not mine.parent.exists()
    directories.remove_data_cache(str(theirs))
    assert list((tmp_path / "node").iterdir()) == []


def test_a_directory_for_blocks_that_was_asked_for_is_used_and_stays(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    config = DataConfig(cache_dir=tmp_path / "data")
    blocks = Path(directories.data_cache_directory(open_storage(tmp_path / "a"), config, "mine"))
    assert blocks.is_relative_to(tmp_path / "data")
    (blocks / "blocks").mkdir(parents=True)
    directories.remove_data_cache(str(blocks))
    assert list((tmp_path / "data").iterdir()) == []
    directories.remove_data_cache("")  # a run without data has none
