"""What ranks send of their records is kept whole or not at all, and nothing that they send can end a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.engine import base
from powertrain.run.record.telemetry import TelemetryWriter, why_unusable
from powertrain.run.spec import RunDirectories, RunSpec
from powertrain.run.workers import launch
from powertrain.storage import open_storage
from powertrain.trace import store
from powertrain.trace.machine import samples
from powertrain.trace.recording import ring as recording_ring
from powertrain.trace.recording.phases import RECORD_SIZE
from powertrain.trace.recording.recorder import Recorder
from powertrain.wire import from_worker
from powertrain.worker.place import RunIdentity
from powertrain.worker.tracing import TraceSettings


def recorded(count: int, path: str = "") -> bytes:
    """So many steps as a rank records them; also as the ring of a rank, where a path is given."""
    ring = bytearray(recording_ring.ring_size())
    recorder = Recorder(ring)
    for _ in range(count):
        recorder.reported()
    recorder.process_marks()
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(ring)
    return recording_ring.read_ring(ring)[1]


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return RunSpec(
        run=RunIdentity(name="run", path=str(tmp_path / "run"), storage_path=str(tmp_path)),
        directories=RunDirectories(runtime=str(tmp_path / "runtime")),
        min_workers=2,
        max_workers=2,
        shape=base.SlotShape(),
        trace=TraceSettings(),
    )


def member(rank: int, attempt: int = 0) -> Any:
    return SimpleNamespace(rank=rank, attempt=SimpleNamespace(number=attempt))


def test_steps_samples_and_facts_are_kept_by_rank(spec: RunSpec) -> None:
    storage = open_storage(spec.run.path)
    kept = TelemetryWriter(spec, storage, 1, pytest.fail)
    steps = recorded(3)
    kept.on_telemetry(member(0), from_worker.Telemetry(steps=steps, facts=b'{"device": "a"}'))
    kept.on_telemetry(
        member(1), from_worker.Telemetry(steps=steps[: 2 * RECORD_SIZE], samples=b"\0" * samples.SAMPLE_SIZE)
    )
    kept.close()
    found = store.read(storage)
    assert {rank: len(table) for rank, table in found.steps[0].items()} == {0: 3, 1: 2}
    assert found.facts[0][0] == {"device": "a"}
    assert len(found.samples[0][1]) == 1


def test_telemetry_that_is_no_record_is_reported_once_and_not_kept(spec: RunSpec) -> None:
    storage, told = open_storage(spec.run.path), []
    kept = TelemetryWriter(spec, storage, 1, lambda message: told.append(message))
    kept.on_telemetry(member(1), from_worker.Telemetry(steps=b"half"))
    kept.on_telemetry(member(1), from_worker.Telemetry(facts=b"[1, 2]"))
    kept.close()
    assert "rank 1" in told[0]
    assert "no whole records" in told[0]
    assert "facts cannot be read" in told[1]
    assert store.read(storage).steps == {}


@given(st.binary(max_size=400), st.binary(max_size=400), st.binary(max_size=60))
def test_any_bytes_are_whole_records_or_refused(steps: bytes, looks: bytes, facts: bytes) -> None:
    message = from_worker.Telemetry(steps=steps, samples=looks, facts=facts)
    wrong = why_unusable(message)
    if len(steps) % RECORD_SIZE or len(looks) % samples.SAMPLE_SIZE:
        assert wrong
    if not wrong and facts:
        assert facts.strip().startswith(b"{")


def test_a_dead_rank_is_given_the_steps_that_it_had_not_sent(spec: RunSpec) -> None:
    storage = open_storage(spec.run.path)
    kept = TelemetryWriter(spec, storage, 1, pytest.fail)
    ring = launch.ring_path(spec, 0, 1)
    steps = recorded(10, ring)
    kept.on_telemetry(member(1), from_worker.Telemetry(steps=steps[: 4 * RECORD_SIZE]))
    kept.on_rank_gone(member(1), None)
    slot = base.Slot(id="a", host="other", address="10.0.0.2")
    kept.on_rank_gone(member(0), base.Exited(slot, 1, -9, steps=steps[-2 * RECORD_SIZE :]))
    kept.close()
    found = store.read(storage)
    assert found.steps[0][1]["step"].tolist() == list(range(10))
    assert found.steps[0][0]["step"].tolist() == [8, 9]
    assert not Path(ring).exists()


def test_without_tracing_nothing_is_written(spec: RunSpec) -> None:
    import dataclasses

    storage = open_storage(spec.run.path)
    kept = TelemetryWriter(dataclasses.replace(spec, trace=None), storage, 1, pytest.fail)
    kept.on_telemetry(member(0), from_worker.Telemetry(steps=recorded(1)))
    kept.on_rank_gone(member(0), None)
    kept.close()
    assert storage.list("telemetry") == []
