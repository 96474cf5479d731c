from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint import retention
from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.checkpoint import Checkpoint, ReportedCheckpointStatus
from powertrain.checkpoint.cleanup import discard, set_aside_newer, sweep_uncommitted
from powertrain.checkpoint.commit import Merged, commit, merge, merge_when_complete
from powertrain.checkpoint.committed import (
    checkpoint_of,
    committed,
    newest,
    newest_verified,
    record_validation,
    reported,
    validations,
    verify,
    with_validations,
)
from powertrain.checkpoint.contents import contents, name_of_row, refuse_directory
from powertrain.checkpoint.elsewhere import mark
from powertrain.checkpoint.listing import PlaceListings
from powertrain.checkpoint.manifest import Manifest, ManifestFile, Validation
from powertrain.errors import CheckpointError
from powertrain.storage import Storage, open_storage
from powertrain.wire.values import CheckpointPart, FilePart


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def directory_with(tmp_path: Path, name: str, files: dict[str, str]) -> Path:
    for file, content in files.items():
        path = tmp_path / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / name


def stored(storage: Storage, name: str, directories: dict[int, Path]) -> Merged:
    """Upload the files of these ranks to storage, as an uploader does; returns them with their hashes."""
    parts = {}
    for rank, directory in directories.items():
        files, empty = contents(directory)
        found = [FilePart(name=n, size=path.stat().st_size) for n, path in files]
        found += [FilePart(name=f"{n}/", size=0) for n in empty]
        parts[rank] = CheckpointPart(
            checkpoint=name, files=found, metadata=Checkpoint(directory).get_metadata()
        )
    merged = merge(parts)
    for number, file in enumerate(merged.files):
        if not file.name.endswith("/"):
            digest = storage.put_file(f"checkpoints/{name}/{file.name}", directories[file.rank] / file.name)
            merged.files[number] = ManifestFile(
                name=file.name, size=digest.size, xxh3=digest.xxh3, rank=file.rank
            )
    return merged


def chain_of(storage: Storage, lease: int = 1) -> Chain:
    return Chain.take_over(storage, lease)


def committed_from(storage: Storage, chain: Chain, name: str, *directories: Path, **changes: Any) -> Manifest:
    merged = stored(storage, name, dict(enumerate(directories)))
    fields: dict[str, Any] = {
        "row": 1, "attempt": 0, "metrics": {}, "world_size": len(directories), "metadata": merged.metadata,
        "files": merged.files,
    }  # fmt: skip
    return commit(storage, chain, name=name, **{**fields, **changes})


def saved(storage: Storage, tmp_path: Path, row: int, chain: Chain | None = None, **changes: Any) -> Manifest:
    directory = directory_with(tmp_path, f"user-{row}", {"model.pt": f"weights of {row}"})
    fields: dict[str, Any] = {"row": row, "metrics": {"loss": 1.0 / row}}
    chain = chain or chain_of(storage)
    return committed_from(storage, chain, name_of_row(row), directory, **{**fields, **changes})


def tree(path: str | Path) -> list[str]:
    return sorted(p.relative_to(path).as_posix() for p in Path(path).rglob("*"))


def test_a_checkpoint_exists_only_once_its_manifest_does(storage: Storage, tmp_path: Path) -> None:
    stored(storage, name_of_row(1), {0: directory_with(tmp_path, "user", {"a": "1"})})
    assert committed(storage) == []
    assert newest(storage) is None
    manifest = saved(storage, tmp_path, 2)
    assert committed(storage) == [manifest]
    assert [file.name for file in manifest.files] == ["model.pt"]
    assert manifest.bytes == len("weights of 2")
    verify(storage, manifest)


def test_names_carry_a_tag_only_where_there_is_one() -> None:
    assert name_of_row(12) == "checkpoint_000012"
    assert name_of_row(12, "7") == "checkpoint_000012-7"


# --------------------------------------------------------------------------- what a rank reports


def test_subdirectories_empty_directories_and_inner_links_are_stored(
    storage: Storage, tmp_path: Path
) -> None:
    directory = directory_with(tmp_path, "user", {"a": "1", "deep/er/b": "2"})
    (directory / "nothing" / "inside").mkdir(parents=True)
    (directory / "link").symlink_to("deep/er/b")
    (directory / "linked").symlink_to("deep")
    manifest = committed_from(storage, chain_of(storage), "c", directory)
    verify(storage, manifest)
    path = checkpoint_of(storage, manifest).path
    assert tree(path) == [
        ".powertrain-manifest.json", "a", "deep", "deep/er", "deep/er/b", "link", "linked", "linked/er", "linked/er/b",
        "nothing", "nothing/inside",
    ]  # fmt: skip
    assert Path(path, "link").read_text() == "2"
    assert not Path(path, "link").is_symlink()
    assert "nothing/inside/" in [file.name for file in manifest.files]


ODD_NAMES = [
    "two words", " leading", "trailing ", "ünïcödé", "汉字", "new\nline", "tab\t", "100%", "%41", "'single'",
    '"double"', "back\\slash", ".hidden", "..twodots", "a?b", "a#b", "a*b", "~", "$HOME", "-rf", "a:b", "\u200d",
    "d.d/e e/f%2Ff",
]  # fmt: skip


def test_odd_names_and_empty_directories_come_back(storage: Storage, tmp_path: Path) -> None:
    directory = directory_with(tmp_path, "user", {name: name for name in ODD_NAMES})
    for name in ("empty dir", "ü/nested %", ".hid"):
        (directory / name).mkdir(parents=True)
    manifest = committed_from(storage, chain_of(storage), "c", directory)
    verify(storage, manifest)
    copy = checkpoint_of(storage, manifest).to_directory(tmp_path / "copy")
    assert tree(copy) == tree(directory)
    assert all(Path(copy, name).read_text() == name for name in ODD_NAMES)


def test_a_name_that_is_not_utf8_is_refused_in_one_sentence(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, "user", {"a": "1"})
    (directory / "sub").mkdir()
    for bad in (b"bad-\xff", b"sub/\xfe"):
        path = os.path.join(os.fsencode(directory), bad)
        with open(path, "wb"):
            pass
        with pytest.raises(CheckpointError, match=r"not UTF-8.*Rename it"):
            contents(directory)
        os.unlink(path)


def test_links_into_shared_memory_segments_are_followed_and_no_others(tmp_path: Path) -> None:
    segment = directory_with(tmp_path, "segments", {"s1": "state"}) / "s1"
    directory = directory_with(tmp_path, "user", {"a": "1"})
    (directory / "state").symlink_to(segment)
    with pytest.raises(CheckpointError, match="leads out of it"):
        contents(directory)
    files, _ = contents(directory, segments=tmp_path / "segments")
    assert files == [("a", directory / "a"), ("state", directory / "state")]
    (directory / "out").symlink_to("/etc/hostname")
    with pytest.raises(CheckpointError, match="leads out of it"):
        contents(directory, segments=tmp_path / "segments")


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


def _reserved_name(directory: Path) -> None:
    (directory / ".powertrain-validation.json").write_text("{}")


def _temporary_name(directory: Path) -> None:
    directory_with(directory, "d", {".powertrain-tmp.x": "1"})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (_outside_link, "leads out of it"),
        (_dangling_link, "leads nowhere"),
        (_circular_link, r"leads out of it|leads back"),
        (_pipe, "not a regular file"),
        (_users_manifest, "Give that file another name"),
        (_reserved_name, "Give that file another name"),
        (_temporary_name, "kept for unfinished writes"),
    ],
)
def test_what_cannot_be_a_checkpoint_is_refused(tmp_path: Path, spoil: Any, says: str) -> None:
    directory = directory_with(tmp_path, "user", {"a": "1"})
    spoil(directory)
    with pytest.raises(CheckpointError, match=says):
        contents(directory)


def test_a_file_and_an_absent_directory_are_refused_and_an_empty_one_adds_nothing(
    storage: Storage, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name, says in (("file", "is a file"), ("absent", "does not exist")):
        with pytest.raises(CheckpointError, match=says):
            refuse_directory(storage, tmp_path / name)
    refuse_directory(storage, tmp_path / "empty")
    assert contents(tmp_path / "empty") == ([], [])
    Checkpoint(tmp_path / "empty").set_metadata({"only": "this"})
    assert contents(tmp_path / "empty") == ([], [])


def test_a_directory_that_contains_the_runs_storage_or_the_staging_area_is_refused(
    storage: Storage, tmp_path: Path
) -> None:
    saved(storage, tmp_path, 1)
    staging = directory_with(tmp_path, "node/staging", {"attempt-0/x": "1"})
    (tmp_path / "alias").symlink_to(tmp_path)
    for directory in (tmp_path, Path(storage.uri), Path(storage.uri, "checkpoints"), tmp_path / "alias"):
        with pytest.raises(CheckpointError, match="contains the run's own storage"):
            refuse_directory(storage, directory)
    for directory in (staging, tmp_path / "node"):
        with pytest.raises(CheckpointError, match="wait for their upload"):
            refuse_directory(storage, directory, staging=staging)
    refuse_directory(storage, staging / "attempt-0", staging=staging)


def test_the_launch_directory_and_what_contains_it_are_refused(storage: Storage, tmp_path: Path) -> None:
    launch = directory_with(tmp_path, "home/project", {"train.py": "…", "out/a": "1"})
    for directory in (launch, tmp_path / "home"):
        with pytest.raises(CheckpointError, match="was launched from"):
            refuse_directory(storage, directory, launch_dir=launch)
    refuse_directory(storage, launch / "out", launch_dir=launch)


def test_a_committed_checkpoint_can_be_reported_again(storage: Storage, tmp_path: Path) -> None:
    chain = chain_of(storage)
    first = saved(storage, tmp_path, 1, chain)
    checkpoint = checkpoint_of(storage, first)
    record_validation(storage, first.name, Validation(status="VALIDATED"))
    checkpoint.set_metadata({"seen": True})
    second = committed_from(storage, chain, name_of_row(2), Path(checkpoint.path), row=2)
    assert [(f.name, f.xxh3) for f in second.files if f.name != ".metadata.json"] == [
        (f.name, f.xxh3) for f in first.files
    ]
    assert second.metadata == {"seen": True}
    verify(storage, second)


# --------------------------------------------------------------------------- all ranks together


def test_of_two_ranks_with_one_name_the_lower_is_kept(storage: Storage, tmp_path: Path) -> None:
    directories = [
        directory_with(tmp_path, f"user-{rank}", {"model.pt": f"of rank {rank}", f"only-{rank}": "x"})
        for rank in (0, 1)
    ]
    manifest = committed_from(storage, chain_of(storage), "c", *directories)
    path = checkpoint_of(storage, manifest).path
    assert Path(path, "model.pt").read_text() == "of rank 0"
    assert tree(path) == [".powertrain-manifest.json", "model.pt", "only-0", "only-1"]
    assert {file.name: file.rank for file in manifest.files}["only-1"] == 1
    verify(storage, manifest)


def part(*names: str, **changes: Any) -> CheckpointPart:
    return CheckpointPart(checkpoint="c", files=[FilePart(name=name, size=1) for name in names], **changes)


def test_before_hashes_are_known_every_name_that_comes_twice_is_a_clash() -> None:
    merged = merge({1: part("a", "b"), 0: part("a"), 2: part("d/")})
    assert [(file.name, file.rank) for file in merged.files] == [("a", 0), ("b", 1), ("d/", 2)]
    assert len(merged.clashes) == 1
    assert "Ranks 0 and 1" in merged.clashes[0]


@pytest.mark.parametrize(
    ("lower", "higher", "kept"),
    [
        (["a"], ["a/b"], [("a", 0)]),
        (["a/b"], ["a"], [("a/b", 0)]),
        (["a"], ["a/"], [("a", 0)]),
        (["a/"], ["a"], [("a/", 0)]),
        (["a/b/c"], ["a/b"], [("a/b/c", 0)]),
    ],
)
def test_a_name_cannot_be_both_a_file_and_a_directory(
    lower: list[str], higher: list[str], kept: list[tuple[str, int]]
) -> None:
    merged = merge({0: part(*lower), 1: part(*higher)})
    assert [(file.name, file.rank) for file in merged.files] == kept
    assert len(merged.clashes) == 1
    assert "both a file and a directory" in merged.clashes[0]


def test_a_directory_that_is_empty_on_one_rank_only_is_no_empty_directory() -> None:
    for parts in ({0: part("a/"), 1: part("a/b")}, {0: part("a/b"), 1: part("a/")}):
        merged = merge(parts)
        assert [file.name for file in merged.files] == ["a/b"]
        assert merged.clashes == []


def test_what_ranks_say_beside_their_files_is_merged_with_the_lowest_rank_first() -> None:
    merged = merge(
        {
            2: part(error="The disk is full."),
            1: part(metadata={"a": 1, "b": 1}, extras={"data": 5, "x": 1}, elsewhere="s3://b/one"),
            0: part(metadata={"a": 0}, extras={"data": 5}, elsewhere="s3://b/zero"),
        }
    )
    assert (merged.metadata, merged.extras) == ({"a": 0, "b": 1}, {"data": 5, "x": 1})
    assert merged.elsewhere == "s3://b/zero"
    assert merged.errors == {2: "The disk is full."}
    assert len(merged.clashes) == 1
    assert "'s3://b/zero' and to 's3://b/one'" in merged.clashes[0]


def uploaded(place: str, **sizes: int) -> CheckpointPart:
    files = [FilePart(name=name, size=size) for name, size in sizes.items()]
    return CheckpointPart(checkpoint="", files=files, elsewhere=place)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_place_that_ranks_listed_at_different_times_is_recorded_as_it_is_when_all_are_done(
    storage: Storage, tmp_path: Path, order: tuple[int, int]
) -> None:
    place = directory_with(tmp_path, "place", {"rank0": "12345678", "rank1": "1234", "common": "12"})
    mark(open_storage(place))
    early = uploaded(str(place), rank0=8, rank1=0, common=5, temporary=3)
    late = uploaded(str(place), rank0=8, rank1=4, common=2)
    merged = merge_when_complete(dict(zip(order, (early, late), strict=True)), PlaceListings(storage))
    assert {file.name: file.size for file in merged.files} == {"rank0": 8, "rank1": 4, "common": 2}
    assert merged.clashes == []
    manifest = commit(
        storage, chain_of(storage), name="c", row=1, attempt=0, files=merged.files, metrics={}, world_size=2,
        elsewhere=merged.elsewhere,
    )  # fmt: skip
    verify(storage, manifest)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_a_place_that_only_ranks_reach_everything_that_one_of_them_saw_is_recorded_in_full(
    storage: Storage, tmp_path: Path, order: tuple[int, int]
) -> None:
    place = str(tmp_path / "on another machine")
    listed = (uploaded(place, rank0=8, rank1=0), uploaded(place, rank0=8, rank1=4, more=1))
    merged = merge_when_complete(dict(zip(order, listed, strict=True)), PlaceListings(storage))
    assert {file.name: file.size for file in merged.files} == {"rank0": 8, "rank1": 4, "more": 1}
    assert len(merged.clashes) == 1
    assert "while others were still uploading" in merged.clashes[0]


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (TimeoutError("no answer"), [2, 3]),  # again for the first checkpoint, once for later ones
        (OSError(errno.EINVAL, "of a mounted file system"), [2, 3]),
        (PermissionError("not yours"), [1, 2]),
        (RuntimeError("of a user's file system"), [1, 2]),
    ],
)
def test_of_a_place_that_cannot_be_listed_the_listings_of_ranks_count(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, tries: list[int]
) -> None:
    made: list[str] = []

    def refuse(place: Storage) -> list[FilePart]:
        made.append("try")
        raise error

    monkeypatch.setattr("powertrain.checkpoint.listing.files_at", refuse)
    parts = {0: uploaded(str(tmp_path), rank0=8), 1: uploaded(str(tmp_path), rank0=8, rank1=4)}
    listings = PlaceListings(storage, pause=lambda seconds: None)
    for made_then in tries:
        merged = merge_when_complete(parts, listings)
        assert [file.name for file in merged.files] == ["rank0", "rank1"]
        assert str(error) in merged.clashes[0]
        assert len(made) == made_then


def test_a_file_system_that_never_answers_delays_a_commit_by_a_bounded_time(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr("powertrain.checkpoint.listing.files_at", lambda place: answers.wait(60) and [])
    monkeypatch.setattr("powertrain.checkpoint.listing._LIST_TIMEOUT_S", 0.01)
    monkeypatch.setattr("powertrain.checkpoint.listing._GRACE_S", 0.0)
    parts = {0: uploaded(str(tmp_path), rank0=8), 1: uploaded(str(tmp_path), rank0=8, rank1=4)}
    try:
        merged = merge_when_complete(parts, PlaceListings(storage, pause=lambda seconds: None))
    finally:
        answers.set()
    assert [file.name for file in merged.files] == ["rank0", "rank1"]
    assert "no answer within" in merged.clashes[0]


hashes = st.sampled_from(["aa", "bb", "cc"])
parts_of_ranks = st.dictionaries(
    st.integers(0, 5), st.dictionaries(st.sampled_from(["x", "y", "d/z"]), hashes), min_size=1
)


@given(parts_of_ranks)
def test_merging_keeps_each_name_once_from_its_lowest_rank(ranks: dict[int, dict[str, str]]) -> None:
    parts = {
        rank: CheckpointPart(
            checkpoint="c", files=[FilePart(name=name, size=1, xxh3=h) for name, h in files.items()]
        )
        for rank, files in ranks.items()
    }
    merged = merge(parts)
    lowest = {name: min(r for r in ranks if name in ranks[r]) for files in ranks.values() for name in files}
    assert {file.name: file.rank for file in merged.files} == lowest
    assert len(merged.files) == len(lowest)
    different = sum(h != ranks[lowest[name]][name] for files in ranks.values() for name, h in files.items())
    assert len(merged.clashes) == different
    assert all(file.xxh3 == ranks[file.rank][file.name] for file in merged.files)


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/../../x", "a//b"])
def test_a_part_whose_name_climbs_out_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match="leads out"):
        merge({0: part(name)})


# --------------------------------------------------------------------------- committing


def test_leftovers_of_an_earlier_try_do_not_get_into_the_checkpoint(storage: Storage, tmp_path: Path) -> None:
    before = directory_with(tmp_path, "before", {"model.pt": "stale", "stale": "x", "d/stale": "x"})
    stored(storage, "c", {0: before})
    now = directory_with(tmp_path, "now", {"model.pt": "fresh"})
    manifest = committed_from(storage, chain_of(storage), "c", now)
    verify(storage, manifest)
    assert [entry.key for entry in storage.list("checkpoints")] == [
        "checkpoints/c/.powertrain-manifest.json",
        "checkpoints/c/model.pt",
    ]


def test_a_committed_name_cannot_be_committed_again(storage: Storage, tmp_path: Path) -> None:
    chain = chain_of(storage)
    manifest = saved(storage, tmp_path, 1, chain)
    for again in (chain, chain_of(storage, lease=2)):
        with pytest.raises(CheckpointError, match="committed already"):
            commit(
                storage, again, name=manifest.name, row=1, attempt=9, files=[], metrics={}, world_size=1,
                metadata={"other": 1},
            )  # fmt: skip
    verify(storage, manifest)
    assert committed(storage) == [manifest]


def test_a_commit_whose_files_are_gone_cut_or_unhashed_is_refused(storage: Storage, tmp_path: Path) -> None:
    chain = chain_of(storage)
    files = stored(storage, "c", {0: directory_with(tmp_path, "user", {"a": "1", "b": "22"})}).files
    fields: dict[str, Any] = {"name": "c", "row": 1, "attempt": 0, "metrics": {}, "world_size": 1}
    unhashed = [ManifestFile(name="a", size=1, xxh3="", rank=0)]
    with pytest.raises(CheckpointError, match="'a' of rank 0 is not whole"):
        commit(storage, chain, files=unhashed, **fields)
    storage.put("checkpoints/c/b", b"2")
    with pytest.raises(CheckpointError, match="'b' of rank 0 is not whole"):
        commit(storage, chain, files=files, **fields)
    storage.delete("checkpoints/c/b")
    with pytest.raises(CheckpointError, match="'b' of rank 0 is not whole"):
        commit(storage, chain, files=files, **fields)
    assert committed(storage) == []


def test_metadata_travels_along_and_may_change_after_the_commit(storage: Storage, tmp_path: Path) -> None:
    directories = []
    for rank in (0, 1):
        directory = directory_with(tmp_path, f"user-{rank}", {f"file-{rank}": "x"})
        Checkpoint(directory).set_metadata({"rank": rank, f"from-{rank}": True})
        directories.append(directory)
    manifest = committed_from(storage, chain_of(storage), "c", *directories)
    assert manifest.metadata == {"rank": 0, "from-0": True, "from-1": True}
    checkpoint = checkpoint_of(storage, manifest)
    assert checkpoint.get_metadata() == manifest.metadata
    checkpoint.update_metadata({"note": "later"})
    assert checkpoint_of(storage, manifest).get_metadata() == {**manifest.metadata, "note": "later"}
    verify(storage, manifest)
    copy = checkpoint.to_directory(tmp_path / "copy")
    assert Checkpoint(copy).get_metadata() == {**manifest.metadata, "note": "later"}
    assert tree(copy) == [".metadata.json", "file-0", "file-1"]


def test_a_commit_of_files_that_the_user_uploaded_names_their_place(storage: Storage, tmp_path: Path) -> None:
    place = directory_with(tmp_path, "theirs", {"model.pt": "x"})
    mark(open_storage(place))
    chain = chain_of(storage)
    manifest = commit(
        storage, chain, name="c", row=1, attempt=0, files=[], metrics={}, world_size=1, elsewhere=str(place)
    )
    assert checkpoint_of(storage, manifest) == Checkpoint(place)
    verify(storage, manifest)
    discard(storage, "c")
    assert (place / "model.pt").exists(), "it is the user's"
    (place / "model.pt").unlink()
    with pytest.raises(CheckpointError, match="no longer there"):
        verify(storage, manifest)


def test_commits_are_ordered_by_their_links_and_not_by_clock_or_row(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([9.0, 8.0, 7.0])
    with monkeypatch.context() as patch:
        patch.setattr("powertrain.checkpoint.commit.time.time", lambda: next(clock))
        first = chain_of(storage, 1)
        saved(storage, tmp_path, 9, first, attempt=4)
        second = chain_of(storage, 2)
        saved(storage, tmp_path, 5, second)
        saved(storage, tmp_path, 6, second)
    assert [manifest.row for manifest in committed(storage)] == [9, 5, 6]
    assert [manifest.lease for manifest in committed(storage)] == [1, 2, 2]
    last = newest(storage)
    assert last is not None
    assert last.row == 6


# --------------------------------------------------------------------------- damage


def flip(content: bytes) -> bytes:
    return content[:-2] + bytes([content[-2] ^ 0x10]) + content[-1:]


DAMAGE = {
    "flipped first": lambda content: bytes([content[0] ^ 1]) + content[1:],
    "flipped last": lambda content: content[:-1] + bytes([content[-1] ^ 0x80]),
    "flipped inside": lambda content: (
        content[: len(content) // 2]
        + bytes([content[len(content) // 2] ^ 1])
        + content[len(content) // 2 + 1 :]
    ),
    "cut": lambda content: content[:-1],
    "added": lambda content: content + b"\0",
    "emptied": lambda content: b"",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_to_any_file_is_found_the_one_before_is_used_and_both_are_reported(
    storage: Storage, tmp_path: Path, damage: Any
) -> None:
    chain = chain_of(storage)
    good = saved(storage, tmp_path, 1, chain)
    files = {"model.pt": "weights", "sub/optimizer.pt": "momentum", "one": "1"}
    directory = directory_with(tmp_path, "two", files)
    Checkpoint(directory).set_metadata({"epoch": 2})
    bad = committed_from(storage, chain, name_of_row(2), directory, row=2, metrics={"loss": 0.25})
    checkpoint_of(storage, bad).update_metadata({"later": 3})
    keys = [entry.key for entry in storage.list(f"checkpoints/{bad.name}")]
    assert len(keys) == len(files) + 3, "and the manifest, the metadata and the later metadata"
    for key in keys:
        whole = storage.get(key)
        storage.put(key, damage(whole))
        told: list[str] = []
        assert newest_verified(storage, told.append) == good, key
        assert len(told) == 2, (key, told)
        assert bad.name in told[0]
        assert key.endswith(".powertrain-manifest.json") or repr(key.split("/", 2)[2]) in told[0]
        assert "'checkpoint_000001' (row 1) is whole and is used instead" in told[1]
        storage.put(key, whole)
    told = []
    assert newest_verified(storage, told.append) == bad
    assert told == []


def test_a_missing_file_or_empty_directory_is_found(storage: Storage, tmp_path: Path) -> None:
    directory = directory_with(tmp_path, "user", {"a": "1"})
    (directory / "empty").mkdir()
    manifest = committed_from(storage, chain_of(storage), "c", directory)
    Path(storage.uri, "checkpoints/c/empty").rmdir()
    with pytest.raises(CheckpointError, match="'empty/' of checkpoint 'c' is missing"):
        verify(storage, manifest)
    storage.delete("checkpoints/c/a")
    with pytest.raises(CheckpointError, match="'a' of checkpoint 'c' is missing"):
        verify(storage, manifest)
    told: list[str] = []
    assert newest_verified(storage, told.append) is None
    assert "there is none to resume from" in told[-1]


def test_remote_storage_that_does_not_answer_is_no_damage(storage: Storage, tmp_path: Path) -> None:
    saved(storage, tmp_path, 1)

    def refuse(self: Storage, key: str) -> Any:
        raise TimeoutError("no answer")

    class Remote(type(storage)):  # type: ignore[misc]
        """What lies there, without real files of this machine."""

        digest = refuse

        def local_path(self, key: str) -> None:
            return None

        def list(self, prefix: str = "") -> Any:
            return storage.list(prefix)

        def get(self, key: str, *, limit: int | None = None) -> bytes:
            return storage.get(key, limit=limit)

    with pytest.raises(TimeoutError):
        newest_verified(Remote(storage.uri), lambda text: None)


def test_a_damaged_manifest_is_reported_and_its_files_are_never_swept(
    storage: Storage, tmp_path: Path
) -> None:
    chain = chain_of(storage)
    good = saved(storage, tmp_path, 1, chain)
    saved(storage, tmp_path, 2, chain)
    storage.put("checkpoints/checkpoint_000002/.powertrain-manifest.json", b'{"schema": 1, "na')
    told: list[str] = []
    assert newest_verified(storage, told.append) == good
    assert "checkpoint_000002" in told[0]
    assert sweep_uncommitted(storage) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": 99}, "schema 99"),
        ({"files": [{"name": "../x", "size": 1, "xxh3": "", "rank": 0}]}, "leads out"),
    ],
)
def test_a_manifest_of_another_schema_or_with_a_climbing_path_is_refused(
    storage: Storage, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    chain = chain_of(storage)
    good, bad = saved(storage, tmp_path, 1, chain), saved(storage, tmp_path, 2, chain)
    key = f"checkpoints/{bad.name}/.powertrain-manifest.json"
    storage.put(key, mf.seal({**mf.unseal(storage.get(key), "it"), **changes}))
    told: list[str] = []
    assert newest_verified(storage, told.append) == good
    assert says in told[0]
    assert committed(storage) == [good]


def test_without_damage_nothing_is_reported_and_nothing_is_set_aside(
    storage: Storage, tmp_path: Path
) -> None:
    chain = chain_of(storage)
    manifests = [saved(storage, tmp_path, row, chain) for row in (1, 2)]
    told: list[str] = []
    assert newest_verified(storage, told.append) == manifests[-1]
    assert told == []
    assert set_aside_newer(storage, manifests[-1]) == []
    assert committed(storage) == manifests


def test_after_falling_back_the_same_row_can_be_committed_again(storage: Storage, tmp_path: Path) -> None:
    chain = chain_of(storage)
    good, bad = saved(storage, tmp_path, 1, chain), saved(storage, tmp_path, 2, chain)
    key = f"checkpoints/{bad.name}/model.pt"
    storage.put(key, flip(storage.get(key)))
    assert set_aside_newer(storage, good) == ["broken/checkpoint_000002-1"]
    assert committed(storage) == [good]
    again = saved(storage, tmp_path, 2, chain, attempt=1)
    verify(storage, again)
    assert set_aside_newer(storage, None) == ["broken/checkpoint_000001-1", "broken/checkpoint_000002-2"]
    assert storage.get("broken/checkpoint_000002-2/model.pt") == b"weights of 2"


# --------------------------------------------------------------------------- removing


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
    assert storage.list("checkpoints") == []


def test_sweep_removes_only_what_is_uncommitted_and_void_manifests_stay(
    storage: Storage, tmp_path: Path
) -> None:
    kept = saved(storage, tmp_path, 1)
    for row in (2, 3):
        stored(storage, name_of_row(row), {0: directory_with(tmp_path, "half", {"a": "1"})})
    void = f"checkpoints/{name_of_row(3)}/.powertrain-manifest.json"
    storage.put(void, mf.void(2))
    assert sweep_uncommitted(storage) == [name_of_row(2), name_of_row(3)]
    assert sweep_uncommitted(storage) == []
    assert committed(storage) == [kept]
    assert set_aside_newer(storage, kept) == []
    assert mf.is_void(storage.get(void))
    told: list[str] = []
    assert newest_verified(storage, told.append) == kept
    assert told == []


# --------------------------------------------------------------------------- validation


def test_metrics_of_a_validation_join_those_of_its_checkpoint(storage: Storage, tmp_path: Path) -> None:
    chain = chain_of(storage)
    manifests = [saved(storage, tmp_path, row, chain) for row in (1, 2, 3)]
    score = Validation(status="VALIDATED", metrics={"accuracy": 0.9, "loss": float("nan")}, seconds=1.5)
    record_validation(storage, manifests[0].name, Validation(status="PENDING_VALIDATION"))
    record_validation(storage, manifests[0].name, score)
    failed = Validation(status="VALIDATION_FAILED", error="ValueError: no data")
    record_validation(storage, manifests[1].name, failed)
    assert validations(storage)[manifests[1].name] == failed
    first, second, third = reported(storage)
    assert first.metrics["accuracy"] == 0.9
    assert [each.status for each in (first, second, third)] == [
        ReportedCheckpointStatus.VALIDATED,
        ReportedCheckpointStatus.VALIDATION_FAILED,
        ReportedCheckpointStatus.COMMITTED,
    ]
    assert second.metrics == {"loss": 0.5}
    joined = with_validations(committed(storage), validations(storage))
    best = retention.best(joined, "accuracy")
    assert best is not None
    assert best.name == manifests[0].name
    assert retention.to_delete(joined, num_to_keep=1, score_attribute="accuracy") == [manifests[1].name]
    verify(storage, manifests[0])


def test_a_damaged_validation_result_is_reported_and_left_out(storage: Storage, tmp_path: Path) -> None:
    manifest = saved(storage, tmp_path, 1)
    record_validation(storage, manifest.name, Validation(status="VALIDATED", metrics={"a": 1}))
    key = f"checkpoints/{manifest.name}/.powertrain-validation.json"
    storage.put(key, storage.get(key).replace(b"1", b"2", 1))
    told: list[str] = []
    assert validations(storage, told.append) == {}
    assert len(told) == 1
    assert manifest.name in told[0]
