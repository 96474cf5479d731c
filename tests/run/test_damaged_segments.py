"""Metric files that are not as they were written: never a crash, a raw error or other numbers without a warning."""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest

from powertrain.errors import StorageError
from powertrain.run.lifecycle import Branch, RunState
from powertrain.run.metrics import reading, segments
from powertrain.run.metrics import store as metrics_store
from powertrain.run.metrics.curves import curve, metric_names
from powertrain.run.metrics.points import PointRecord, encode_records, table_of
from powertrain.run.metrics.reading import last_of_rank, read_table
from powertrain.run.metrics.segments import MetricSegment, encode_segment
from powertrain.run.metrics.spool import Spool
from powertrain.run.metrics.store import MetricsStore
from powertrain.storage import Storage, open_storage

KEY = "metrics/0001-000001.arrow"


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def point(row: int) -> PointRecord:
    metrics = {"loss": row / 3, "count": row, "text": f"row {row}", "mixed": [row, None] if row % 2 else row}
    return PointRecord(rank=row % 2, attempt=0, row=row, at=float(row), solo=False, metrics=metrics)


def segment(rows: int = 20) -> bytes:
    """A segment of several batches with a summary."""
    table = table_of([point(row) for row in range(1, rows + 1)])
    return encode_segment(table.to_batches(max_chunksize=8), table.schema, 1, 1)


def of_an_earlier_version(data: bytes) -> bytes:
    """The same segment without hashes."""
    (length,) = struct.unpack("<I", data[-12:-8])
    footer = msgspec.msgpack.decode(data[-12 - length : -12])
    old = msgspec.msgpack.encode(footer[:7])
    return data[: footer[3]] + old + struct.pack("<I", len(old)) + data[-8:]


def everything(storage: Storage) -> Any:
    """What all readers make of the run's metrics."""
    names, line = metric_names(storage, RunState()), curve(storage, RunState(), "loss", pixels=1)
    shown = (line.rows.tolist(), line.low.tolist(), line.high.tolist(), line.last.tolist(), line.points)
    return names, shown, last_of_rank(storage, RunState()), read_table(storage).to_pylist()


def places_in(data: bytes, count: int) -> range:
    """So many places in all parts of a file."""
    return range(0, len(data), max(1, len(data) // count) | 1)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "BATCH_POINTS", 8)


@pytest.mark.usefixtures("small_batches")
def test_no_flipped_byte_of_a_segment_gives_other_numbers_without_a_warning(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    data = segment()
    storage.put(KEY, data)
    path, whole = storage.local_path(KEY), everything(storage)
    assert path is not None
    silent = []
    for place in places_in(data, 150):
        caplog.clear()
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        if everything(storage) != whole and KEY not in caplog.text:
            silent.append(place)
    assert silent == []


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("version", ["hashed", "earlier"])
def test_no_damaged_segment_raises_or_crashes(
    storage: Storage, version: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = segment() if version == "hashed" else of_an_earlier_version(segment())
    storage.put(KEY, data)
    path = storage.local_path(KEY)
    assert path is not None
    assert everything(storage)[3]
    assert caplog.text == ""
    for place in places_in(data, 70):
        flipped = data[:place] + bytes([data[place] ^ 0x81]) + data[place + 1 :]
        for damaged in (flipped, data[:place], data[:place] + bytes(64) + data[place + 64 :]):
            path.write_bytes(damaged)
            everything(storage)


@pytest.mark.usefixtures("small_batches")
def test_of_a_damaged_segment_the_other_batches_are_still_read(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    storage.put(KEY, segment())
    size = len(storage.get(KEY))
    parts = MetricSegment(storage, KEY, size).footer.points
    assert parts is not None
    place = parts.batches[1].ends[0] + 3
    data = bytearray(storage.get(KEY))
    data[place] ^= 1
    storage.put(KEY, bytes(data))
    rows = [row for row in range(1, 21) if not 9 <= row <= 16]
    assert read_table(storage).column("row").to_pylist() == rows
    assert caplog.text.count(KEY) == 1
    assert "of batch 1 is not as it was written" in caplog.text


def test_merging_leaves_a_damaged_segment_and_its_number_alone(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics_store, "SEGMENT_POINTS", 1)
    writer = metrics_store._SegmentWriter(storage, 1)
    for row in range(1, 9):
        writer.put([point(row)])
    path = storage.local_path("metrics/0001-000003.arrow")
    assert path is not None
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "powertrain"):
        writer.merge_all()
        writer.merge_all()
    assert "metrics/0001-000003.arrow" in caplog.text
    assert path.read_bytes() == damaged
    names = [entry.key.removeprefix("metrics/0001-") for entry in storage.list("metrics")]
    assert names == ["000001-000002.arrow", "000003.arrow", "000004-000008.arrow"]
    caplog.clear()
    rows: list[Any] = read_table(storage).column("row").to_pylist()
    assert sorted(rows) == [1, 2, 4, 5, 6, 7, 8]
    assert "metrics/0001-000003.arrow" in caplog.text


def test_a_damaged_spool_is_kept_when_what_is_whole_in_it_became_segments(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(storage, 1)
    for row in (1, 2, 3):
        spool.append([encode_records([point(row)])], row)
    spool.close(keep=True)
    path = Path(spool.path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # in the second piece
    path.write_bytes(data)
    store = MetricsStore(storage, 2)
    store.add([point(4)])
    store.close()
    assert path.read_bytes() == data
    assert "metrics/0001.open" in caplog.text
    assert read_table(storage).column("row").to_pylist() == [1, 4]


@pytest.mark.parametrize("number", range(16))
def test_a_changed_head_of_a_piece_is_damage_and_not_the_end_of_the_file(
    storage: Storage, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(storage, 1)
    for row in (1, 2):
        spool.append([encode_records([point(row)])], row)
    spool.close(keep=True)
    path = Path(spool.path)
    data = bytearray(path.read_bytes())
    data[number] ^= 0x80
    path.write_bytes(data)
    assert read_table(storage).num_rows == 0
    assert "metrics/0001.open" in caplog.text


def test_a_pipe_in_the_place_of_a_segment_is_passed_over(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    storage.put("metrics/0001-000002.arrow", segment(1))
    path = storage.local_path(KEY)
    assert path is not None
    os.mkfifo(path)
    read_table(storage)
    assert KEY in caplog.text


def test_an_attempt_that_cannot_be_is_refused_and_takes_no_memory(storage: Storage) -> None:
    storage.put(KEY, segment())
    far = RunState(branches=(Branch(0, 1), Branch((1 << 31) - 1, 5)))
    assert last_of_rank(storage, far) == last_of_rank(
        storage, RunState(branches=(Branch(0, 1), Branch(1, 5)))
    )
    table = table_of([msgspec.structs.replace(point(1), attempt=-5)])
    storage.put(KEY, encode_segment(table.to_batches(), table.schema, 1, 1))
    with pytest.raises(StorageError, match="attempt with the number -5"):
        reading.dataframe(storage, RunState())


@pytest.mark.parametrize("row", [-5, 1 << 62])
def test_a_row_that_cannot_be_is_refused_and_makes_no_endless_loop(storage: Storage, row: int) -> None:
    table = table_of([point(1), msgspec.structs.replace(point(1), row=row)])
    storage.put(KEY, encode_segment(table.to_batches(), table.schema, 1, 1))
    with pytest.raises(StorageError, match=f"rows .*{row}"):
        curve(storage, RunState(), "loss", pixels=1, rank=1)
