from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest
from pyarrow import fs

from powertrain.errors import StorageError
from powertrain.storage import open_storage, probe
from powertrain.storage.adapter import FilesystemStorage
from powertrain.storage.base import TEMPORARY_PREFIX
from powertrain.storage.local import LocalStorage


def test_file_systems_of_this_machine_become_local_storage(tmp_path: Path) -> None:
    for filesystem in (fs.LocalFileSystem(), fsspec.filesystem("file")):
        storage = open_storage(str(tmp_path / "run"), filesystem=filesystem)
        assert isinstance(storage, LocalStorage)
        assert storage.uri == str(tmp_path / "run")
    below = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    assert open_storage("run", filesystem=below).uri == str(tmp_path / "run")


def test_others_are_adapted_and_say_what_they_lack() -> None:
    storage = open_storage("/runs", filesystem=fsspec.filesystem("memory"))
    assert isinstance(storage, FilesystemStorage)
    assert any("MemoryFileSystem" in sentence and "both win" in sentence for sentence in storage.lacks)
    assert any("survives a crash" in sentence for sentence in storage.lacks)
    assert not any("removing the old one" in sentence for sentence in storage.lacks)
    local = FilesystemStorage(fs.LocalFileSystem(), "/runs")
    assert any("removing the old one" in sentence for sentence in local.lacks)


def test_a_bucket_without_a_slash_is_a_path(tmp_path: Path) -> None:
    below = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    storage = FilesystemStorage(below, "bucket")
    storage.put("a/k", b"v")
    assert storage.list() == [("a/k", 1)]
    assert (tmp_path / "bucket" / "a" / "k").read_bytes() == b"v"


def test_something_else_is_refused_with_what_to_give() -> None:
    with pytest.raises(StorageError, match=r"neither a pyarrow\.fs\.FileSystem nor an fsspec"):
        open_storage("/x", filesystem=object()).get("k")
    with pytest.raises(StorageError, match="is empty"):
        open_storage("", filesystem=fsspec.filesystem("memory"))


def test_a_failed_write_leaves_the_old_value_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = FilesystemStorage(fs.LocalFileSystem(), str(tmp_path / "run"))
    storage.put("k", b"old")

    def broken(self: FilesystemStorage, old: str, new: str) -> None:
        raise OSError("no move today")

    monkeypatch.setattr(FilesystemStorage, "_replace", broken)
    with pytest.raises(OSError, match="no move today"):
        storage.put("k", b"new")
    assert storage.get("k") == b"old"
    assert os.listdir(tmp_path / "run") == ["k"]


def test_a_file_system_that_moves_onto_nothing_is_helped() -> None:
    class Careful(type(fsspec.filesystem("memory"))):  # type: ignore[misc]
        protocol = "careful"
        cachable = False

        def mv(self, old: str, new: str, **more: object) -> None:
            if self.exists(new):
                raise FileExistsError(new)
            super().mv(old, new, **more)

    storage = FilesystemStorage(Careful(), "/careful")
    storage.put("k", b"old")
    storage.put("k", b"new")
    assert storage.get("k") == b"new"
    assert storage.list() == [("k", 3)]


def test_sweep_removes_what_dead_writers_left(tmp_path: Path) -> None:
    storage = FilesystemStorage(fs.LocalFileSystem(), str(tmp_path))
    storage.put("d/k", b"v")
    old, new = (tmp_path / "d" / f"{TEMPORARY_PREFIX}elsewhere.1.{number}" for number in (1, 2))
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    assert storage.list() == [("d/k", 1)]
    assert storage.sweep() == 1
    assert not old.exists()
    assert new.exists()


def test_whatever_a_file_system_raises_the_probe_says_it_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def strange(self: FilesystemStorage, key: str, data: bytes) -> None:
        raise RuntimeError("token expired")

    monkeypatch.setattr(FilesystemStorage, "put", strange)
    with pytest.raises(StorageError, match=r"'/runs' cannot be used: RuntimeError: token expired\. Check"):
        probe(FilesystemStorage(fsspec.filesystem("memory"), "/runs"))
