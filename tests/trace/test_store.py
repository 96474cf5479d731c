"""What ranks recorded stays readable, whatever happens to who writes it, and within its budget."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from powertrain.storage import open_storage
from powertrain.storage.local import LocalStorage
from powertrain.trace import store
from powertrain.trace.machine import samples
from powertrain.trace.recording import phases
from powertrain.trace.store import FACTS, SAMPLES, STEPS, PartFrame, TelemetryStore


def steps(numbers: Sequence[int], seconds: float | Sequence[float] = 0.01) -> bytes:
    """Records of these steps, each all forward."""
    times = [seconds] * len(numbers) if isinstance(seconds, float) else seconds
    data = bytearray(len(numbers) * phases.RECORD_SIZE)
    for at, (number, total) in enumerate(zip(numbers, times, strict=True)):
        spent = tuple(total if phase == phases.FORWARD else 0.0 for phase in range(phases.COUNT))
        record = phases.StepRecord(number, 0, 100.0 + number, 0, 0, 0, spent, (0.0,) * phases.COUNT)
        phases.pack_into(data, at * phases.RECORD_SIZE, record)
    return bytes(data)


def looks(times: Sequence[float]) -> bytes:
    return b"".join(samples.pack(samples.Sample(time, 0, rss=time)) for time in times)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    found = open_storage(tmp_path)
    assert isinstance(found, LocalStorage)
    return found


def test_records_of_all_ranks_and_attempts_come_back(storage: LocalStorage) -> None:
    written = TelemetryStore(storage, 1)
    for attempt in range(2):
        for rank in range(3):
            written.add(PartFrame(attempt, rank, STEPS, steps(range(10 * rank, 10 * rank + 5))))
            written.add(PartFrame(attempt, rank, SAMPLES, looks([1.0, 2.0])))
    written.add(PartFrame(1, 2, FACTS, b'{"host": "a"}'))
    written.close()
    found = store.read(storage)
    assert found.level == 0
    assert {a: sorted(by_rank) for a, by_rank in found.steps.items()} == {0: [0, 1, 2], 1: [0, 1, 2]}
    assert found.steps[1][2]["step"].tolist() == [20, 21, 22, 23, 24]
    assert found.samples[0][1]["rss"].tolist() == [1.0, 2.0]
    assert found.facts == {1: {2: {"host": "a"}}}
    assert [entry.key for entry in storage.list("telemetry")] == ["telemetry/0001-000000-0.frames"]


def test_what_a_killed_writer_left_open_is_read_and_made_a_part_by_the_next(storage: LocalStorage) -> None:
    path = storage.local_path("telemetry/0001.open")
    path.parent.mkdir(parents=True)
    whole = store.encode([PartFrame(0, 0, STEPS, steps(range(4)))])
    path.write_bytes(whole + store.encode([PartFrame(0, 0, STEPS, steps(range(4, 8)))])[:-1])
    assert store.read(storage).steps[0][0]["step"].tolist() == [0, 1, 2, 3]
    after = TelemetryStore(storage, 2)
    after.add(PartFrame(1, 0, STEPS, steps(range(4, 6))))
    after.close()
    found = store.read(storage)
    assert found.steps[0][0]["step"].tolist() == [0, 1, 2, 3]
    assert found.steps[1][0]["step"].tolist() == [4, 5]
    assert not path.exists()


def test_a_crash_between_a_part_and_what_it_was_made_of_counts_nothing_twice(storage: LocalStorage) -> None:
    data = store.encode([PartFrame(0, 0, STEPS, steps(range(4))), PartFrame(0, 0, SAMPLES, looks([1.0]))])
    storage.put("telemetry/0001-000000-0.frames", data)
    storage.put("telemetry/0001.open", data)
    storage.put("telemetry/0001-000000-1.frames", store.encode([PartFrame(0, 0, STEPS, steps([0, 3]))]))
    found = store.read(storage)
    assert found.steps[0][0]["step"].tolist() == [0, 1, 2, 3]
    assert len(found.samples[0][0]) == 1
    assert found.level == 1


@given(cut=st.integers(0, 2000), flip=st.integers(0, 1999))
def test_a_part_that_is_cut_or_damaged_gives_the_frames_before_it(cut: int, flip: int) -> None:
    frames = [PartFrame(0, rank, STEPS, steps(range(2))) for rank in range(8)]
    data = bytearray(store.encode(frames))
    size = len(data) // len(frames)
    assert list(store.decode(bytes(data[:cut]))) == frames[: cut // size]
    at = flip % len(data)
    data[at] ^= 1
    assert list(store.decode(bytes(data)))[: at // size] == frames[: at // size]
    assert all(frame in frames for frame in store.decode(bytes(data)) if frame.rank < at // size)


def written_part(storage: LocalStorage) -> bytes:
    written = TelemetryStore(storage, 1)
    for rank in range(3):
        written.add(PartFrame(0, rank, STEPS, steps(range(5))))
    written.add(PartFrame(0, 0, FACTS, b'{"host": "a"}'))
    written.close()
    return storage.get("telemetry/0001-000000-0.frames")


def test_a_flipped_byte_of_a_part_is_found_wherever_it_is(
    storage: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    data = written_part(storage)
    path = storage.local_path("telemetry/0001-000000-0.frames")
    for place in range(0, len(data), 5):
        caplog.clear()
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        store.read(storage)
        assert "telemetry/0001-000000-0.frames" in caplog.text, place


def test_a_part_that_is_cut_between_two_frames_or_extended_is_found(
    storage: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    data = written_part(storage)
    first = len(store.encode([PartFrame(0, 0, STEPS, steps(range(5)))]))
    path = storage.local_path("telemetry/0001-000000-0.frames")
    for damaged in (data[:first], b"", data + b"x", data + data):
        caplog.clear()
        path.write_bytes(damaged)
        store.read(storage)
        assert "telemetry/0001-000000-0.frames" in caplog.text


def of_an_earlier_version(frames: list[PartFrame]) -> bytes:
    return b"".join(
        struct.pack("<IIIIQ", len(f.data), f.attempt, f.rank, f.kind, xxhash.xxh3_64_intdigest(f.data))
        + f.data
        for f in frames
    )


def test_parts_of_an_earlier_version_are_read_without_a_word(
    storage: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    frames = [PartFrame(0, rank, STEPS, steps(range(5))) for rank in range(2)]
    storage.put("telemetry/0001-000000-0.frames", of_an_earlier_version(frames))
    assert sorted(store.read(storage).steps[0]) == [0, 1]
    assert caplog.text == ""


def test_text_and_records_of_another_form_are_damage(
    storage: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    for frame in (
        PartFrame(0, 0, FACTS, b"[1]"),
        PartFrame(0, 0, STEPS, b"xyz"),
        PartFrame(0, 0, FACTS, b"\xff"),
    ):
        caplog.clear()
        storage.put("telemetry/0001.open", store.encode([frame]))
        assert store.read(storage).steps == {}
        assert "telemetry/0001.open" in caplog.text


def test_a_damaged_part_that_grew_is_left_where_it_is(
    storage: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    data = bytearray(store.encode([PartFrame(0, rank, STEPS, steps(range(2))) for rank in range(3)]))
    data[len(data) // 2] ^= 1
    storage.put("telemetry/0001.open", bytes(data))
    after = TelemetryStore(storage, 2)
    after.add(PartFrame(1, 0, STEPS, steps(range(2))))
    after.close()
    assert storage.get("telemetry/0001.open") == data
    assert "telemetry/0001.open" in caplog.text


def test_thinning_keeps_the_fastest_the_median_and_the_slowest_step_of_each_group_on_every_rank() -> None:
    times = [0.01] * 24
    times[5], times[7], times[20] = 0.5, 0.001, 0.3
    other = [0.002] * 24
    frames = store.thinned(
        [PartFrame(0, 0, STEPS, steps(range(24), times)), PartFrame(0, 1, STEPS, steps(range(24), other))]
    )
    kept = [np.frombuffer(frame.data, np.dtype(list(phases.FIELDS)))["step"].tolist() for frame in frames]
    assert kept[0] == kept[1], "ranks can still be compared"
    assert len(kept[0]) == 6
    assert {5, 7, 20} <= set(kept[0])


def test_a_long_run_stays_within_its_budget_and_keeps_its_whole_course(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        store, "_WRITE_EVERY", None
    )  # its thread waits for close(): this thread writes meanwhile
    budget, part = 600_000, 100_000
    written = TelemetryStore(storage, 1, budget=budget, part=part)
    frames = [
        PartFrame(0, rank, STEPS, steps(range(at, at + 30))) for at in range(0, 12_000, 30) for rank in (0, 1)
    ]
    for frame in frames:  # as the writer's thread does it, part by part
        written._save([frame], closing=False)
    written.close()
    assert sum(entry.size for entry in storage.list("telemetry")) <= budget + part
    found = store.read(storage)
    numbers = found.steps[0][0]["step"]
    assert found.level > 0
    assert numbers[0] < 200, "the beginning is there"
    assert numbers[-1] == 11_999
    assert np.diff(numbers[-20:]).tolist() == [1] * 19, "the newest steps are all there"
    assert np.array_equal(numbers, found.steps[0][1]["step"])


@pytest.mark.parametrize("fault", ["unreadable", "damaged", "huge"])
def test_a_part_that_cannot_be_read_whole_is_not_thinned(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    oldest, get = "telemetry/0001-000000-0.frames", storage.get
    path = storage.local_path(oldest)

    def refuse(key: str, **options: int) -> bytes:
        if key == oldest and fault == "unreadable":
            raise OSError(errno.EIO, os.strerror(errno.EIO), key)
        return get(key, **options)

    monkeypatch.setattr(storage, "get", refuse)
    written = TelemetryStore(storage, 1, budget=60_000, part=20_000)
    before = b""
    for at in range(0, 3000, 30):
        written._save([PartFrame(0, 0, STEPS, steps(range(at, at + 30)))], closing=False)
        if not before and path.exists():
            before = path.read_bytes()
            if fault == "damaged":
                before = before[:-1000] + bytes([before[-1000] ^ 1]) + before[-999:]
                path.write_bytes(before)
            elif fault == "huge":
                os.truncate(path, 1 << 40)
    written.close()
    with open(path, "rb") as file:
        assert file.read(len(before)) == before
    levels = [entry.key.rpartition("-")[2] for entry in storage.list("telemetry")]
    assert "1.frames" in levels, "the others are thinned"
    assert not storage.local_path("telemetry/0001-000000-1.frames").exists()
    assert caplog.text.count(oldest) == 1


def test_a_full_disk_loses_frames_and_says_so_but_not_what_was_there(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = TelemetryStore(storage, 1)
    written._save([PartFrame(0, 0, STEPS, steps(range(4)))], closing=False)

    def full(data: bytes) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(written._open, "append", full)
    written.add(PartFrame(0, 0, STEPS, steps(range(4, 8))))
    written.close()
    assert written.dropped == 1
    written.close()
    assert caplog.text.count("No space left") == 1
    assert store.read(storage).steps[0][0]["step"].tolist() == [0, 1, 2, 3]


def test_a_backlog_is_bounded_by_dropping_the_oldest(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_BACKLOG", 3 * phases.RECORD_SIZE)
    monkeypatch.setattr(store, "_WRITE_EVERY", 60.0)
    written = TelemetryStore(storage, 1)
    for number in range(6):
        written.add(PartFrame(0, 0, STEPS, steps([number])))
    written.close()
    assert written.dropped == 3
    assert store.read(storage).steps[0][0]["step"].tolist() == [3, 4, 5]


def test_a_run_that_recorded_nothing_reads_as_nothing(storage: LocalStorage) -> None:
    TelemetryStore(storage, 1).close()
    assert store.read(storage) == store.RecordedTelemetry({}, {}, {}, 0)
    assert storage.list("telemetry") == []
