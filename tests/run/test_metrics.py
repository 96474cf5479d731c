from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import scaled

from powertrain.errors import StorageError
from powertrain.run.lifecycle import Branch, RunState
from powertrain.run.metrics import reading, segments
from powertrain.run.metrics import store as metrics_store
from powertrain.run.metrics.curves import curve
from powertrain.run.metrics.points import PointRecord, decode_records, encode_records, table_of
from powertrain.run.metrics.reading import dataframe, last_of_rank, read_table
from powertrain.run.metrics.segments import encode_segment
from powertrain.run.metrics.spool import Spool, joined, points_in, read_spool
from powertrain.run.metrics.store import MetricsStore
from powertrain.storage import Storage, open_storage
from powertrain.storage import local as local_storage
from powertrain.storage.files import descriptors


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def point(row: int, *, rank: int = 0, attempt: int = 0, solo: bool = False, **metrics: Any) -> PointRecord:
    return PointRecord(rank, attempt, row, float(row), solo, metrics or {"value": row})


def kept(storage: Storage, records: list[PointRecord], lease: int = 1) -> None:
    store = MetricsStore(storage, lease)
    store.add(records)
    store.close()


def files(storage: Storage) -> list[str]:
    return [entry.key.removeprefix("metrics/") for entry in storage.list("metrics")]


def rows(storage: Storage) -> list[int]:
    found: list[Any] = read_table(storage).column("row").to_pylist()
    return found


def until(condition: Callable[[], bool], within: float = 10.0) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


# --------------------------------------------------------------------------- writing


def test_close_leaves_every_point_once_in_one_segment(storage: Storage) -> None:
    store = MetricsStore(storage, 1)
    for start in range(0, 20_000, 100):
        store.add([point(row) for row in range(start, start + 100)])
    store.close()
    store.close()
    assert rows(storage) == list(range(20_000))
    assert files(storage) == ["0001-000001-000003.arrow"]


def test_a_store_without_points_leaves_nothing(storage: Storage) -> None:
    MetricsStore(storage, 1).close()
    assert files(storage) == []
    assert read_table(storage).num_rows == 0
    assert len(dataframe(storage, RunState())) == 0


def test_one_large_add_is_cut_into_segments(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    put = metrics_store._SegmentWriter.put
    with monkeypatch.context() as patch:
        patch.setattr(
            metrics_store._SegmentWriter,
            "put",
            lambda self, records: (sizes.append(len(records)), put(self, records)),
        )
        kept(storage, [point(row) for row in range(30_000)])
    assert max(sizes) <= metrics_store.SEGMENT_POINTS
    assert rows(storage) == list(range(30_000))


def test_large_points_are_cut_by_their_bytes(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    put = metrics_store._SegmentWriter.put
    with monkeypatch.context() as patch:
        patch.setattr(metrics_store, "SEGMENT_BYTES", 10_000)
        patch.setattr(
            metrics_store._SegmentWriter,
            "put",
            lambda self, records: (sizes.append(len(records)), put(self, records)),
        )
        store = MetricsStore(storage, 1)
        for row in range(50):
            store.add([point(row, text="x" * 1000)])
        store.close()
    assert max(sizes) <= 11
    assert rows(storage) == list(range(50))


def test_points_of_many_threads_are_all_kept(storage: Storage) -> None:
    store = MetricsStore(storage, 1)
    threads = [
        threading.Thread(target=lambda r=rank: [store.add([point(row, rank=r)]) for row in range(1, 501)])
        for rank in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    assert store._bytes == 0  # or it would seem crowded one day
    table = read_table(storage)
    found = sorted(zip(table.column("rank").to_pylist(), table.column("row").to_pylist(), strict=True))
    assert found == [(rank, row) for rank in range(4) for row in range(1, 501)]


def test_points_are_readable_before_they_are_in_a_segment(storage: Storage) -> None:
    store = MetricsStore(storage, 1)
    try:
        store.add([point(1), point(2)])
        assert store.wait_spooled(10)
        assert files(storage) == ["0001.open"]
        assert rows(storage) == [1, 2]
        assert last_of_rank(storage, RunState()) == {"value": 2}
    finally:
        store.close()


def test_old_points_become_a_segment_without_being_asked(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(metrics_store, "SEGMENT_INTERVAL_S", 0.05)
        store = MetricsStore(storage, 1)
        try:
            store.add([point(1)])
            until(lambda: "0001-000001.arrow" in files(storage))
            assert rows(storage) == [1]
        finally:
            store.close()


def test_many_small_segments_become_few_while_the_run_goes_on(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    with monkeypatch.context() as patch:
        patch.setattr(metrics_store, "SEGMENT_POINTS", 2)
        patch.setattr(metrics_store, "SPOOL_INTERVAL_S", 0.0)
        store = MetricsStore(storage, 1)
        for row in range(0, 200, 2):
            store.add([point(row), point(row + 1)])
            assert store.wait_spooled(10)
            most = max(most, len(files(storage)))
        store.close()
    assert most < 30
    assert rows(storage) == list(range(200))
    assert files(storage) == ["0001-000001-000100.arrow"]


def test_segments_of_different_columns_and_types_merge_without_loss(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    dicts: list[dict[str, Any]] = [
        {"a": 1},
        {"a": 1.5},
        {"b": "x"},
        {"a": None},
        {"a": {"c": [1]}},
        {"a": math.nan},
    ]
    with monkeypatch.context() as patch:
        patch.setattr(metrics_store, "SEGMENT_POINTS", 1)
        store = MetricsStore(storage, 1)
        for row, metrics in enumerate(dicts, 1):
            store.add([PointRecord(0, 0, row, 0.0, False, metrics)])
        store.close()
    assert files(storage) == ["0001-000001-000006.arrow"]
    for row, metrics in enumerate(dicts, 1):
        cut = RunState(branches=(Branch(1, row + 1),))
        assert repr(last_of_rank(storage, cut)) == repr(metrics)


def test_adding_to_a_closed_store_is_an_error(storage: Storage) -> None:
    store = MetricsStore(storage, 1)
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.add([point(1)])


def test_pyarrow_is_not_imported_before_the_first_segment(storage: Storage) -> None:
    script = (
        "import sys\n"
        "from powertrain.run.metrics.store import MetricsStore; from powertrain.run.metrics.points import PointRecord\n"
        "from powertrain.storage import open_storage\n"
        "store = MetricsStore(open_storage(sys.argv[1]), 1)\n"
        "store.add([PointRecord(0, 0, 1, 0.0, False, {'a': 1})])\n"
        "assert store.wait_spooled(10)\n"
        "assert not {'pyarrow', 'pandas', 'numpy', 'torch'} & sys.modules.keys()\n"
        "store.close()\n"
    )
    subprocess.run([sys.executable, "-c", script, storage.uri], check=True)
    assert rows(storage) == [1]


# --------------------------------------------------------------------------- storage that fails


class Full:
    """Makes a storage refuse segments until it is lifted."""

    def __init__(self, storage: Storage, patch: pytest.MonkeyPatch) -> None:
        self.refusing = True
        put = type(storage).put

        def maybe(this: Storage, key: str, data: bytes) -> None:
            if self.refusing:
                raise OSError(errno.ENOSPC, "No space left on device")
            put(this, key, data)

        patch.setattr(type(storage), "put", maybe)


def test_a_full_disk_is_visible_and_nothing_is_lost_when_it_passes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "powertrain"):
        patch.setattr(metrics_store, "_RETRY_DELAY_S", 0.01)
        full = Full(storage, patch)
        store = MetricsStore(storage, 1)
        store.add([point(row) for row in range(10_000)])
        until(lambda: "No space left" in store.problem)
        full.refusing = False
        until(lambda: store.problem == "")
        store.close()
    assert rows(storage) == list(range(10_000))
    assert "No space left" in caplog.text


def test_add_waits_when_storage_is_stuck_so_that_memory_stays_bounded(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(metrics_store, "_RETRY_DELAY_S", 0.01)
        patch.setattr(metrics_store, "BACKLOG_BYTES", 20_000)
        patch.setattr(metrics_store, "SEGMENT_POINTS", 100)
        full = Full(storage, patch)
        store = MetricsStore(storage, 1)
        producer = threading.Thread(
            target=lambda: [store.add([point(row) for row in range(i, i + 100)]) for i in range(0, 5000, 100)]
        )
        producer.start()
        until(lambda: store.crowded)
        assert producer.is_alive()
        assert store._bytes < 2 * 20_000
        full.refusing = False
        producer.join(20)
        store.close()
    assert rows(storage) == list(range(5000))


def test_a_close_that_fails_says_where_the_points_are_and_the_next_start_takes_them(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        Full(storage, patch)
        store = MetricsStore(storage, 1)
        store.add([point(1), point(2)])
        with pytest.raises(StorageError, match=r"No space left.*0001\.open"):
            store.close()
    assert rows(storage) == [1, 2]
    kept(storage, [point(3)], lease=2)
    assert files(storage) == ["0001-000001.arrow", "0002-000001.arrow"]
    assert rows(storage) == [1, 2, 3]


def test_a_spool_write_cut_short_hides_nothing_that_follows(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(storage, 1)
    spool.append([encode_records([point(1)])], 1)
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
        with pytest.raises(OSError, match="only a part"):
            spool.append([encode_records([point(2)])], 1)
    spool.append([encode_records([point(3)])], 1)
    spool.close(keep=True)
    assert rows(storage) == [1, 3]


@contextlib.contextmanager
def errors_after_each_put(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is put is there, and yet the put fails: when the directory cannot be flushed, say."""
    put = type(storage).put

    def put_and_fail(this: Storage, key: str, data: bytes) -> None:
        put(this, key, data)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(type(storage), "put", put_and_fail)
        yield


def test_a_segment_that_is_there_although_its_put_failed_hides_no_later_point(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, spool = metrics_store._SegmentWriter(storage, 1), Spool(storage, 1)
    spool.append([encode_records([point(1)])], writer.next)
    with errors_after_each_put(storage, monkeypatch):
        writer.put([point(1)])
    spool.append([encode_records([point(2)])], writer.next)
    spool.close(keep=True)  # as a crash would
    assert rows(storage) == [1, 2]
    MetricsStore(storage, 2).close()
    assert rows(storage) == [1, 2]


def test_a_merged_segment_that_is_there_although_its_put_failed_hides_no_other_merge(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = metrics_store._SegmentWriter(storage, 1)
    for row in range(1, 5):
        writer.put([point(row)])
    with errors_after_each_put(storage, monkeypatch):
        writer.merge_small()
    writer.put([point(5)])
    writer.merge_small()
    assert files(storage) == ["0001-000001.arrow", "0001-000002-000005.arrow"]
    assert rows(storage) == [1, 2, 3, 4, 5]


def test_segments_that_cannot_be_merged_are_reported_and_neither_lose_points_nor_fail_the_close(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "powertrain"):
        patch.setattr(metrics_store, "SEGMENT_POINTS", 1)
        patch.setattr(metrics_store, "merged", refused)
        store = MetricsStore(storage, 1)
        for row in range(1, 21):
            store.add([point(row)])
        assert store.wait_spooled(10)
        store.close()
    assert store.problem == ""
    assert rows(storage) == list(range(1, 21))
    assert len(files(storage)) == 20
    assert caplog.text.count("could not be put in order") == 1


def test_the_spool_of_a_later_version_is_passed_over_and_left_where_it_is(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(storage, 1)
    spool.append([msgspec.msgpack.encode([["of", "a", "later", "version"]])], 1)
    spool.close(keep=True)
    with caplog.at_level(logging.WARNING, "powertrain"):
        kept(storage, [point(1)], lease=2)
        assert rows(storage) == [1]
    assert files(storage) == ["0001.open", "0002-000001.arrow"]
    assert "'metrics/0001.open' is damaged" in caplog.text


# --------------------------------------------------------------------------- crashes

_WRITER = """
import sys
from powertrain.run.metrics import store as metrics_store
from powertrain.run.metrics.store import MetricsStore
from powertrain.run.metrics.points import PointRecord
from powertrain.storage import open_storage
metrics_store.SEGMENT_POINTS = int(sys.argv[2])
store = MetricsStore(open_storage(sys.argv[1]), 1)
row = 0
while True:
    store.add([PointRecord(0, 0, row + i, 0.0, False, {"value": row + i}) for i in range(50)])
    row += 50
    if row % 1000 == 0:
        store.wait_spooled()
        print(row, flush=True)
"""


@pytest.mark.parametrize("segment_points", [8192, 40], ids=["while-it-writes", "while-it-merges"])
def test_spooled_points_survive_sigkill_and_the_next_start_makes_segments_of_them(
    storage: Storage, segment_points: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITER, storage.uri, str(segment_points)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    told = [int(process.stdout.readline()) for _ in range(11)]  # beyond the first segment
    process.send_signal(signal.SIGKILL)
    process.wait()
    told += [int(line) for line in process.stdout.read().split()]
    process.stdout.close()
    found = rows(storage)
    assert len(found) >= told[-1]
    assert found == list(range(len(found)))
    assert "0001.open" in files(storage)
    MetricsStore(storage, 2).close()
    assert "0001.open" not in files(storage)
    assert rows(storage) == found


def test_a_crash_between_segment_and_emptying_the_spool_doubles_no_point(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Spool, "empty", lambda self: None)
        patch.setattr(Spool, "close", lambda self, keep: os.close(self._descriptor))
        kept(storage, [point(1), point(2)])
    assert files(storage) == ["0001-000001.arrow", "0001.open"]
    assert rows(storage) == [1, 2]
    kept(storage, [point(3)], lease=2)
    assert rows(storage) == [1, 2, 3]
    assert "0001.open" not in files(storage)


def test_a_crash_in_the_middle_of_a_merge_doubles_no_point(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(metrics_store, "SEGMENT_POINTS", 1)
        patch.setattr(type(storage), "delete", lambda self, key: None)
        store = MetricsStore(storage, 1)
        for row in range(1, 21):
            store.add([point(row)])
        store.close()
    assert len(files(storage)) == 20 + 5 + 1 + 1  # the first ones, and three times what they were merged into
    assert rows(storage) == list(range(1, 21))
    assert last_of_rank(storage, RunState()) == {"value": 20}


def test_points_left_in_a_spool_never_overwrite_the_segment_they_were_merged_into(storage: Storage) -> None:
    table = table_of([point(1), point(2), point(3)])
    storage.put("metrics/0001-000001-000003.arrow", encode_segment(table.to_batches(), table.schema, 1, 3))
    spool_of([[point(1)], [point(2)]], storage)
    kept(storage, [point(4)], lease=2)
    assert rows(storage) == [1, 2, 3, 4]
    assert files(storage) == ["0001-000001-000003.arrow", "0002-000001.arrow"]


def spool_of(pieces: list[list[PointRecord]], storage: Storage) -> bytes:
    spool = Spool(storage, 1)
    for number, records in enumerate(pieces, 1):
        spool.append([encode_records(records)], number)
    spool.close(keep=True)
    return storage.get("metrics/0001.open")


@given(st.data())
@settings(max_examples=scaled(60))
def test_a_torn_or_damaged_spool_gives_whole_pieces_up_to_there(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    pieces = [[point(number)] for number in range(1, 6)]
    whole = spool_of(pieces, open_storage(tmp_path_factory.mktemp("spool")))
    cut = data.draw(st.integers(0, len(whole)))
    damaged = bytearray(whole[:cut])
    is_flipped = bool(damaged) and data.draw(st.booleans())
    if is_flipped:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    content = read_spool(bytes(damaged))
    assert (
        content.pieces == [(number, piece) for number, piece in enumerate(pieces, 1)][: len(content.pieces)]
    )
    if not is_flipped:
        assert content.damage == ""
    elif cut == len(whole):
        assert content.damage
    if bytes(damaged) == whole:
        assert len(content.pieces) == len(pieces)


@given(
    st.lists(st.integers(1, 40), max_size=40),
    st.sampled_from([1, 15, 16, 40, 1024]),
    st.sampled_from([10, 1 << 20]),
)
@settings(max_examples=scaled(60))
def test_pieces_of_many_ranks_are_joined_in_order_up_to_a_size(
    counts: list[int], most_points: int, most_bytes: int
) -> None:
    pieces = [encode_records([point(row, rank=rank) for row in range(n)]) for rank, n in enumerate(counts)]
    together = list(joined(pieces, most_points, most_bytes))
    separate = [record for piece in pieces for record in decode_records(piece)]
    assert [record for piece in together for record in decode_records(piece)] == separate
    assert [points_in(piece) for piece in together] == [len(decode_records(piece)) for piece in together]
    for piece in together:
        assert piece in pieces or (points_in(piece) <= most_points and len(piece) <= most_bytes)
    if most_points == 1024 and most_bytes > 10:
        assert len(together) <= 1 + len(separate) // (1024 - 40)


def test_ever_new_metrics_do_not_make_ever_wider_segments(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: list[dict[str, Any]] = [{f"key {row}": row, "loss": 0.5} for row in range(1, 101)]
    records = [point(row, **one) for row, one in enumerate(values, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(metrics_store, "SEGMENT_POINTS", 4)
        patch.setattr(segments, "MAX_COLUMNS", 8)
        store = MetricsStore(storage, 1)
        for start in range(0, 100, 4):
            store.add(records[start : start + 4])
        store.close()
    (key,) = files(storage)
    size = storage.list("metrics")[0].size
    assert len(segments.MetricSegment(storage, f"metrics/{key}", size).schema) == 5 + 8 + 1
    assert last_of_rank(storage, RunState()) == records[-1].metrics
    assert curve(storage, RunState(), "key 77").last.tolist() == [77.0]


def test_a_damaged_segment_is_named_and_hides_no_other(
    storage: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    for lease in (1, 2, 3):
        kept(storage, [point(lease)], lease=lease)
    path = storage.local_path("metrics/0002-000001.arrow")
    assert path is not None
    path.write_bytes(path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING, "powertrain"):
        assert rows(storage) == [1, 3]
        assert last_of_rank(storage, RunState()) == {"value": 3}
    assert "0002-000001.arrow" in caplog.text


# --------------------------------------------------------------------------- reading


def test_the_frame_has_the_lineage_sorted_by_row_and_rank(storage: Storage) -> None:
    first = [point(row, rank=rank, loss=0.5) for row in (1, 2, 3, 4) for rank in (1, 0)]
    second = [point(row, rank=rank, attempt=1, loss=0.25) for row in (3, 4, 5) for rank in (0, 1)]
    kept(storage, first + second)
    state = RunState(branches=(Branch(0, 1), Branch(1, 3)))
    frame = dataframe(storage, state)
    assert list(frame.columns) == ["loss", "rank", "attempt", "training_iteration", "timestamp"]
    assert frame["training_iteration"].tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert frame["rank"].tolist() == [0, 1] * 5
    assert frame["attempt"].tolist() == [0] * 4 + [1] * 6
    everything = dataframe(storage, state, abandoned=True)
    assert len(everything) == 14
    assert everything["abandoned"].sum() == 4
    assert everything[~everything["abandoned"]]["attempt"].tolist() == [0] * 4 + [1] * 6


branches = st.lists(st.integers(1, 8), min_size=1, max_size=5)


@given(branches, st.integers(0, 5), st.integers(1, 10))
def test_the_frame_and_the_run_state_agree_on_what_is_live(firsts: list[int], attempt: int, row: int) -> None:
    state = RunState(branches=tuple(Branch(a, first) for a, first in enumerate(firsts)))
    assert (row < reading._first_abandoned_row(state, attempt)) == state.is_live(attempt, row)


def test_solo_reports_are_there_at_iteration_zero_and_never_abandoned(storage: Storage) -> None:
    kept(storage, [point(1), point(0, solo=True, note="x"), point(1, attempt=1, value=9)])
    frame = dataframe(storage, RunState(branches=(Branch(0, 1), Branch(1, 1))))
    assert frame["training_iteration"].tolist() == [0, 1]
    assert frame["note"].tolist()[0] == "x"
    assert frame["attempt"].tolist() == [0, 1]


def test_metrics_of_our_names_and_of_equal_looking_keys_stand_side_by_side(storage: Storage) -> None:
    metrics = {"rank": "mine", "timestamp": 5, "a/b": 1, "a": {"b": 2}}
    kept(storage, [PointRecord(3, 0, 1, 0.0, False, metrics)])
    frame = dataframe(storage, RunState())
    assert frame["rank"].tolist() == [3]
    assert frame["reported/rank"].tolist() == ["mine"]
    assert frame["reported/timestamp"].tolist() == [5]
    assert frame["a/b"].tolist() == [2]
    assert frame["a\\/b"].tolist() == [1]
    assert len(frame.columns) == 8


def test_numbers_of_both_kinds_are_floats_and_other_values_come_back_as_they_were(storage: Storage) -> None:
    kept(storage, [point(1, n=1, v=[1, 2]), point(2, n=0.5, v={}), point(3, n=None)])
    table = read_table(storage)
    assert table.column("n").to_pylist() == [1.0, 0.5, None]
    frame = dataframe(storage, RunState())
    assert frame["n"].dtype == "float64"
    assert frame["v"].tolist()[:2] == [[1, 2], {}]


def test_last_of_rank_is_exactly_what_was_reported_last_in_the_lineage(storage: Storage) -> None:
    exact: dict[str, Any] = {
        "loss": math.nan,
        "a/b": 1,
        "n": {"x": {"y": 2.0}, "e": {}},
        "t": [1, None],
        "f": True,
        "none": None,
    }
    kept(storage, [point(1, **exact), point(1, rank=1), point(2), point(3)])
    state = RunState(branches=(Branch(0, 1), Branch(1, 2)))
    assert repr(sorted((last_of_rank(storage, state) or {}).items())) == repr(sorted(exact.items()))
    assert last_of_rank(storage, state, rank=1) == {"value": 1}
    assert last_of_rank(storage, state, rank=7) is None
    assert last_of_rank(storage, RunState()) == {"value": 3}


def test_segments_merged_while_they_are_listed_are_not_missed(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = metrics_store._SegmentWriter(storage, 1)
    for row in range(1, 5):
        writer.put([point(row)])
    listings: list[str] = []

    def list_then_merge(directory: int, prefix: str, **options: Any) -> Any:
        listings.append(prefix)
        found = descriptors.files_below(directory, prefix, **options)
        first = next(found)  # the names are known now, the sizes not yet
        if len(listings) == 2:  # the first one is for spools
            writer.merge_small()
        yield first
        yield from found

    with monkeypatch.context() as patch:
        patch.setattr(local_storage, "files_below", list_then_merge)
        assert rows(storage) == [1, 2, 3, 4]
    assert files(storage) == ["0001-000001-000004.arrow"]


def test_a_storage_that_goes_on_listing_what_is_gone_is_an_error_and_no_endless_loop(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(storage, [point(1)])
    listed = storage.list("metrics")
    storage.delete("metrics/0001-000001.arrow")
    with monkeypatch.context() as patch:
        patch.setattr(reading, "STALE_TIMEOUT_S", 0.05)
        patch.setattr(type(storage), "list", lambda self, prefix: listed)
        with pytest.raises(StorageError, match="listings are up to date"):
            read_table(storage)


def test_a_run_whose_path_is_no_text_can_be_read(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / os.fsdecode(b"run-\xff"))
    kept(storage, [point(1), point(2)])
    assert rows(storage) == [1, 2]


@pytest.mark.parametrize("metrics", [1, 150])
def test_a_frame_belongs_to_the_user_and_may_be_changed(storage: Storage, metrics: int) -> None:
    values: dict[str, Any] = {f"m{number}": 0.5 for number in range(metrics)}
    kept(storage, [point(row, **values) for row in range(1, 4)])
    frame = dataframe(storage, RunState())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # pandas warns of frames in too many pieces
        frame["new"] = 1.0
        for name in ("m0", "timestamp"):
            frame.loc[0, name] = 7.0
            assert frame[name][0] == 7.0
        frame.fillna(0.0, inplace=True)


def test_a_solo_report_is_the_last_only_where_there_is_no_other(storage: Storage) -> None:
    kept(storage, [point(1), point(0, solo=True, x=1), point(0, solo=True, rank=1, x=2)])
    assert last_of_rank(storage, RunState()) == {"value": 1}
    assert last_of_rank(storage, RunState(), rank=1) == {"x": 2}
