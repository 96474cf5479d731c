"""Checkpoints in an object store (a real S3 protocol server) and on file systems that were given."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tests.s3_server import S3Server

from powertrain.checkpoint import Checkpoint, cache
from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.cleanup import set_aside_newer
from powertrain.checkpoint.commit import commit
from powertrain.checkpoint.committed import (
    checkpoint_of,
    committed,
    newest_verified,
    record_validation,
    verify,
)
from powertrain.checkpoint.manifest import Manifest, ManifestFile, Validation
from powertrain.errors import CheckpointError, FencedError
from powertrain.storage import Storage, open_storage

FILES = {
    "model.bin": b"weights" * 1000,
    "sub/more": b"more",
    "two words": b"1",
    "new\nline": b"2",
    "100%": b"3",
    "%41": b"4",
    "quo\"te's": b"5",
    "back\\slash": b"6",
    ".hidden": b"7",
    "ünïcödé/汉字": b"8",
    "nothing": b"",
}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


@pytest.fixture(params=["s3", "fsspec", "pyarrow"])
def storage(request: pytest.FixtureRequest, server: S3Server) -> Storage:
    return _storage(request.param, request.node.name, server)


def _storage(kind: str, name: str, server: S3Server) -> Storage:
    name = "".join(letter if letter.isalnum() else "-" for letter in name)
    if kind == "s3":
        return open_storage(server.uri(name))
    from pyarrow import fs

    memory = import_module("fsspec").filesystem("memory", skip_instance_cache=True)
    if kind == "fsspec":
        return open_storage(f"/{name}", filesystem=memory)
    handler: Any = fs.FSSpecHandler
    return open_storage(f"/{name}", filesystem=fs.PyFileSystem(handler(memory)))


@pytest.fixture
def s3(request: pytest.FixtureRequest, server: S3Server) -> Storage:
    return _storage("s3", request.node.name, server)


def saved(storage: Storage, chain: Chain, name: str, files: dict[str, bytes], **changes: Any) -> Manifest:
    parts = []
    for file, content in files.items():
        storage.put(f"checkpoints/{name}/{file}", content)
        digest = storage.digest(f"checkpoints/{name}/{file}")
        parts.append(ManifestFile(name=file, size=digest.size, xxh3=digest.xxh3, rank=0))
    parts += [ManifestFile(name=empty, size=0, xxh3="", rank=0) for empty in ("empty/", "ü/empty %/")]
    fields: dict[str, Any] = {"row": 1, "attempt": 0, "metrics": {"loss": 0.5}, "world_size": 1}
    return commit(storage, chain, name=name, files=parts, **{**fields, **changes})


def contents(directory: str | Path) -> dict[str, bytes | None]:
    top = Path(directory)
    return {
        str(path.relative_to(top)): path.read_bytes() if path.is_file() else None
        for path in top.rglob("*")
        if path.is_file() or not any(path.iterdir())
    }


WHOLE = {**FILES, "empty": None, "ü/empty %": None}


def test_a_remote_checkpoint_comes_back_whole_without_files_of_ours(storage: Storage, tmp_path: Path) -> None:
    chain = Chain.take_over(storage, 1)
    manifest = saved(storage, chain, "c", FILES, metadata={"epoch": 1})
    record_validation(storage, "c", Validation(status="VALIDATED"))
    verify(storage, manifest)
    checkpoint = checkpoint_of(storage, manifest)
    metadata = {".metadata.json": b'{"epoch": 1}'}
    assert contents(checkpoint.to_directory(tmp_path / "copy")) == {**WHOLE, **metadata}
    with checkpoint.as_directory() as path:
        assert contents(path) == {**WHOLE, **metadata}
    assert not os.path.exists(path)
    assert checkpoint.get_metadata() == {"epoch": 1}
    checkpoint.update_metadata({"note": "later"})
    assert Checkpoint(checkpoint.path, checkpoint.filesystem).get_metadata() == {
        "epoch": 1,
        "note": "later",
    }
    with checkpoint.as_directory() as path:
        assert Checkpoint(path).get_metadata() == {"epoch": 1, "note": "later"}
    verify(storage, manifest)
    assert committed(storage) == [manifest]


def test_its_path_can_be_read_on_its_filesystem_as_it_stands(storage: Storage, tmp_path: Path) -> None:
    from pyarrow import fs

    manifest = saved(
        storage, Chain.take_over(storage, 1), "c", {"model.bin": b"weights", "sub/more": b"more"}
    )
    checkpoint = checkpoint_of(storage, manifest)
    filesystem = checkpoint.filesystem
    assert filesystem.open_input_file(f"{checkpoint.path}/model.bin").read() == b"weights"
    assert filesystem.open_input_stream(os.path.join(checkpoint.path, "sub/more")).read() == b"more"
    assert filesystem.get_file_info(checkpoint.path).type == fs.FileType.Directory
    assert filesystem.get_file_info(f"{checkpoint.path}/sub").type == fs.FileType.Directory
    assert filesystem.get_file_info(f"{checkpoint.path}/model.bin").size == 7
    assert filesystem.get_file_info(f"{checkpoint.path}/absent").type == fs.FileType.NotFound
    found = filesystem.get_file_info(fs.FileSelector(checkpoint.path, recursive=True))
    assert {info.base_name for info in found} == {".powertrain-manifest.json", "model.bin", "sub", "more"}
    here = filesystem.get_file_info(fs.FileSelector(checkpoint.path))
    assert {info.base_name for info in here} == {".powertrain-manifest.json", "model.bin", "sub"}
    target = tmp_path / "copied"
    target.mkdir()
    fs.copy_files(
        checkpoint.path,
        str(target),
        source_filesystem=filesystem,
        destination_filesystem=fs.LocalFileSystem(),
    )
    assert (target / "sub/more").read_bytes() == b"more"
    with filesystem.open_output_stream(f"{checkpoint.path}/written") as stream:
        stream.write(b"new")
    assert storage.get("checkpoints/c/written") == b"new"


def test_an_s3_checkpoint_compares_and_pickles_by_its_address(s3: Storage) -> None:
    manifest = saved(s3, Chain.take_over(s3, 1), "c", {"a": b"1"})
    checkpoint = checkpoint_of(s3, manifest)
    again = pickle.loads(pickle.dumps(checkpoint))
    assert again == checkpoint
    assert hash(again) == hash(checkpoint)
    assert again.path == checkpoint.path
    assert checkpoint.path.startswith("s3://bucket/")
    assert checkpoint != Checkpoint(s3.uri)
    assert "secret_key=testing" in s3.uri
    assert "testing" not in checkpoint.path.removeprefix("s3://bucket/")
    assert "testing" not in repr(checkpoint)
    filesystem = pickle.loads(pickle.dumps(checkpoint.filesystem))
    assert filesystem == checkpoint.filesystem
    assert filesystem.open_input_stream(f"{checkpoint.path}/a").read() == b"1"


def test_a_dict_can_be_read_from_a_remote_checkpoint(s3: Storage) -> None:
    with Checkpoint.from_dict({"epoch": 3}).as_directory() as path:
        data = Path(path, "dict.pt").read_bytes()
    chain = Chain.take_over(s3, 1)
    assert checkpoint_of(s3, saved(s3, chain, "c", {"dict.pt": data})).to_dict() == {"epoch": 3}
    with pytest.raises(CheckpointError, match="not made with from_dict"):
        checkpoint_of(s3, saved(s3, chain, "d", {"a": b"1"})).to_dict()


def test_a_users_own_remote_directory_is_a_checkpoint_without_a_manifest(s3: Storage, tmp_path: Path) -> None:
    for name, content in FILES.items():
        s3.put(f"mine/{name}", content)
    s3.put("mine/MANIFEST.json", b'{"mine": true}')
    checkpoint = Checkpoint(s3.child("mine").uri)
    assert contents(checkpoint.to_directory(tmp_path / "copy")) == {
        **FILES,
        "MANIFEST.json": b'{"mine": true}',
    }
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"a": 1})
    assert s3.get("mine/.metadata.json") == b'{"a": 1}'
    with pytest.raises(CheckpointError, match="nothing lies there"):
        Checkpoint(s3.child("absent").uri).to_directory(tmp_path / "absent")


def test_damage_to_any_remote_file_is_found_and_the_one_before_is_used(s3: Storage) -> None:
    chain = Chain.take_over(s3, 1)
    good = saved(s3, chain, "c1", {"a": b"1"}, row=1)
    bad = saved(s3, chain, "c2", {"a": b"12", "b/c": b"345"}, row=2, metadata={"k": 1})
    checkpoint = checkpoint_of(s3, bad)
    for entry in s3.list("checkpoints/c2"):
        whole = s3.get(entry.key)
        s3.put(entry.key, whole[:-1] + bytes([whole[-1] ^ 1]))
        told: list[str] = []
        assert newest_verified(s3, told.append) == good, entry.key
        assert "c2" in told[0]
        assert "'c1' (row 1) is whole and is used instead" in told[1]
        with pytest.raises(CheckpointError), checkpoint.as_directory():
            pass
        s3.put(entry.key, whole)
    s3.delete("checkpoints/c2/b/c")
    with pytest.raises(CheckpointError, match=r"'b/c'.*is missing"), checkpoint.as_directory():
        pass
    assert set_aside_newer(s3, good) == ["broken/c2-1"]
    assert committed(s3) == [good]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x"])
def test_a_manifest_that_climbs_out_writes_nothing(s3: Storage, tmp_path: Path, name: str) -> None:
    manifest = saved(s3, Chain.take_over(s3, 1), "c", {"a": b"1", "x": b"2"})
    fields = mf.unseal(s3.get("checkpoints/c/.powertrain-manifest.json"), "it")
    fields["files"].append({"name": name, "size": 1, "xxh3": "", "rank": 0})
    s3.put("checkpoints/c/.powertrain-manifest.json", mf.seal(fields))
    checkpoint = checkpoint_of(s3, manifest)
    with pytest.raises(CheckpointError, match="leads out"):
        checkpoint.to_directory(tmp_path / "deep" / "copy")
    with pytest.raises(CheckpointError, match="leads out"), checkpoint.as_directory():
        pass
    assert not (tmp_path / "deep").exists()


def test_a_void_checkpoint_and_one_of_another_schema_are_refused(s3: Storage, tmp_path: Path) -> None:
    manifest = saved(s3, Chain.take_over(s3, 1), "c", {"a": b"1"})
    fields = mf.unseal(s3.get("checkpoints/c/.powertrain-manifest.json"), "it")
    for content, says in ((mf.seal({**fields, "schema": 9}), "schema 9"), (mf.void(2), "given up")):
        s3.put("checkpoints/c/.powertrain-manifest.json", content)
        with pytest.raises(CheckpointError, match=says):
            checkpoint_of(s3, manifest).to_directory(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_a_controller_that_was_taken_over_cannot_commit_to_s3(s3: Storage) -> None:
    first = Chain.take_over(s3, 1)
    saved(s3, first, "c1", {"a": b"1"})
    second = Chain.take_over(s3, 2)
    with pytest.raises(FencedError, match="lease 2"):
        saved(s3, first, "c2", {"a": b"2"})
    saved(s3, second, "c2-2", {"a": b"2"})
    assert [manifest.name for manifest in committed(s3)] == ["c1", "c2-2"]


# --------------------------------------------------------------------------- one download per node


def test_all_users_share_one_copy_and_the_last_removes_it(
    s3: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoint_of(s3, saved(s3, Chain.take_over(s3, 1), "c", {"a": b"1"}))
    downloads = []
    real = cache.download

    def counted(storage: Storage, target: str | Path, *, shown: str) -> None:
        downloads.append(target)
        real(storage, target, shown=shown)

    monkeypatch.setattr(cache, "download", counted)
    with checkpoint.as_directory() as outer:
        with checkpoint.as_directory() as inner:
            assert inner == outer
        assert Path(outer, "a").read_bytes() == b"1"
        s3.put("checkpoints/c/.powertrain-metadata.json", mf.seal({"metadata": "{}"}))
        with checkpoint.as_directory() as other:
            assert other != outer, "what lies there is not the same any more"
    assert len(downloads) == 2
    assert list((tmp_path / "tmp" / f"powertrain-{os.getuid()}" / "checkpoints").iterdir()) == []


USER = """
import sys
from powertrain.checkpoint import Checkpoint
with Checkpoint(sys.argv[1]).as_directory() as path:
    print(path, flush=True)
    sys.stdin.readline()
"""


class _User:
    """Another process that uses a checkpoint until it is asked to leave."""

    def __init__(self, checkpoint: Checkpoint, tmp: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", USER, checkpoint.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp)},
        )

    def path(self) -> Path:
        assert self.process.stdout is not None
        return Path(self.process.stdout.readline().strip())

    def leave(self) -> None:
        self.process.communicate("\n")
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_processes_share_one_copy_and_what_killed_ones_leave_is_removed(s3: Storage, tmp_path: Path) -> None:
    chain = Chain.take_over(s3, 1)
    checkpoint = checkpoint_of(s3, saved(s3, chain, "c", {"a": b"1"}))
    other = checkpoint_of(s3, saved(s3, chain, "d", {"a": b"2"}))
    users = [_User(checkpoint, tmp_path / "tmp") for _ in range(3)]
    places = [user.path() for user in users]
    assert len(set(places)) == 1
    assert (places[0] / "a").read_bytes() == b"1"
    users[0].leave()
    assert (places[0] / "a").exists()
    users[1].kill()
    users[2].kill()
    assert (places[0] / "a").exists(), "nobody was left to remove it"
    unfinished = places[0].with_suffix(".part")
    unfinished.mkdir()
    with other.as_directory():
        assert not places[0].exists()
        assert not unfinished.exists()
    assert list(places[0].parent.iterdir()) == []


def test_a_cache_directory_that_leads_elsewhere_is_passed_over(s3: Storage, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(s3, saved(s3, Chain.take_over(s3, 1), "c", {"a": b"1"}))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tmp" / f"powertrain-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with checkpoint.as_directory() as directory:
        assert Path(directory, "a").read_bytes() == b"1"
        assert Path(directory).parents[1].parent == tmp_path / "tmp"
        assert Path(directory).parents[1].stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "elsewhere").iterdir()) == []
