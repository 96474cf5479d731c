"""The newest reports of a rank survive it: all that were just made, complete, and within a bounded file."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.wire.values import CheckpointPart, Point
from powertrain.worker.checkpoints.newest_reports import HALF_BYTES, NewestReports, read_newest_reports


def point(row: int, **metrics: Any) -> Point:
    return Point(row=row, at=float(row), metrics=metrics)


@given(sizes=st.lists(st.integers(0, HALF_BYTES // 3), max_size=40), after=st.integers(0, 40))
def test_the_reports_that_fit_into_one_half_are_always_there(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], after: int
) -> None:
    path = str(tmp_path_factory.mktemp("reports") / "0-0")
    newest = NewestReports(path)
    made = [point(row, text="x" * size) for row, size in enumerate(sizes, start=1)]
    for one in made:
        newest.add(one)
    newest.close()
    row, found = read_newest_reports(path, after)
    assert row == len(made)
    assert found == made[len(made) - len(found) :], "the newest, each once and in order"
    if len(found) < len(made) - after:
        assert sum(len(one.metrics["text"]) + 64 for one in made[-len(found) - 1 :]) > HALF_BYTES
    assert all(one.row > after for one in found)


@given(sizes=st.lists(st.integers(0, HALF_BYTES // 3), min_size=1, max_size=40))
def test_all_reports_since_the_last_one_that_asked_to_be_sent_are_there(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = str(tmp_path_factory.mktemp("reports") / "0-0")
    newest = NewestReports(path)
    unsent: list[Point] = []
    for row, size in enumerate(sizes, start=1):
        unsent.append(point(row, text="x" * size))
        if not newest.add(unsent[-1]):
            assert read_newest_reports(path).reports[-len(unsent) :] == unsent, "until it is sent"
            unsent = []
    newest.close()
    assert not unsent or read_newest_reports(path).reports[-len(unsent) :] == unsent


def test_only_the_row_of_a_report_is_kept_whose_values_are_pending_or_too_large_or_sealed(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "marks" / "0-0")
    newest = NewestReports(path)
    assert newest.add(point(1, loss=1.0))
    assert not newest.add(point(2, loss=1.0), is_pending=True)
    assert not newest.add(point(3, text="x" * HALF_BYTES))
    share = CheckpointPart(checkpoint="", files=[])
    assert not newest.add(Point(row=4, at=0.0, metrics={}, part=share))
    assert newest.add(point(5, loss=2.0))
    newest.close()
    assert read_newest_reports(path) == (5, [point(1, loss=1.0), point(5, loss=2.0)])


def test_a_full_disk_costs_the_metrics_and_not_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    path = str(tmp_path / "0-0")
    newest = NewestReports(path)
    newest.add(point(7, loss=1.0))
    newest.close()
    assert read_newest_reports(path) == (7, [])


@pytest.mark.parametrize("content", [b"", b"\0" * 16, b"\xff" * 200_000, b"\0" * 8 + b"\x01" * 140_000])
def test_a_file_that_was_not_written_whole_gives_no_report(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "0-0"
    path.write_bytes(content)
    assert read_newest_reports(str(path)).reports == []


def test_a_file_with_a_damaged_report_gives_those_before_it(tmp_path: Path) -> None:
    path = tmp_path / "0-0"
    newest = NewestReports(str(path))
    for row in (1, 2, 3):
        newest.add(point(row, text="two words"))
    newest.close()
    content = bytearray(path.read_bytes())
    second = content.index(b"two words", content.index(b"two words") + 1)
    content[second] = 0xFF
    path.write_bytes(content)
    assert read_newest_reports(str(path)) == (3, [point(1, text="two words")])


def test_a_rank_without_a_file_has_no_reports(tmp_path: Path) -> None:
    assert read_newest_reports(str(tmp_path / "missing")) == (0, [])


def report_until_killed(path: str) -> None:
    newest = NewestReports(path)
    for row in range(1, 10**9):
        newest.add(point(row, text="x" * (row % 4000)))


def test_a_process_that_is_killed_while_it_reports_leaves_whole_reports(tmp_path: Path) -> None:
    path = str(tmp_path / "0-0")
    rank = multiprocessing.get_context("fork").Process(target=report_until_killed, args=(path,))
    rank.start()
    while read_newest_reports(path).row < 200:
        assert rank.is_alive()
    os.kill(rank.pid or 0, signal.SIGKILL)
    rank.join()
    row, found = read_newest_reports(path)
    rows = [one.row for one in found]
    assert rows == list(range(rows[0], rows[0] + len(rows)))
    assert len(rows) > 10
    assert rows[-1] in (row, row + 1), "the row is marked after its report"
    assert all(one.metrics == {"text": "x" * (one.row % 4000)} for one in found)
