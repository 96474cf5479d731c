"""Files that are rows, or arrays of rows: what their fingerprints see, and how much of them is read."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem

from powertrain import data
from powertrain.data.sources.files import images
from powertrain.data.sources.files.arrays import NumpySource
from powertrain.data.sources.files.files import file_paths


class CountingFiles(LocalFileSystem):
    """A file system that counts the bytes read."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.bytes_read = 0

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        counting = self

        class Counted(io.FileIO):
            def read(self, size: int | None = -1) -> bytes:
                found = super().read(-1 if size is None else size)
                counting.bytes_read += len(found)
                return found

        return Counted(path)


def test_a_block_of_an_array_in_a_store_is_read_alone(tmp_path: Path) -> None:
    whole = np.arange(100_000, dtype=np.int32).reshape(1000, 10, 10)
    np.save(tmp_path / "x.npy", whole)
    files = CountingFiles()
    source = NumpySource(file_paths(str(tmp_path), None, filesystem=files), block_bytes=40_000)
    blocks = source.inspect().blocks
    assert len(blocks) == 10
    files.bytes_read = 0
    [batch] = source.read(7)
    assert 40_000 <= files.bytes_read < 50_000
    assert (
        np.array(batch.column(0).to_pylist(), np.int32).reshape(100, 10, 10).tolist()
        == whole[700:800].tolist()
    )


def fingerprint(path: Path) -> str:
    return data.read_binary_files(str(path)).plan.inspected().fingerprint


def test_a_file_replaced_by_one_of_its_size_changes_the_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    before = fingerprint(tmp_path)
    (tmp_path / "a").write_bytes(b"two")
    assert fingerprint(tmp_path) != before
    (tmp_path / "a").write_bytes(b"one")
    os.utime(tmp_path / "a", (1, 1))
    assert fingerprint(tmp_path) == before


def test_positions_of_older_versions_stay_valid(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    inspected = data.read_binary_files(str(tmp_path)).plan.inspected()
    (tmp_path / "a").write_bytes(b"two")
    changed = data.read_binary_files(str(tmp_path)).plan.inspected()
    assert inspected.earlier_fingerprint == changed.earlier_fingerprint != inspected.fingerprint


def test_of_very_many_files_some_are_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "MOST_SAMPLED_FILES", 2)
    for number in range(5):
        (tmp_path / f"{number}").write_bytes(b"one")
    before = fingerprint(tmp_path)
    (tmp_path / "1").write_bytes(b"two")
    assert fingerprint(tmp_path) == before
    (tmp_path / "3").write_bytes(b"two")
    assert fingerprint(tmp_path) != before
