"""Segments are made ready in the background, in pieces, before the first save needs them."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from powertrain.checkpoint.state import ahead as ahead_module
from powertrain.checkpoint.state import segments as segments_module
from powertrain.checkpoint.state import shared_memory as memory_module
from powertrain.checkpoint.state.ahead import SegmentAhead
from powertrain.checkpoint.state.saver import StateLoader, StateSaver
from powertrain.checkpoint.state.segments import Segments
from powertrain.checkpoint.state.shared_memory import SharedMemorySegment

PIECE = 64 * 1024
#: Ends a hang; nothing here takes so long.
PATIENCE = 30.0


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for module in (memory_module, ahead_module):
        monkeypatch.setattr(module, "PIECE", PIECE)
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


def test_a_segment_grows_only_where_memory_is_left(
    pool: Segments, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.expect(2 * PIECE, None)
    pool.wait_for_ahead()
    monkeypatch.setattr(segments_module, "room", lambda directory: PIECE)
    pool.expect(6 * PIECE, None)
    pool.wait_for_ahead()
    (file,) = shared.iterdir()
    assert file.stat().st_size == 2 * PIECE
    with pytest.raises(OSError, match="of shared memory are needed"):
        pool.take(6 * PIECE)


def left_behind(shared: Path, tmp_path: Path, *sizes: int) -> Segments:
    """Leave segments of a process that has died, which nothing needs; return the pool of its successor."""
    for number, size in enumerate(sizes):
        segment = SharedMemorySegment.create(str(shared / f"rank-00000-{number}"), size)
        segment.close(remove=False)
    return Segments(str(shared), "rank-00000", staging=str(tmp_path))


@pytest.mark.parametrize("expected", [2 * PIECE, 6 * PIECE])
def test_the_segment_of_a_dead_process_is_made_ready_although_only_its_model_is_known(
    shared: Path, tmp_path: Path, expected: int
) -> None:
    pool = left_behind(shared, tmp_path, 6 * PIECE)
    pool.expect(expected, None)
    pool.wait_for_ahead()
    segment = pool.take(6 * PIECE)
    assert (segment.path, segment.ready) == (str(shared / "rank-00000-0"), 6 * PIECE)
    pool.close()


def test_of_several_segments_that_fit_the_first_save_has_the_one_that_is_ready(
    shared: Path, tmp_path: Path
) -> None:
    pool = left_behind(shared, tmp_path, 6 * PIECE, 6 * PIECE)
    pool.expect(6 * PIECE, None)
    pool.wait_for_ahead()
    assert pool.take(6 * PIECE).ready == 6 * PIECE
    pool.close()


def test_a_file_whose_pages_its_dead_process_had_not_allocated_is_not_used(
    shared: Path, tmp_path: Path
) -> None:
    file = shared / "rank-00000-0"
    file.touch()
    os.truncate(file, 6 * PIECE)
    pool = Segments(str(shared), "rank-00000", staging=str(tmp_path))
    assert pool.take(6 * PIECE).path != str(file)
    pool.close()


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


class Runtime:
    """CUDA's runtime, which refuses to pin from the ``refuses``-th piece on."""

    def __init__(self, refuses: int = 1000) -> None:
        self.refuses, self.pinned = refuses, set[int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if len(self.pinned) >= self.refuses:
            return 1
        self.pinned.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.pinned.remove(address)
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(memory_module, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(memory_module, "_forget_cuda_error", lambda: None)
    return runtime


def test_copies_are_cut_also_where_pinned_memory_ends_and_a_refusal_is_tried_again(
    shared: Path, runtime: Runtime
) -> None:
    segment = SharedMemorySegment.create(str(shared / "segment"), 5 * PIECE)
    runtime.refuses = 2
    while segment.ready < segment.size:
        segment.make_ready(segment.size, pinned=True)
    assert [cut - segment.address for cut in segment.cuts] == [0, PIECE, 2 * PIECE]
    assert not segment.pin()
    runtime.refuses = 1000
    assert segment.pin()
    assert [cut - segment.address for cut in segment.cuts] == [number * PIECE for number in range(6)]
    segment.close(remove=True)
    assert not runtime.pinned


@pytest.mark.parametrize("is_expected", [True, False])
@pytest.mark.parametrize("has_advice", [True, False], ids=["Linux 5.14", "older"])
def test_a_state_is_whole_whatever_was_ready_before(
    shared: Path,
    runtime: Runtime,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_advice: bool,
    is_expected: bool,
) -> None:
    """Where Linux cannot map pages beforehand, they are filled with zeros."""
    if not has_advice:
        libc = types.SimpleNamespace(madvise=lambda *arguments: -1)
        monkeypatch.setattr(memory_module, "_libc", lambda: libc)
    fill: Any = StateSaver._fill
    monkeypatch.setattr(StateSaver, "_fill", lambda saver, *given: fill(saver, *given[:2], 0))
    saver = StateSaver(0, 1, segments=str(shared))
    model = torch.nn.Linear(300, 300)
    if is_expected:
        assert saver._segments is not None
        saver._segments.expect(2 * PIECE, None)
    for number in range(3):
        directory = tmp_path / str(number)
        directory.mkdir()
        with torch.no_grad():
            model.weight.fill_(number + 1)
        saver.save({"model": model}, str(directory))
        loaded = torch.nn.Linear(300, 300)
        StateLoader(str(directory), 0, 1).load({"model": loaded}, generators=False)
        assert torch.equal(loaded.weight, model.weight)
    saver.close()
