"""Segments are used again as soon as no reader needs them, and never before."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from powertrain.checkpoint.state import segments as module
from powertrain.checkpoint.state.segments import Segments

SIZE = 64 * 1024


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory in shared memory, and none made ahead unless a test asks for it."""
    monkeypatch.setattr(module, "_PLENTY", 2**60)
    directory = tempfile.mkdtemp(prefix="powertrain-test-", dir="/dev/shm")
    yield Path(directory)
    shutil.rmtree(directory)


@pytest.fixture
def pool(shared: Path) -> Iterator[Segments]:
    pool = Segments(str(shared), "rank-00000")
    yield pool
    pool.close()


def lend(pool: Segments, directory: Path, content: bytes = b"x") -> str:
    """Fill a segment, link it into a new staged directory; the path of the segment."""
    segment = pool.take(SIZE)
    segment.map[: len(content)] = content
    directory.mkdir()
    segment.link_at(str(directory / "file"))
    return segment.path


def test_a_segment_is_free_again_when_its_staged_directory_is_gone(pool: Segments, tmp_path: Path) -> None:
    first = lend(pool, tmp_path / "a")
    second = lend(pool, tmp_path / "b")
    assert first != second, "the first is still being read"
    shutil.rmtree(tmp_path / "a")
    assert lend(pool, tmp_path / "c") == first


def test_a_staged_directory_that_was_moved_still_holds_its_segment(pool: Segments, tmp_path: Path) -> None:
    first = lend(pool, tmp_path / "open", b"hello")
    (tmp_path / "row-1").mkdir()
    os.rename(tmp_path / "open", tmp_path / "row-1" / "files")
    assert lend(pool, tmp_path / "b") != first
    assert (tmp_path / "row-1" / "files" / "file").read_bytes()[:5] == b"hello"
    shutil.rmtree(tmp_path / "row-1")
    assert lend(pool, tmp_path / "c") == first


def test_segments_of_another_size_make_way(pool: Segments, shared: Path, tmp_path: Path) -> None:
    old = lend(pool, tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    pool.take(2 * SIZE)
    assert not Path(old).exists()
    assert len(list(shared.iterdir())) == 1


def test_closing_leaves_what_is_still_needed(shared: Path, tmp_path: Path) -> None:
    pool = Segments(str(shared), "rank-00000")
    needed = lend(pool, tmp_path / "a", b"needed")
    lend(pool, tmp_path / "b")
    shutil.rmtree(tmp_path / "b")
    pool.close()
    assert [str(path) for path in shared.iterdir()] == [needed]
    assert (tmp_path / "a" / "file").read_bytes()[:6] == b"needed"


def test_too_little_shared_memory_is_an_error_that_says_how_little(
    pool: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "room", lambda directory: 2**20)
    with pytest.raises(OSError, match="8 MiB of shared memory are needed and 1 MiB are free") as caught:
        pool.take(8 * 2**20)
    assert caught.value.errno == errno.ENOSPC


def test_a_segment_that_cannot_be_allocated_leaves_nothing(
    pool: Segments, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        pool.take(SIZE)
    assert not list(shared.iterdir())


def test_a_container_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 300\nactive_file 50\n")
    assert module._container_memory(str(tmp_path)) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert module._container_memory(str(tmp_path)) > 2**60
    assert module._container_memory(str(tmp_path / "none")) > 2**60


def test_a_second_segment_is_made_ahead_where_memory_is_plenty(
    pool: Segments, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PLENTY", 1)
    first = lend(pool, tmp_path / "a")
    pool.make_one_ahead(SIZE)
    pool.make_one_ahead(SIZE)
    second = lend(pool, tmp_path / "b")
    assert {str(path) for path in shared.iterdir()} == {first, second}, "made once, and used"


#: What a rank does before it is killed: two segments, one of them still needed.
_DYING = """
import os, sys
from powertrain.checkpoint.state.segments import Segments
shared, staging, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
pool = Segments(shared, "rank-00000")
for name in ("needed", "uploaded"):
    os.mkdir(os.path.join(staging, name))
    pool.take(size).link_at(os.path.join(staging, name, "file"))
os._exit(0)
"""


def test_segments_of_a_dead_process_are_taken_over_once_they_are_uploaded(
    shared: Path, tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-c", _DYING, str(shared), str(tmp_path), str(SIZE)], check=True)
    needed = os.readlink(tmp_path / "needed" / "file")
    uploaded = os.readlink(tmp_path / "uploaded" / "file")
    shutil.rmtree(tmp_path / "uploaded")
    pool = Segments(str(shared), "rank-00000", staging=str(tmp_path))
    assert lend(pool, tmp_path / "a") == uploaded
    assert lend(pool, tmp_path / "b") not in (needed, uploaded)
    other = Segments(str(shared), "rank-00000", staging=str(tmp_path))
    assert lend(other, tmp_path / "c") not in (uploaded, needed), "the first pool lives"
    pool.close()
    other.close()
