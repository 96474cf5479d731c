"""What a rank records of itself, what it sends of it, and that nothing of this can end it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.trace.records import unpacked as unpack

from powertrain.trace.machine import samples
from powertrain.trace.recording import current
from powertrain.trace.recording.phases import RECORD_SIZE, REPORT
from powertrain.trace.recording.recorder import Recorder
from powertrain.worker import tracing
from powertrain.worker.tracing import TraceSettings, Tracing, Untraced, newest_steps


@pytest.fixture(autouse=True)
def _nobody_records() -> Iterator[None]:
    current.use(None)
    yield
    current.use(None)


MANUAL = TraceSettings(mode="manual")


def begun(settings: TraceSettings = MANUAL) -> tuple[Tracing, list[str]]:
    said: list[str] = []
    found = Tracing.begin(settings, said.append)
    assert found is not None, said
    return found, said


def make_steps(count: int) -> None:
    recorder = current.recording()
    assert recorder is not None
    for _ in range(count):
        with current.phase(REPORT):
            pass
        recorder.reported()
    recorder.process_marks()


def test_what_was_recorded_is_sent_once_and_the_rest_at_the_end() -> None:
    traced, said = begun()
    make_steps(5)
    traced._next_send = 0.0
    first = traced.collect()
    make_steps(3)
    last = traced.end()
    assert first is not None
    assert last is not None
    numbers = [record.step for record in (*unpack(first.steps), *unpack(last.steps))]
    assert numbers == list(range(8))
    assert (first.first, last.first) == (0, 5)
    assert len(first.samples) == samples.SAMPLE_SIZE
    assert traced.end() is None
    assert traced.collect() is None
    assert traced.due == float("inf")
    assert said == []
    assert traced.is_over


def test_a_message_has_a_bounded_number_of_steps_and_the_next_follows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracing, "_MOST_STEPS", 4)
    traced, _ = begun()
    make_steps(6)
    traced._next_send = 0.0
    first, second = traced.collect(), traced.collect()
    assert first is not None
    assert second is not None
    assert len(first.steps) == 4 * RECORD_SIZE
    assert [record.step for record in unpack(second.steps)] == [4, 5]
    traced.end()


def test_what_cannot_be_sent_now_stays() -> None:
    traced, _ = begun()
    make_steps(2)
    traced._next_send = 0.0
    assert traced.collect(can_send=False) is None
    assert traced.due > time.monotonic() - 1.0
    traced._next_send = 0.0
    found = traced.collect()
    assert found is not None
    assert len(found.steps) == 2 * RECORD_SIZE
    traced.end()


def test_a_failure_is_reported_once_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, said = begun()
    monkeypatch.setattr(traced, "_sample", lambda: 1 / 0)
    assert traced.collect() is None
    assert traced.collect() is None
    assert traced.end() is None
    assert len(said) == 1
    assert "Tracing of this rank has stopped: ZeroDivisionError" in said[0]


def test_where_tracing_cannot_begin_the_rank_is_warned_and_not_traced() -> None:
    said: list[str] = []
    assert Tracing.begin(TraceSettings(mode="selective"), said.append) is None
    assert "This rank is not traced: ConfigError" in said[0]
    assert current.recording() is None


def test_the_places_where_the_thread_was_found_are_reported_by_phase() -> None:
    traced, _ = begun(TraceSettings(mode="manual", facts={"flops_per_sample": 3.0}))
    for _ in range(2):
        make_steps(1)
        traced._next_place = 0.0
        traced.collect(can_send=False)
    traced._next_send = 0.0
    found = traced.collect()
    assert found is not None
    facts = msgspec.json.decode(found.facts)
    assert facts["flops_per_sample"] == 3.0
    assert "test_the_places_where_the_thread_was_found_are_reported_by_phase" in facts["seen"]["outside"]
    traced.end()


def test_machines_are_looked_at_without_steps_where_only_they_are_asked_for() -> None:
    traced, _ = begun(TraceSettings(steps=False))
    assert current.recording() is None
    traced._next_send = 0.0
    found = traced.collect()
    assert found is not None
    assert found.steps == b""
    assert found.samples
    traced.end()


def test_the_newest_steps_of_a_killed_rank_are_read_from_its_ring(tmp_path: Path) -> None:
    ring = tmp_path / "rings" / "0-0"
    code = f"""
import os, signal
from powertrain.worker.tracing import Tracing, TraceSettings
from powertrain.trace.recording import current
Tracing.begin(TraceSettings(mode="manual", ring={str(ring)!r}), print)
for _ in range(100):
    current.recording().reported()
current.recording().process_marks()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    assert [record.step for record in unpack(newest_steps(str(ring)))] == list(range(100))
    assert [record.step for record in unpack(newest_steps(str(ring), after=98))] == [98, 99]
    assert [record.step for record in unpack(newest_steps(str(ring), most=1))] == [99]
    ring.write_bytes(b"something else entirely, and of no use")
    assert newest_steps(str(ring)) == b""
    assert newest_steps(str(tmp_path / "none")) == b""


def test_without_a_place_for_its_ring_a_rank_records_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    traced, said = begun(TraceSettings(mode="manual", ring=str(tmp_path / "file" / "0-0")))
    make_steps(2)
    found = traced.end()
    assert found is not None
    assert len(found.steps) == 2 * RECORD_SIZE
    assert said == []


def test_threads_that_collect_and_end_at_once_send_each_step_once() -> None:
    traced, _ = begun()
    got: list[int] = []
    stop = threading.Event()

    def collect() -> None:
        while not stop.is_set():
            traced._next_send = 0.0
            if (found := traced.collect()) is not None:
                got.extend(record.step for record in unpack(found.steps))

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        make_steps(3000)
        last = traced.end()
    finally:
        stop.set()
        thread.join()
    if last is not None:
        got.extend(record.step for record in unpack(last.steps))
    assert got == list(range(3000))


def test_what_was_recorded_and_patched_before_a_rank_came_is_put_back() -> None:
    from powertrain.trace.recording import patch_choice, patches

    before = Recorder()
    current.use(before)
    installed = patches.install(before, patch_choice.choose("auto"))
    try:
        untraced = Untraced()
        assert current.recording() is not before
        traced, _ = begun(TraceSettings(mode="selective", forward=True))
        assert patches.installed() is not installed
        traced.end()
        untraced.restore()
        assert current.recording() is before
        now = patches.installed()
        assert now is not None
        assert installed is not None
        assert (now.recorder, now.choice) == (before, installed.choice)
    finally:
        patches.uninstall()


def test_a_rank_that_is_not_traced_leaves_nothing_patched() -> None:
    from torch.nn import Module

    from powertrain import trace
    from powertrain.trace.recording import patches

    plain = Module.__call__
    untraced = Untraced()
    trace.init()
    with trace.trace_step():
        pass
    untraced.restore()
    assert patches.installed() is None
    assert Module.__call__ is plain
    assert current.recording() is None


def test_a_rank_whose_tracing_failed_leaves_nothing_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn import Module

    plain = Module.__call__
    untraced = Untraced()
    traced, said = begun(TraceSettings(mode="auto"))
    monkeypatch.setattr(traced, "_sample", lambda: 1 / 0)
    traced.collect()
    traced.end()
    untraced.restore()
    assert len(said) == 1
    assert Module.__call__ is plain
    assert current.recording() is None
