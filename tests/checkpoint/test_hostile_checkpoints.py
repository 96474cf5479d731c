"""Checkpoints whose files are not what they were, or were forged."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.other_user import OtherUser

from powertrain.checkpoint import elsewhere
from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.chain import Chain, manifest_key
from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.checkpoint.cleanup import sweep_uncommitted
from powertrain.checkpoint.commit import commit
from powertrain.checkpoint.committed import committed, newest_verified, reported, verify
from powertrain.checkpoint.manifest import Manifest, ManifestFile
from powertrain.errors import CheckpointError
from powertrain.storage import Storage, open_storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def save(storage: Storage, chain: Chain, row: int, **changes: Any) -> Manifest:
    name = f"c{row}"
    digest = storage.put_file(f"checkpoints/{name}/model", __file__)
    file = ManifestFile(name="model", size=digest.size, xxh3=digest.xxh3, rank=0)
    fields: dict[str, Any] = {"row": row, "attempt": 0, "files": [file], "metrics": {}, "world_size": 1}
    return commit(storage, chain, name=name, **{**fields, **changes})


def forge(storage: Storage, manifest: Manifest, **changes: Any) -> None:
    """Put a manifest whose seal is right."""
    storage.put(manifest_key(manifest.name), mf.encode(msgspec.structs.replace(manifest, **changes)))


# --------------------------------------------------------------------------- other servers


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield listening


def test_a_resume_never_connects_to_a_server_that_only_a_manifest_names(
    storage: Storage, server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain.take_over(storage, 1)
    older, newer = save(storage, chain, 1), save(storage, chain, 2)
    port = server.getsockname()[1]
    forge(storage, newer, elsewhere=f"s3://bucket/x?endpoint_override=http://127.0.0.1:{port}")
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        found = newest_verified(storage, told.append)
        kept = [one.checkpoint.path for one in reported(storage)]
    assert found == older
    assert any("another server" in line and "c2" in line for line in told)
    assert any("'c1' (row 1) is whole and is used instead" in line for line in told)
    assert kept == [str(storage.local_path("checkpoints/c1"))]
    with pytest.raises(BlockingIOError):
        server.accept()


def test_a_commit_names_no_other_server(storage: Storage, tmp_path: Path) -> None:
    chain = Chain.take_over(storage, 1)
    address = "s3://bucket/x?endpoint_override=http://127.0.0.1:9"
    with pytest.raises(CheckpointError, match="AWS_ENDPOINT_URL"):
        save(storage, chain, 1, elsewhere=address)
    assert committed(storage) == []


def test_a_manifest_that_names_a_huge_directory_does_not_have_it_walked(storage: Storage) -> None:
    chain = Chain.take_over(storage, 1)
    older, newer = save(storage, chain, 1), save(storage, chain, 2)
    forge(storage, newer, elsewhere="/")
    assert newest_verified(storage, lambda _: None) == older


# --------------------------------------------------------------------------- directories of this machine


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A directory of the user's with a file that a forged manifest can list."""
    directory = tmp_path / "private"
    directory.mkdir()
    shutil.copy(__file__, directory / "model")
    return directory


@pytest.mark.parametrize("form", ["{}", "file://{}", "FILE://{}", "{}/../private"])
def test_a_manifest_cannot_make_a_checkpoint_of_a_private_directory(
    storage: Storage, private: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    chain = Chain.take_over(storage, 1)
    older, newer = save(storage, chain, 1), save(storage, chain, 2)
    forge(storage, newer, elsewhere=form.format(private))
    told: list[str] = []
    assert newest_verified(storage, told.append) == older
    assert any("POWERTRAIN_TRUSTED_CHECKPOINT_DIRS" in line or "FILE" in form for line in told)
    assert [one.checkpoint.path for one in reported(storage)] == [str(storage.local_path("checkpoints/c1"))]
    with pytest.raises(CheckpointError):
        verify(storage, msgspec.structs.replace(newer, elsewhere=form.format(private)))


def test_a_directory_that_was_reported_from_counts(storage: Storage, private: Path) -> None:
    assert elsewhere.mark(open_storage(private)) == ""
    kept = save(storage, Chain.take_over(storage, 1), 1, elsewhere=str(private))
    assert newest_verified(storage, print) == kept
    assert [one.checkpoint.path for one in reported(storage)] == [str(private)]


def test_a_directory_counts_that_the_environment_names(
    storage: Storage, private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = save(storage, Chain.take_over(storage, 1), 1, elsewhere=str(private))
    for value, counts in (
        (f"/x:{private.parent}", True),
        (str(private), True),
        ("/x", False),
        ("", False),
        (".", False),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(elsewhere.TRUSTED_VARIABLE, value)
            patch.chdir(private.parent)
            assert (newest_verified(storage, lambda _: None) == kept) is counts


def test_a_directory_within_the_run_counts_and_a_link_out_of_it_does_not(
    storage: Storage, private: Path
) -> None:
    chain = Chain.take_over(storage, 1)
    storage.put_file("uploads/model", __file__)
    inside = storage.local_path("uploads")
    assert inside is not None
    kept = save(storage, chain, 1, elsewhere=str(inside))
    (inside / "link").symlink_to(private)
    save(storage, chain, 2, elsewhere=str(inside / "link"))
    assert committed(storage) == [kept]


def test_a_directory_that_is_not_here_is_listed_and_not_used(storage: Storage, tmp_path: Path) -> None:
    kept = save(storage, Chain.take_over(storage, 1), 1, elsewhere=str(tmp_path / "gone"))
    assert committed(storage) == [kept]
    with pytest.raises(CheckpointError, match="missing"):
        verify(storage, kept)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give files away")
@pytest.mark.parametrize("given_away", ["", elsewhere.MARK_NAME])
def test_the_mark_of_another_user_does_not_count(storage: Storage, private: Path, given_away: str) -> None:
    elsewhere.mark(open_storage(private))
    os.chown(private / given_away, OtherUser.uid, -1)
    save(storage, Chain.take_over(storage, 1), 1, elsewhere=str(private))
    assert committed(storage) == []


def test_a_link_in_the_place_of_the_mark_does_not_count(storage: Storage, private: Path) -> None:
    (private / elsewhere.MARK_NAME).symlink_to("model")
    save(storage, Chain.take_over(storage, 1), 1, elsewhere=str(private))
    assert committed(storage) == []


def test_a_directory_that_cannot_be_marked_is_reported(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    place = open_storage(private)
    monkeypatch.setattr(type(place), "put", refuse)
    assert "Read-only file system" in elsewhere.mark(place)


# --------------------------------------------------------------------------- odd values with a right seal


@pytest.mark.parametrize("changes", [
    {"row": -5}, {"row": 1 << 70}, {"attempt": -1}, {"world_size": -2}, {"lease": -1}, {"link": -3},
    {"row": (1 << 53) + 1}, {"created": -1.0},
    {"created": float("nan")}, {"created": 1e300}, {"name": "../../c2"}, {"name": ""},
    {"files": [ManifestFile(name="model", size=-1, xxh3="", rank=0)]},
    {"files": [ManifestFile(name="model", size=1, xxh3="", rank=-1)]},
    {"files": [ManifestFile(name="model", size=1, xxh3="", rank=(1 << 53) + 1)]},
], ids=str)  # fmt: skip
def test_a_sealed_manifest_with_an_impossible_value_is_passed_over_loudly(
    storage: Storage, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    chain = Chain.take_over(storage, 1)
    older, newer = save(storage, chain, 1), save(storage, chain, 2)
    storage.put(manifest_key("c2"), mf.encode(msgspec.structs.replace(newer, **changes)))
    told: list[str] = []
    assert newest_verified(storage, told.append) == older
    assert any("checkpoints/c2/.powertrain-manifest.json" in line for line in told)
    assert committed(storage) == [older]
    assert "checkpoints/c2/.powertrain-manifest.json" in caplog.text


def test_the_largest_numbers_that_a_run_can_have_are_read(storage: Storage) -> None:
    manifest = save(storage, Chain.take_over(storage, 1), 1)
    largest = msgspec.structs.replace(manifest, row=1 << 53, link=1 << 53, created=253_402_300_800.0)
    assert mf.decode(mf.encode(largest)) == largest


@pytest.mark.parametrize(
    "value", [{"$pairs": [[[], 1]]}, {"$float": []}, {"$bytes": 5}, {"$pairs": 3}, {"$x": 1}]
)
def test_sealed_metrics_that_cannot_be_decoded_are_damage(value: Any) -> None:
    fields = {"schema": 1, "name": "c", "metrics": value, "row": 1}
    with pytest.raises(CheckpointError):
        mf.decode(mf.seal(fields))
    with pytest.raises(CheckpointError):
        mf.decode_validation(mf.seal({"status": "VALIDATED", "metrics": value}), "it")


def test_json_without_a_bottom_is_damage() -> None:
    with pytest.raises(CheckpointError):
        mf.decode(mf.seal({"schema": 1}).replace(b"1", b"[" * 100_000))


# --------------------------------------------------------------------------- something else in the place of a file


def test_a_directory_in_the_place_of_a_commit_link_is_an_error_and_no_endless_loop(storage: Storage) -> None:
    chain = Chain.take_over(storage, 1)
    path = storage.local_path("commits/00000002")
    assert path is not None
    path.mkdir()
    with pytest.raises(CheckpointError, match="commits/00000002"):
        Chain.take_over(storage, 2)
    with pytest.raises(CheckpointError, match="commits/00000002"):
        save(storage, chain, 1)


def test_a_directory_in_the_place_of_a_manifest_keeps_the_checkpoints_files(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    chain = Chain.take_over(storage, 1)
    save(storage, chain, 1)
    path = storage.local_path(manifest_key("c1"))
    assert path is not None
    path.unlink()
    path.mkdir()
    assert sweep_uncommitted(storage) == []
    assert storage.get("checkpoints/c1/model")
    assert committed(storage) == []
    assert "checkpoints/c1/.powertrain-manifest.json" in caplog.text


@pytest.mark.parametrize("place", range(2, 60, 3))
def test_a_changed_link_takes_part_in_no_decision(storage: Storage, place: int) -> None:
    chain = Chain.take_over(storage, 1)
    save(storage, chain, 1)
    data = storage.get("commits/00000002")
    storage.put("commits/00000002", data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    Chain.take_over(storage, 2)
    assert {entry.key.split("/")[1] for entry in storage.list("checkpoints")} == {"c1"}
    assert [manifest.name for manifest in committed(storage)] == ["c1"]


# --------------------------------------------------------------------------- links in committed checkpoints


@pytest.mark.parametrize("name", ["model", "more/private"])
def test_a_link_that_was_put_into_a_committed_checkpoint_is_never_read(
    storage: Storage, tmp_path: Path, name: str
) -> None:
    private = tmp_path / "private"
    private.write_text("secret")
    save(storage, Chain.take_over(storage, 1), 1)
    (best,) = reported(storage)
    directory = Path(best.checkpoint.path)
    (directory / name).unlink(missing_ok=True)
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).symlink_to(private)
    with pytest.raises(CheckpointError, match="symbolic link"):
        best.checkpoint.to_directory(tmp_path / "copy")
    with pytest.raises(CheckpointError, match="symbolic link"), best.checkpoint.as_directory():
        pass
    assert not (tmp_path / "copy").exists()


def test_links_in_a_directory_of_the_users_own_are_followed_as_before(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("mine")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "model").symlink_to(tmp_path / "weights")
    copied = Checkpoint.from_directory(tmp_path / "own").to_directory(tmp_path / "copy")
    assert Path(copied, "model").read_text() == "mine"
