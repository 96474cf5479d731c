from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from powertrain.checkpoint import Checkpoint
from powertrain.checkpoint.chain import Chain
from powertrain.checkpoint.commit import commit
from powertrain.checkpoint.committed import checkpoint_of, record_validation
from powertrain.checkpoint.manifest import ManifestFile, Validation
from powertrain.errors import CheckpointError, StorageError
from powertrain.storage import open_storage


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "ckpt" / "sub").mkdir(parents=True)
    (tmp_path / "ckpt" / "model.bin").write_bytes(b"weights")
    (tmp_path / "ckpt" / "sub" / "more.bin").write_bytes(b"more")
    return tmp_path / "ckpt"


def names(directory: str | Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in Path(directory).rglob("*") if p.is_file())


def test_as_directory_of_a_local_checkpoint_is_the_original(directory: Path) -> None:
    checkpoint = Checkpoint.from_directory(directory)
    with checkpoint.as_directory() as path:
        assert path == str(directory) == checkpoint.path
    assert directory.is_dir()


def test_to_directory_copies_into_the_place_given_or_a_new_one(directory: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(directory)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("stays")
    assert checkpoint.to_directory(tmp_path / "there") == str(tmp_path / "there")
    assert names(tmp_path / "there") == ["mine", "model.bin", "sub/more.bin"]
    copy = checkpoint.to_directory()
    try:
        assert names(copy) == ["model.bin", "sub/more.bin"]
    finally:
        subprocess.run(["rm", "-r", copy], check=True)


def test_a_copy_that_fails_leaves_no_temporary_directory(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    os.symlink("nowhere", directory / "broken.bin")
    for checkpoint in (Checkpoint(directory), Checkpoint("s3://KEY:SECRET/x@bucket")):
        with pytest.raises((OSError, StorageError)):
            checkpoint.to_directory()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_copies_show_no_manifest_of_ours_but_keep_a_users_own(directory: Path, tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "run")
    files = []
    for name in names(directory):
        digest = storage.put_file(f"checkpoints/c/{name}", directory / name)
        files.append(ManifestFile(name=name, size=digest.size, xxh3=digest.xxh3, rank=0))
    chain = Chain.take_over(storage, 1)
    manifest = commit(storage, chain, name="c", row=1, attempt=0, files=files, metrics={}, world_size=1)
    record_validation(storage, "c", Validation(status="VALIDATED"))
    checkpoint = checkpoint_of(storage, manifest)
    assert ".powertrain-manifest.json" in names(checkpoint.path)
    assert names(checkpoint.to_directory(tmp_path / "copy")) == ["model.bin", "sub/more.bin"]
    (directory / "MANIFEST.json").write_text('{"mine": true}')
    assert "MANIFEST.json" in names(Checkpoint(directory).to_directory(tmp_path / "other"))


@pytest.mark.parametrize("make", [lambda p: p / "absent", lambda p: p / "model.bin"])
def test_what_is_no_directory_is_named(directory: Path, make: object) -> None:
    path = make(directory)  # type: ignore[operator]
    checkpoint = Checkpoint(path)
    with pytest.raises(CheckpointError, match=r"does not exist|is a file") as caught:
        checkpoint.to_directory()
    assert str(path) in str(caught.value)
    with pytest.raises(CheckpointError), checkpoint.as_directory():
        pass


def test_metadata_is_set_updated_and_read(directory: Path) -> None:
    checkpoint = Checkpoint(directory)
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"a": 1})
    checkpoint.update_metadata({"b": [2]})
    assert Checkpoint(directory).get_metadata() == {"a": 1, "b": [2]}
    checkpoint.set_metadata({"c": 3})
    assert checkpoint.get_metadata() == {"c": 3}
    assert names(directory) == [".metadata.json", "model.bin", "sub/more.bin"]


def test_metadata_that_json_cannot_say_and_a_damaged_file_are_clear_errors(directory: Path) -> None:
    checkpoint = Checkpoint(directory)
    checkpoint.set_metadata({"a": 1})
    with pytest.raises(CheckpointError, match="cannot be attached"):
        checkpoint.set_metadata({"a": object()})
    assert checkpoint.get_metadata() == {"a": 1}
    (directory / ".metadata.json").write_text('{"a"')
    with pytest.raises(CheckpointError, match="not JSON"):
        checkpoint.get_metadata()


def test_dicts_of_tensors_numbers_and_arrays_come_back() -> None:
    data: dict[str, Any] = {
        "w": torch.arange(3.0),
        "epoch": 4,
        "a": np.arange(2),
        "s": np.float64(0.5),
        "n": {"x": [None, "t"]},
    }
    checkpoint = Checkpoint.from_dict(data)
    again = checkpoint.to_dict()
    assert torch.equal(again["w"], data["w"])
    assert np.array_equal(again["a"], data["a"])
    assert (again["epoch"], again["s"], again["n"]) == (4, 0.5, {"x": [None, "t"]})


def test_the_directory_of_from_dict_goes_with_its_last_reference_but_not_from_a_forked_child() -> None:
    """In a process of its own: in a child of this one, threads of other tests may have left locks that are held."""
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=100)


FORKS = """
import gc, os
from powertrain.checkpoint import Checkpoint

checkpoint = Checkpoint.from_dict({"a": 1})
path = checkpoint.path
child = os.fork()
if child == 0:
    del checkpoint
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert checkpoint.to_dict() == {"a": 1}
del checkpoint
gc.collect()
assert not os.path.exists(path)
"""


class _Own:
    pass


def test_a_dict_that_could_only_be_read_by_running_code_is_refused_at_once() -> None:
    with pytest.raises(CheckpointError, match="_Own"):
        Checkpoint.from_dict({"model": _Own()})
    with pytest.raises(CheckpointError, match="takes a dict"):
        Checkpoint.from_dict([1])  # type: ignore[arg-type]


def test_to_dict_of_a_directory_and_of_a_damaged_file_are_clear_errors(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="from_dict"):
        Checkpoint(directory).to_dict()
    (directory / "dict.pt").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint(directory).to_dict()


def test_checkpoints_compare_hash_and_pickle_by_place(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(directory)
    checkpoint = Checkpoint(directory)
    assert checkpoint == Checkpoint(tmp_path / "alias") == pickle.loads(pickle.dumps(checkpoint))
    assert hash(checkpoint) == hash(Checkpoint(tmp_path / "alias"))
    assert checkpoint != Checkpoint(tmp_path)
    assert checkpoint != str(directory)
    assert str(directory) in repr(checkpoint)


def test_a_file_address_and_a_local_filesystem_are_the_same_place(directory: Path) -> None:
    from pyarrow import fs

    checkpoint = Checkpoint(f"file://{directory}")
    assert checkpoint.path == str(directory)
    assert checkpoint == Checkpoint(directory) == Checkpoint(directory, fs.LocalFileSystem())
    below = Checkpoint("ckpt", fs.SubTreeFileSystem(str(directory.parent), fs.LocalFileSystem()))
    assert below == checkpoint
    assert below.path == "ckpt"
    with below.as_directory() as path:
        assert path == str(directory), "no copy when local"
    assert below.filesystem.open_input_stream("ckpt/model.bin").read() == b"weights"


def test_filesystem_is_pyarrows_local_one(directory: Path) -> None:
    checkpoint = Checkpoint(directory)
    assert checkpoint.filesystem.get_file_info(checkpoint.path).is_file is False
    assert checkpoint.filesystem.type_name == "local"


def test_importing_checkpoints_imports_neither_torch_nor_pyarrow() -> None:
    script = (
        "import sys, powertrain.checkpoint, powertrain.checkpoint.commit, powertrain.checkpoint.retention\n"
        "assert not {'torch', 'pyarrow', 'pandas', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
