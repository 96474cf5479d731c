"""What was recorded, as values."""

from __future__ import annotations

from powertrain.trace import phases, spans
from powertrain.trace.phases import RECORD_SIZE, StepRecord


def unpacked(data: bytes) -> list[StepRecord]:
    return [phases.unpack_from(data, at) for at in range(0, len(data), RECORD_SIZE)]


def steps(recorder: spans.Recorder) -> list[StepRecord]:
    """All that a recorder has made, the last one closed."""
    recorder.flush()
    return unpacked(recorder.drain(0)[1])


def phases_longer_than(record: StepRecord, seconds: float) -> set[str]:
    """By their names."""
    return {name for name, taken in zip(phases.NAMES, record.phases, strict=True) if taken > seconds}
