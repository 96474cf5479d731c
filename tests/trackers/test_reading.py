"""Points are read once each, in order, while the store moves them from the spool to segments and merges these."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trackers.recorded import RecordedRun, loss

from powertrain.run.metrics import store
from powertrain.trackers.reading import PointReader, ReadPosition


def read_on(reader: PointReader, position: ReadPosition, limit: int = 100) -> list[tuple[int, int]]:
    """(attempt, row) of a page, which is then dealt with."""
    page = reader.page(position, limit)
    reader.advance(page)
    return [(stored.attempt, stored.point.step) for stored in page.points]


def test_rows_of_rank_0_are_read_and_solo_reports_are_not(run: RecordedRun) -> None:
    run.report([1, 2], rank=1)
    run.report([1, 2, 3])
    run.report([0])
    page = PointReader(run.storage).page(ReadPosition(), 10)
    assert [stored.point.step for stored in page.points] == [1, 2, 3]
    assert page.points[2].point.metrics == {"loss": loss(0, 3)}
    assert not page.is_full


def test_nested_metrics_have_their_path_as_name_and_only_numbers_are_numbers(run: RecordedRun) -> None:
    run.report([1], eval={"acc": 0.5, "top": {"5": 1}}, note="text", flag=True, many=[1, 2], none=None)
    ((_, point),) = PointReader(run.storage).page(ReadPosition(), 10).points
    assert point.metrics == {
        "eval/acc": 0.5,
        "eval/top/5": 1,
        "note": "text",
        "flag": True,
        "many": [1, 2],
        "none": None,
    }
    assert point.numbers == {"eval/acc": 0.5, "eval/top/5": 1.0}


def test_a_reader_with_a_position_is_given_later_rows_and_newer_attempts(run: RecordedRun) -> None:
    run.report([1, 2, 3], attempt=0)
    run.report([2, 3], attempt=1)
    reader = PointReader(run.storage)
    assert read_on(reader, ReadPosition(0, 2)) == [(0, 3), (1, 2), (1, 3)]
    assert read_on(PointReader(run.storage), ReadPosition(1, 2)) == [(1, 3)]
    assert PointReader(run.storage).count(ReadPosition(0, 1)) == 4


@given(st.lists(st.integers(1, 7), min_size=1, max_size=12), st.integers(1, 20))
def test_each_point_is_read_once_whatever_the_store_does_meanwhile(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "SEGMENT_POINTS", 4)
        run = RecordedRun(tmp_path_factory.mktemp("runs") / "run")
        run.begin(0)
        reader, position, read, row = PointReader(run.storage), ReadPosition(), [], 0
        for size in sizes:
            run.report(range(row + 1, row + size + 1))
            row += size
            for found in read_on(reader, position, limit):
                read.append(found)
                position = ReadPosition(*found)
        run.close()
        while found_now := read_on(reader, position, limit):
            read += found_now
            position = ReadPosition(*read[-1])
    assert read == [(0, number) for number in range(1, row + 1)]


def test_segments_that_were_dealt_with_are_not_opened_again(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.report(range(1, 101))
    run.close()
    reader = PointReader(run.storage)
    assert len(read_on(reader, ReadPosition(), 1000)) == 100
    opened: list[str] = []
    monkeypatch.setattr(store, "MetricSegment", lambda storage, key, size: opened.append(key))
    assert read_on(reader, ReadPosition(0, 100)) == []
    assert opened == []
