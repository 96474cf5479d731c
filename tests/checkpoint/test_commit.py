from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.checkpoint import commit as cm
from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.checkpoint.commit import (
    checkpoint_of,
    commit,
    committed,
    discard,
    merge,
    name_of_row,
    newest,
    newest_verified,
    set_aside_newer,
    store_part,
    sweep_uncommitted,
    verify,
)
from powertrain.checkpoint.manifest import Manifest
from powertrain.errors import CheckpointError
from powertrain.storage import Storage, open_storage
from powertrain.wire import FilePart, Part


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def directory_with(tmp_path: Path, name: str, files: dict[str, str]) -> Path:
    for file, content in files.items():
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / name


def saved(storage: Storage, tmp_path: Path, row: int, **changes: Any) -> Manifest:
    directory = directory_with(tmp_path, f"user-{row}", {"model.pt": f"weights of {row}"})
    part = store_part(storage, name_of_row(row), directory)
    fields: dict[str, Any] = {"attempt": 0, "metrics": {"loss": 1.0 / row}, "world_size": 1, "lease": 1}
    return commit(storage, name=name_of_row(row), row=row, parts={0: part}, **{**fields, **changes})


def tree(path: str | Path) -> list[str]:
    return sorted(p.relative_to(path).as_posix() for p in Path(path).rglob("*"))


def test_a_checkpoint_exists_only_once_its_manifest_does(storage: Storage, tmp_path: Path) -> None:
    store_part(storage, name_of_row(1), directory_with(tmp_path, "user", {"a": "1"}))
    assert committed(storage) == []
    assert newest(storage) is None
    manifest = saved(storage, tmp_path, 2)
    assert committed(storage) == [manifest]
    assert [file.name for file in manifest.files] == ["model.pt"]
    assert manifest.bytes == len("weights of 2")
    verify(storage, manifest)


def test_subdirectories_empty_directories_and_inner_links_are_stored(
    storage: Storage, tmp_path: Path
) -> None:
    directory = directory_with(tmp_path, "user", {"a": "1", "deep/er/b": "2"})
    (directory / "nothing" / "inside").mkdir(parents=True)
    (directory / "link").symlink_to("deep/er/b")
    (directory / "linked").symlink_to("deep")
    part = store_part(storage, "c", directory)
    manifest = commit(storage, name="c", row=1, attempt=0, parts={0: part}, metrics={}, world_size=1, lease=1)
    verify(storage, manifest)
    path = checkpoint_of(storage, manifest).path
    assert tree(path) == [
        "MANIFEST.json", "a", "deep", "deep/er", "deep/er/b", "link", "linked", "linked/er", "linked/er/b",
        "nothing", "nothing/inside",
    ]  # fmt: skip
    assert Path(path, "link").read_text() == "2"
    assert not Path(path, "link").is_symlink()
    assert "nothing/inside/" in [file.name for file in manifest.files]


def test_the_users_directory_may_go_after_store_part(storage: Storage, tmp_path: Path) -> None:
    directory = directory_with(tmp_path, "user", {"a": "1"})
    part = store_part(storage, "c", directory)
    (directory / "a").write_text("changed")
    (directory / "a").unlink()
    manifest = commit(storage, name="c", row=1, attempt=0, parts={0: part}, metrics={}, world_size=1, lease=1)
    verify(storage, manifest)


def _outside_link(directory: Path) -> None:
    (directory / "x").symlink_to("/etc/hostname")


def _dangling_link(directory: Path) -> None:
    (directory / "x").symlink_to("nowhere")


def _circular_link(directory: Path) -> None:
    (directory / "d").mkdir()
    (directory / "d" / "x").symlink_to("..")


def _pipe(directory: Path) -> None:
    os.mkfifo(directory / "x")


def _users_manifest(directory: Path) -> None:
    (directory / "MANIFEST.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_outside_link, "leads out of it"),
        (_dangling_link, "leads nowhere"),
        (_circular_link, r"leads out of it|leads back"),
        (_pipe, "no ordinary file"),
        (_users_manifest, "Give that file another name"),
    ],
)
def test_what_cannot_be_a_checkpoint_is_refused_before_anything_is_stored(
    storage: Storage, tmp_path: Path, spoil: Any, says: str
) -> None:
    directory = directory_with(tmp_path, "user", {"a": "1"})
    spoil(directory)
    with pytest.raises(CheckpointError, match=says):
        store_part(storage, "c", directory)
    assert storage.list() == []


def test_a_file_an_absent_and_an_empty_directory_are_refused(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, says in (("empty", "is empty"), ("file", "is a file"), ("absent", "does not exist")):
        with pytest.raises(CheckpointError, match=says):
            store_part(storage, "c", tmp_path / name)


def test_a_directory_that_contains_the_runs_storage_is_refused(storage: Storage, tmp_path: Path) -> None:
    saved(storage, tmp_path, 1)
    for directory in (tmp_path, Path(storage.uri)):
        with pytest.raises(CheckpointError, match="contains the run's own storage"):
            store_part(storage, "c", directory)


def test_a_committed_checkpoint_can_be_reported_again(storage: Storage, tmp_path: Path) -> None:
    first = saved(storage, tmp_path, 1)
    part = store_part(storage, name_of_row(2), checkpoint_of(storage, first).path)
    second = commit(
        storage, name=name_of_row(2), row=2, attempt=0, parts={0: part}, metrics={}, world_size=1, lease=1
    )
    assert [(f.name, f.xxh3) for f in second.files] == [(f.name, f.xxh3) for f in first.files]
    verify(storage, second)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_ranks_with_one_name_the_lower_is_kept_whoever_came_first(
    storage: Storage, tmp_path: Path, order: tuple[int, int]
) -> None:
    parts = {}
    for rank in order:
        files = {"model.pt": f"of rank {rank}", "same": "same", f"only-{rank}": "x"}
        parts[rank] = store_part(storage, "c", directory_with(tmp_path, f"user-{rank}", files))
    told: list[str] = []
    manifest = commit(
        storage, name="c", row=1, attempt=0, parts=parts, metrics={}, world_size=2, lease=1, tell=told.append
    )
    path = checkpoint_of(storage, manifest).path
    assert Path(path, "model.pt").read_text() == "of rank 0"
    assert tree(path) == ["MANIFEST.json", "model.pt", "only-0", "only-1", "same"]
    assert {file.name: file.rank for file in manifest.files}["only-1"] == 1
    assert len(told) == 1
    assert "'model.pt'" in told[0]
    verify(storage, manifest)


def test_leftovers_of_an_earlier_try_do_not_get_into_the_checkpoint(storage: Storage, tmp_path: Path) -> None:
    store_part(storage, "c", directory_with(tmp_path, "before", {"model.pt": "stale", "stale": "x"}))
    part = store_part(storage, "c", directory_with(tmp_path, "now", {"model.pt": "fresh"}))
    manifest = commit(storage, name="c", row=1, attempt=1, parts={0: part}, metrics={}, world_size=1, lease=1)
    verify(storage, manifest)
    assert [entry.key for entry in storage.list()] == [
        "checkpoints/c/MANIFEST.json",
        "checkpoints/c/model.pt",
    ]


def test_a_latecomer_cannot_change_a_committed_checkpoint(storage: Storage, tmp_path: Path) -> None:
    manifest = saved(storage, tmp_path, 1)
    late = store_part(storage, name_of_row(1), directory_with(tmp_path, "late", {"model.pt": "other"}))
    verify(storage, manifest)
    with pytest.raises(CheckpointError, match="committed already"):
        commit(
            storage, name=name_of_row(1), row=1, attempt=9, parts={0: late}, metrics={}, world_size=1, lease=9
        )
    verify(storage, manifest)
    assert committed(storage) == [manifest]


def test_a_commit_whose_files_are_gone_or_that_has_none_is_refused(storage: Storage, tmp_path: Path) -> None:
    part = store_part(storage, "c", directory_with(tmp_path, "user", {"a": "1", "b": "2"}))
    storage.delete("checkpoints/c/b")
    for parts, says in (({0: part}, "'b' of rank 0 is not whole"), ({}, "no rank brought a file")):
        with pytest.raises(CheckpointError, match=says):
            commit(storage, name="c", row=1, attempt=0, parts=parts, metrics={}, world_size=1, lease=1)
    assert committed(storage) == []


def test_metadata_travels_along_and_may_change_after_the_commit(storage: Storage, tmp_path: Path) -> None:
    parts = {}
    for rank in (1, 0):
        directory = directory_with(tmp_path, f"user-{rank}", {f"file-{rank}": "x"})
        Checkpoint(directory).set_metadata({"rank": rank, f"from-{rank}": True})
        parts[rank] = store_part(storage, "c", directory)
    manifest = commit(storage, name="c", row=1, attempt=0, parts=parts, metrics={}, world_size=2, lease=1)
    assert manifest.metadata == {"rank": 0, "from-0": True, "from-1": True}
    checkpoint = checkpoint_of(storage, manifest)
    assert checkpoint.get_metadata() == manifest.metadata
    checkpoint.update_metadata({"note": "later"})
    verify(storage, manifest)


def test_commits_are_ordered_by_lease_attempt_and_row_not_by_clock(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([9.0, 8.0, 7.0])
    with monkeypatch.context() as patch:
        patch.setattr(cm.time, "time", lambda: next(clock))
        saved(storage, tmp_path, 5, lease=2, attempt=3)
        saved(storage, tmp_path, 9, lease=1, attempt=0)
        saved(storage, tmp_path, 6, lease=2, attempt=3)
    assert [manifest.row for manifest in committed(storage)] == [9, 5, 6]
    last = newest(storage)
    assert last is not None
    assert last.row == 6


def damage_flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_flip, "other content"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes"),
        (lambda path: path.unlink(), "cannot be read"),
    ],
)
def test_damage_is_found_and_the_one_before_is_used_loudly(
    storage: Storage, tmp_path: Path, damage: Any, says: str
) -> None:
    good, bad = saved(storage, tmp_path, 1), saved(storage, tmp_path, 2)
    damage(Path(checkpoint_of(storage, bad).path, "model.pt"))
    with pytest.raises(CheckpointError, match=says):
        verify(storage, bad)
    told: list[str] = []
    assert newest_verified(storage, told.append) == good
    assert len(told) == 1
    assert "checkpoint_000002" in told[0]
    assert "model.pt" in told[0]


def test_a_damaged_manifest_is_told_and_its_files_are_never_swept(storage: Storage, tmp_path: Path) -> None:
    good = saved(storage, tmp_path, 1)
    saved(storage, tmp_path, 2)
    storage.put("checkpoints/checkpoint_000002/MANIFEST.json", b'{"schema": 1, "na')
    told: list[str] = []
    assert newest_verified(storage, told.append) == good
    assert "checkpoint_000002" in told[0]
    assert sweep_uncommitted(storage) == []


def test_without_damage_nothing_is_told_and_nothing_is_set_aside(storage: Storage, tmp_path: Path) -> None:
    manifests = [saved(storage, tmp_path, row) for row in (1, 2)]
    told: list[str] = []
    assert newest_verified(storage, told.append) == manifests[-1]
    assert told == []
    assert set_aside_newer(storage, manifests[-1]) == []
    assert committed(storage) == manifests


def test_after_falling_back_the_same_row_can_be_committed_again(storage: Storage, tmp_path: Path) -> None:
    good, bad = saved(storage, tmp_path, 1), saved(storage, tmp_path, 2)
    damage_flip(Path(checkpoint_of(storage, bad).path, "model.pt"))
    assert set_aside_newer(storage, good) == ["broken/checkpoint_000002-1"]
    assert committed(storage) == [good]
    again = saved(storage, tmp_path, 2, attempt=1)
    verify(storage, again)
    assert set_aside_newer(storage, None) == ["broken/checkpoint_000001-1", "broken/checkpoint_000002-2"]
    assert storage.get("broken/checkpoint_000002-2/model.pt") == b"weights of 2"


def test_discard_takes_the_manifest_first(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(storage, tmp_path, 1)

    def cut_short(self: Storage, prefix: str) -> None:
        raise OSError("cut short")

    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "delete_tree", cut_short)
        with pytest.raises(OSError, match="cut short"):
            discard(storage, name_of_row(1))
    assert committed(storage) == []
    assert sweep_uncommitted(storage) == [name_of_row(1)]
    assert storage.list() == []


def test_sweep_removes_only_what_is_uncommitted(storage: Storage, tmp_path: Path) -> None:
    kept = saved(storage, tmp_path, 1)
    store_part(storage, name_of_row(2), directory_with(tmp_path, "half", {"a": "1"}))
    assert sweep_uncommitted(storage) == [name_of_row(2)]
    assert committed(storage) == [kept]
    verify(storage, kept)


hashes = st.sampled_from(["aa", "bb", "cc"])
parts_of_ranks = st.dictionaries(
    st.integers(0, 5), st.dictionaries(st.sampled_from(["x", "y", "d/z"]), hashes), min_size=1
)


@given(parts_of_ranks)
def test_merging_keeps_each_name_once_from_its_lowest_rank(ranks: dict[int, dict[str, str]]) -> None:
    parts = {
        rank: Part(checkpoint="c", files=[FilePart(name=name, size=1, xxh3=h) for name, h in files.items()])
        for rank, files in ranks.items()
    }
    merged = merge(parts)
    lowest = {name: min(r for r in ranks if name in ranks[r]) for files in ranks.values() for name in files}
    assert {file.name: file.rank for file in merged.files} == lowest
    assert len(merged.files) == len(lowest)
    different = sum(h != ranks[lowest[name]][name] for files in ranks.values() for name, h in files.items())
    assert len(merged.clashes) == different
    assert all(file.xxh3 == ranks[file.rank][file.name] for file in merged.files)


def test_a_part_whose_name_climbs_out_is_refused() -> None:
    part = Part(checkpoint="c", files=[FilePart(name="../../x", size=1, xxh3="aa")])
    with pytest.raises(CheckpointError, match="leads out"):
        merge({0: part})
