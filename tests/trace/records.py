"""What was recorded, as values."""

from __future__ import annotations

from powertrain.trace.recording import phases
from powertrain.trace.recording.phases import RECORD_SIZE, StepRecord
from powertrain.trace.recording.recorder import Recorder


class ManualClock:
    """Time that passes where a test says so, and a microsecond with each look, so that every phase takes some."""

    def __init__(self) -> None:
        self._nanoseconds = 0

    def __call__(self) -> int:
        self._nanoseconds += 1_000
        return self._nanoseconds

    def sleep(self, seconds: float) -> None:
        self._nanoseconds += round(seconds * 1e9)


#: What the recorders of tests measure by, and what takes a while in them.
clock = ManualClock()
sleep = clock.sleep


def unpacked(data: bytes) -> list[StepRecord]:
    return [phases.unpack_from(data, at) for at in range(0, len(data), RECORD_SIZE)]


def steps(recorder: Recorder) -> list[StepRecord]:
    """All that a recorder has made, the last one closed."""
    recorder.flush()
    return unpacked(recorder.drain(0)[1])


def phases_longer_than(record: StepRecord, seconds: float) -> set[str]:
    """By their names."""
    return {name for name, taken in zip(phases.NAMES, record.phases, strict=True) if taken > seconds}
