"""Times of a device from the activities of a window of steps. Pure."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from powertrain.trace.recording.phases import COUNT, NAMES, OUTSIDE

#: Calls of the CUDA runtime and driver in which the host waits for the device.
WAITING_CALLS = frozenset(
    {
        "cudaStreamSynchronize",
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaMemcpy",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventSynchronize",
    }
)
#: Calls in which torch's allocator takes memory from the device or gives it back. They may wait for the device, too.
ALLOCATING_CALLS = frozenset(
    {"cudaMalloc", "cudaFree", "cudaMallocAsync", "cudaFreeAsync", "cuMemCreate", "cuMemMap", "cuMemUnmap"}
)

Number = TypeVar("Number", int, float)


class Activity(NamedTuple):
    """One activity, in nanoseconds of one clock: a kernel or copy on the device, or a call of the host."""

    name: str
    start: int
    duration: int
    is_on_device: bool
    #: The same for a call and the activity that it has launched.
    correlation: int = 0


class DeviceActivity(msgspec.Struct, frozen=True, kw_only=True):
    """The device in one step, on average over a window of steps. Durations are seconds."""

    steps: int
    #: Time of a step of the window on the host: longer than usual, because the profiler records.
    seconds: float = 0.0
    #: Time in which at least one kernel or copy ran.
    busy: float
    #: The same by the phase of the loop that launched them, which ``busy`` is less than where they overlap.
    busy_by_phase: dict[str, float]
    kernels: float
    #: Copies between host and device.
    to_device: float
    to_host: float
    #: Calls in which the host waited for the device, and their time, by the phase of the loop.
    waits: dict[str, float]
    waited: dict[str, float]
    #: Time of calls that take memory from the device or give it back.
    allocating: float = 0.0


def summarize(
    activities: Iterable[Activity], phases: Sequence[tuple[int, int]], steps: int, seconds: float, end: int
) -> DeviceActivity | None:
    """Return what a device did in a window of steps of so many ``seconds`` each; None where it did nothing.

    ``phases`` are the times at which the loop's phase changed, and the new phases, in order; ``end`` is when the last
    step ended on the host: later calls are those of the profiler.
    """
    every = list(activities)
    on_device = [one for one in every if one.is_on_device]
    calls = [one for one in every if not one.is_on_device and one.start < end]
    if not on_device or steps < 1:
        return None
    launched = {one.correlation: one.start for one in calls if one.correlation}
    by_phase = [0] * COUNT
    for one in on_device:
        by_phase[_phase_at(phases, launched.get(one.correlation, one.start))] += one.duration
    waits: Counter[str] = Counter()
    waited: Counter[str] = Counter()
    for call in calls:
        if call.name in WAITING_CALLS:
            phase = NAMES[_phase_at(phases, call.start)]
            waits[phase] += 1
            waited[phase] += call.duration
    return DeviceActivity(
        steps=steps,
        seconds=seconds,
        busy=covered((one.start, one.start + one.duration) for one in on_device) / steps * 1e-9,
        busy_by_phase={NAMES[phase]: time / steps * 1e-9 for phase, time in enumerate(by_phase) if time},
        kernels=sum(not one.name.startswith("Mem") for one in on_device) / steps,
        to_device=_time_of(on_device, "Memcpy HtoD") / steps,
        to_host=_time_of(on_device, "Memcpy DtoH") / steps,
        waits={phase: count / steps for phase, count in waits.items()},
        waited={phase: time / steps * 1e-9 for phase, time in waited.items()},
        allocating=sum(call.duration for call in calls if call.name in ALLOCATING_CALLS) / steps * 1e-9,
    )


def covered(intervals: Iterable[tuple[Number, Number]]) -> Number | int:
    """Return the length of the union of intervals, in any unit."""
    total: Number | int = 0
    reached: Number | None = None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total, reached = total + end - start, end
        elif end > reached:
            total, reached = total + end - reached, end
    return total


def _time_of(activities: Iterable[Activity], prefix: str) -> float:
    return sum(one.duration for one in activities if one.name.startswith(prefix)) * 1e-9


def _phase_at(phases: Sequence[tuple[int, int]], time: int) -> int:
    place = bisect.bisect_right(phases, (time, COUNT)) - 1
    return phases[place][1] if place >= 0 else OUTSIDE
