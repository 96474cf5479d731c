from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.s3_server import S3Server
from tests.support.examples import scaled

from powertrain.data.sources.files import object_files
from powertrain.run.lifecycle import Branch, RunState
from powertrain.run.metrics import points, reading
from powertrain.run.metrics import segments as metric_segments
from powertrain.run.metrics import store as metrics_store
from powertrain.run.metrics.curves import Curve, curve, metric_names
from powertrain.run.metrics.points import PointRecord, flatten, table_of
from powertrain.run.metrics.reading import dataframe
from powertrain.run.metrics.segments import MetricSegment, encode_segment, merged
from powertrain.run.metrics.spool import Spool, pieces_of
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.metrics.summary import STRETCH_ROWS
from powertrain.storage import Storage, open_storage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def point(
    row: int, value: Any = None, *, rank: int = 0, attempt: int = 0, solo: bool = False, **metrics: Any
) -> PointRecord:
    return PointRecord(rank, attempt, row, 0.0, solo, metrics or {"loss": value})


def kept(storage: Storage, records: list[PointRecord], lease: int = 1) -> None:
    store = MetricsStore(storage, lease)
    store.add(records)
    store.close()


# --------------------------------------------------------------------------- as if computed naively

numbers = st.floats() | st.integers(-5, 5)
values = numbers | numbers | st.sampled_from([None, "text", True, [1], 2**63])
metric_dicts = st.fixed_dictionaries(
    {}, optional={"loss": values, "n": st.fixed_dictionaries({}, optional={"loss": numbers}), "rank": values}
)


@st.composite
def lineages(draw: st.DrawFn) -> tuple[list[PointRecord], RunState]:
    """Points of some ranks over some attempts, each of which begins where the one before had been or earlier."""
    records, branches, first = [], [], 1
    spread = draw(st.sampled_from([2, 40, 400, 4000]))
    for attempt in range(draw(st.integers(1, 3))):
        branches.append(Branch(attempt, first))
        rows = sorted(draw(st.sets(st.integers(first, first + spread), max_size=14)))
        for row in rows:
            for rank in draw(st.permutations([0, 1])):
                at = attempt * 1000.0 + row / 7
                records.append(PointRecord(rank, attempt, row, at, False, draw(metric_dicts)))
        for _ in range(draw(st.integers(0, 1))):
            records.append(PointRecord(0, attempt, 0, 0.0, True, draw(metric_dicts)))
        first = draw(st.integers(1, rows[-1] + 1)) if rows else first
    if draw(st.booleans()) and len(records) > 2:  # what a dead rank had left may come late
        records[0], records[1] = records[1], records[0]
    return records, RunState(branches=tuple(branches))


def store_in_pieces(draw: Callable[[Any], Any], storage: Storage, records: list[PointRecord]) -> None:
    """As segments of any sizes, some of them merged (of these, some without deleting what they were made of), the
    newest points in the spool."""
    segments, number = [], 1
    while records and draw(st.integers(0, 9)):
        count = draw(st.integers(1, 9))
        table, records = table_of(records[:count]), records[count:]
        segments.append(
            put(storage, number, number, encode_segment(table.to_batches(), table.schema, number, number))
        )
        number += 1
    while len(segments) > 1 and draw(st.integers(0, 3)):
        start = draw(st.integers(0, len(segments) - 2))
        group = segments[start : start + draw(st.integers(2, 4))]
        first, last = group[0].footer.first, group[-1].footer.last
        segments[start : start + len(group)] = [put(storage, first, last, merged(group)[0])]
        if draw(st.booleans()):
            for one in group:
                storage.delete(one.key)
    if records:
        spool = Spool(storage, 1)
        spool.append(pieces_of(records), number)
        spool.close(keep=True)


def put(storage: Storage, first: int, last: int, data: bytes) -> MetricSegment:
    key = metrics_store._segment_key(1, first, last)
    storage.put(key, data)
    return MetricSegment(storage, key, len(data))


def naively(records: list[PointRecord], state: RunState, column: str, pixels: int, rank: int) -> Curve:
    live = [r for r in records if r.rank == rank and not r.solo and state.is_live(r.attempt, r.row)]
    live.sort(key=lambda record: record.row)
    found: dict[int, list[float]] = {}
    width = width_of(live[0].row, live[-1].row, pixels) if live else 1
    for record in live:
        leaves = dict(flatten("", record.metrics)) if record.metrics else {}
        value: Any = record.at if column == "at" else leaves.get(f"/{column}")
        if type(value) in (int, float):
            found.setdefault(record.row // width, []).append(float(value))
    columns = [(max(pixel * width, live[0].row), *lowest_highest_last(v)) for pixel, v in found.items()]
    rows, low, high, last = zip(*columns, strict=True) if columns else ((), (), (), ())
    values = sum(map(len, found.values()))
    return Curve(np.array(rows), np.array(low), np.array(high), np.array(last), values)


def lowest_highest_last(values: list[float]) -> tuple[float, float, float]:
    ordered = [value for value in values if not math.isnan(value)] or [math.nan]
    return min(ordered), max(ordered), values[-1]


def width_of(first: int, last: int, pixels: int) -> int:
    width = 1
    while last // width - first // width >= pixels:
        width += 1 if width < STRETCH_ROWS else STRETCH_ROWS
    return width


def assert_same(one: Curve, other: Curve) -> None:
    assert one.points == other.points
    for name in ("rows", "low", "high", "last"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@given(data=st.data(), lineage=lineages(), pixels=st.sampled_from([1, 3, 20, 1000]), rank=st.integers(0, 2))
@settings(max_examples=scaled(100), deadline=None)
def test_a_curve_is_what_a_naive_computation_over_all_points_gives(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    lineage: tuple[list[PointRecord], RunState],
    pixels: int,
    rank: int,
) -> None:
    records, state = lineage
    storage = open_storage(tmp_path_factory.mktemp("run"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metric_segments, "BATCH_POINTS", data.draw(st.sampled_from([1, 3, 8, 10_000])))
        patch.setattr(points, "MAX_COLUMNS", data.draw(st.sampled_from([1, 512])))
        patch.setattr(metric_segments, "MAX_COLUMNS", points.MAX_COLUMNS)
        store_in_pieces(data.draw, storage, records)
        assert len(dataframe(storage, state, abandoned=True)) == len(records)
        columns = {"loss": "loss", "n/loss": "n/loss", "reported/rank": "rank", "timestamp": "at"}
        for name, column in columns.items():
            found = curve(storage, state, name, pixels=pixels, rank=rank)
            assert_same(found, naively(records, state, column, pixels, rank))
            assert len(found.rows) <= pixels
            first, last = sorted(data.draw(st.tuples(*[st.integers(0, 4100)] * 2), "rows"))
            inside = [record for record in records if first <= record.row <= last]
            zoomed = curve(storage, state, name, pixels=pixels, rank=rank, rows=(first, last))
            assert_same(zoomed, naively(inside, state, column, pixels, rank))


# --------------------------------------------------------------------------- what it promises


def test_an_empty_run_an_unknown_metric_and_an_absent_rank_have_empty_curves(storage: Storage) -> None:
    assert metric_names(storage, RunState()) == []
    assert curve(storage, RunState(), "loss").points == 0
    kept(storage, [point(1, 0.5)])
    for name, rank in (("other", 0), ("loss", 7)):
        found = curve(storage, RunState(), name, rank=rank)
        assert found.points == len(found.rows) == len(found.low) == len(found.high) == len(found.last) == 0


def test_names_are_those_of_numbers_in_rows_in_order_of_appearance(storage: Storage) -> None:
    first = point(1, z=0.5, text="x", n={"b": 1}, flag=True, mixed="x", rank=0)
    kept(storage, [first, PointRecord(0, 0, 2, 0.0, False, {"rank": 3, "mixed": 2, "a": None})])
    kept(storage, [point(0, solo=True, only_solo=1), point(3, late=math.nan, z=1)], lease=2)
    names = metric_names(storage, RunState())
    assert names == ["z", "n/b", "mixed", "reported/rank", "late"]
    assert set(names) < set(dataframe(storage, RunState()).columns)


def test_nan_is_a_last_value_but_neither_smallest_nor_largest(storage: Storage) -> None:
    kept(
        storage,
        [point(1, 2.0), point(2, math.inf), point(3, math.nan), point(64, math.nan), point(65, math.nan)],
    )
    found = curve(storage, RunState(), "loss", pixels=2)
    assert found.rows.tolist() == [1, 33]
    assert repr(found.low.tolist()) == "[2.0, nan]"
    assert repr(found.high.tolist()) == "[inf, nan]"
    assert repr(found.last.tolist()) == "[nan, nan]"
    assert found.points == 5


def test_all_metrics_of_a_rank_have_the_same_pixels(storage: Storage) -> None:
    def eval_of(row: int) -> dict[str, Any]:
        return {"eval": 2.0} if row % 300 == 0 else {}

    records = [point(row, loss=1.0, **eval_of(row)) for row in range(1, 3001)]
    kept(storage, records)
    dense, sparse = (curve(storage, RunState(), name, pixels=20) for name in ("loss", "eval"))
    assert set(sparse.rows) <= set(dense.rows)
    assert (dense.points, sparse.points) == (3000, 10)


def test_metrics_that_have_no_column_left_have_curves_by_the_name_they_were_reported_with(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(points, "MAX_COLUMNS", 1)
        reported = {"loss": 1.0, "eval/acc": 2.0, "deep": {"a/b": 3.0}, "rank": 4.0}
        kept(storage, [PointRecord(0, 0, row, 0.0, False, reported) for row in (1, 2)])
        for name, value in (("eval/acc", 2.0), ("deep/a/b", 3.0), ("reported/rank", 4.0)):
            assert curve(storage, RunState(), name).last.tolist() == [value, value]
        for name in ("acc", "a/b", "row", "solo"):
            assert curve(storage, RunState(), name).points == 0


def test_a_run_can_be_viewed_while_it_writes(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(metrics_store, "SEGMENT_POINTS", 50)
        patch.setattr(metrics_store, "SPOOL_INTERVAL_S", 0.0)
        patch.setattr(metric_segments, "BATCH_POINTS", 100)
        store = MetricsStore(storage, 1)
        try:
            for start in range(1, 4001, 40):
                store.add([point(row, row) for row in range(start, start + 40)])
                assert store.wait_spooled(10)
                found = curve(storage, RunState(), "loss", pixels=10)
                assert (found.points, found.last[-1], found.high.max()) == (start + 39,) * 3
        finally:
            store.close()


def long_run(count: int) -> tuple[bytes, pa.Table]:
    """One segment of so many points of two ranks, and the points."""
    row = np.arange(2, count + 2) // 2
    random = np.random.default_rng(5)
    columns: dict[str, Any] = {
        "rank": np.arange(count, dtype=np.int32) % 2,
        "attempt": np.zeros(count, np.int32),
        "row": row,
        "at": random.random(count),
        "solo": np.zeros(count, bool),
        "loss": random.random(count),
        "other": random.random(count),
    }
    table = pa.table(columns)
    batches = table.to_batches(max_chunksize=metric_segments.BATCH_POINTS)
    return encode_segment(batches, table.schema, 1, 9), table


def test_a_view_of_a_long_run_reads_summaries_and_not_points(storage: Storage) -> None:
    data, table = long_run(8 * metric_segments.BATCH_POINTS)
    damaged = bytearray(data)
    damaged[1000 : len(data) // 2] = bytes(len(data) // 2 - 1000)
    storage.put("metrics/0001-000001-000009.arrow", bytes(damaged))
    found = curve(storage, RunState(), "loss", rank=1)
    values = table.column("loss").to_numpy()[1::2]
    assert found.points == len(values)
    assert (found.low.min(), found.high.max(), found.last[-1]) == (values.min(), values.max(), values[-1])


def test_of_a_run_in_a_bucket_only_a_part_is_fetched(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    data, table = long_run(12 * metric_segments.BATCH_POINTS)
    storage = open_storage(s3.uri("viewed"))
    storage.put("metrics/0001-000001-000009.arrow", data)
    fetched: list[int] = []
    ranges = object_files._OneObject.ranges
    with monkeypatch.context() as patch:

        def counted(self: Any, wanted: Any) -> list[bytes]:
            fetched.extend(end - start for start, end in wanted)
            return ranges(self, wanted)

        patch.setattr(object_files._OneObject, "ranges", counted)
        found = curve(storage, RunState(), "loss", rank=1)
    assert found.points == table.num_rows // 2
    assert found.high.max() == table.column("loss").to_numpy()[1::2].max()
    assert 0 < sum(fetched) < len(data) // 3
    assert len(dataframe(storage, RunState())) == table.num_rows


def test_a_damaged_summary_is_named_and_hides_no_other_segment(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    data, _ = long_run(2 * metric_segments.BATCH_POINTS)
    storage.put("metrics/0001-000001-000009.arrow", data)
    footer = MetricSegment(storage, "metrics/0001-000001-000009.arrow", len(data)).footer
    damaged = bytearray(data)
    damaged[footer.summary_start : footer.summary_end] = bytes(footer.summary_end - footer.summary_start)
    storage.put("metrics/0001-000001-000009.arrow", bytes(damaged))
    kept(storage, [point(10**6, 3.0)], lease=2)
    with caplog.at_level(logging.WARNING, "powertrain"):
        assert curve(storage, RunState(), "loss").high.tolist() == [3.0]
    assert "0001-000001-000009.arrow" in caplog.text


def test_a_curve_of_no_pixels_is_refused(storage: Storage) -> None:
    with pytest.raises(ValueError, match="at least one"):
        curve(storage, RunState(), "loss", pixels=0)


def test_segments_of_earlier_versions_are_read_as_before(storage: Storage) -> None:
    records = [point(row, row / 2) for row in range(1, 201)]
    for number, part in ((1, records[:150]), (3, records[150:])):
        table = table_of(part)
        schema = table.schema.with_metadata({b"powertrain.covers": f"[{number}, {number + 1}]".encode()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(table)
        storage.put(f"metrics/0001-{number:06d}.arrow", sink.getvalue().to_pybytes())
    storage.put(
        "metrics/0001-000002.arrow", b"merged into the first, whose controller died before deleting it"
    )
    kept(storage, [point(201, 7.0)], lease=2)
    assert reading.read_table(storage).column("row").to_pylist() == list(range(1, 202))
    assert metric_names(storage, RunState()) == ["loss"]
    found = curve(storage, RunState(), "loss")
    assert (found.points, found.high.max(), found.last[-1]) == (201, 100.0, 7.0)
