"""Segments are made ready in the background, in pieces, before the first save needs them."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from powertrain.checkpoint.state import segments as segments_module
from powertrain.checkpoint.state import shared_memory as memory_module
from powertrain.checkpoint.state.ahead import SegmentAhead
from powertrain.checkpoint.state.segments import Segments
from powertrain.checkpoint.state.shared_memory import SharedMemorySegment

PIECE = 64 * 1024
#: Ends a hang; nothing here takes so long.
PATIENCE = 30.0


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(memory_module, "PIECE", PIECE)
    directory = tempfile.mkdtemp(prefix="powertrain-test-", dir="/dev/shm")
    yield Path(directory)
    shutil.rmtree(directory)


@pytest.fixture
def pool(shared: Path) -> Iterator[Segments]:
    pool = Segments(str(shared), "rank-00000")
    yield pool
    pool.close()


def allocated(path: str) -> int:
    """Bytes of memory that a file really has."""
    return os.stat(path).st_blocks * 512


def test_a_first_segment_is_made_ready_up_to_the_expected_size(pool: Segments, shared: Path) -> None:
    pool.expect(5 * PIECE, None)
    pool.wait_for_ahead()
    (file,) = shared.iterdir()
    assert file.stat().st_size == allocated(str(file)) == 5 * PIECE
    segment = pool.take(5 * PIECE)
    assert (segment.path, segment.ready) == (str(file), 5 * PIECE)


def test_a_larger_expectation_continues_the_same_segment(pool: Segments, shared: Path) -> None:
    pool.expect(2 * PIECE, None)
    pool.wait_for_ahead()
    pool.expect(6 * PIECE, None)
    pool.wait_for_ahead()
    (file,) = shared.iterdir()
    assert file.stat().st_size == 6 * PIECE


@pytest.mark.parametrize("size", [PIECE // 2, 3 * PIECE - 5, 3 * PIECE + 4097, 8 * PIECE])
def test_a_save_gets_exactly_its_size_whatever_was_expected(pool: Segments, shared: Path, size: int) -> None:
    pool.expect(3 * PIECE, None)
    pool.wait_for_ahead()
    segment = pool.take(size)
    (file,) = shared.iterdir()
    assert (segment.size, file.stat().st_size) == (size, size)
    segment.map[size - 1] = 7  # every byte can be written
    assert segment.ready <= size


def test_a_state_far_larger_than_expected_has_a_segment_of_its_own(pool: Segments, shared: Path) -> None:
    pool.expect(PIECE, None)
    segment = pool.take(20 * PIECE)
    assert [str(file) for file in shared.iterdir()] == [segment.path]
    assert segment.size == 20 * PIECE


def test_nothing_is_made_ahead_where_memory_is_short(
    pool: Segments, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "room", lambda directory: 3 * PIECE)
    pool.expect(2 * PIECE, None)
    assert not list(shared.iterdir())


def test_nothing_is_made_ahead_after_a_save(pool: Segments, shared: Path) -> None:
    pool.take(PIECE)
    pool.expect(5 * PIECE, None)
    assert len(list(shared.iterdir())) == 1


def test_memory_that_runs_out_meanwhile_leaves_the_save_to_report_it(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = SharedMemorySegment.create(str(shared / "segment"), 0, reserve=8 * PIECE)
    allocate = os.posix_fallocate

    def fill_up(descriptor: int, offset: int, length: int) -> None:
        if offset >= 2 * PIECE:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fill_up)
    ahead = SegmentAhead(segment, None)
    ahead.expect(5 * PIECE)
    ahead.wait()
    assert ahead.take().size == 2 * PIECE
    with pytest.raises(OSError, match="No space left"):
        segment.resize(5 * PIECE)
    segment.close(remove=True)


def test_taking_it_early_stops_after_the_piece_under_way(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = SharedMemorySegment.create(str(shared / "segment"), 0, reserve=1000 * PIECE)
    ahead = SegmentAhead(segment, None)
    make_ready = SharedMemorySegment.make_ready
    has_third, is_taken = threading.Event(), threading.Event()

    def make_three(one: SharedMemorySegment, until: int, *, pinned: bool) -> None:
        make_ready(one, until, pinned=pinned)
        if one.ready == 3 * PIECE:
            has_third.set()
            assert is_taken.wait(PATIENCE)

    def wait() -> None:
        is_taken.set()
        SegmentAhead.wait(ahead)

    monkeypatch.setattr(SharedMemorySegment, "make_ready", make_three)
    monkeypatch.setattr(ahead, "wait", wait)
    ahead.expect(1000 * PIECE)
    assert has_third.wait(PATIENCE)
    assert ahead.take().ready == 3 * PIECE
    segment.close(remove=True)


def test_closing_removes_what_was_made_ahead(shared: Path) -> None:
    pool = Segments(str(shared), "rank-00000")
    pool.expect(5 * PIECE, None)
    pool.close()
    assert not list(shared.iterdir())
