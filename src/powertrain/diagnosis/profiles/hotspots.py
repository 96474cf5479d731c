"""Where the time of profiled steps went: kernels or operators, lines, gaps of the device, waits of the host. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from powertrain.diagnosis.profiles.trace_events import ProfileEvent, ProfileTrace
from powertrain.trace.device.activity import WAITING_CALLS, covered

#: Microseconds from which a pause of the device counts as a gap: shorter ones lie between any two kernels.
_LEAST_GAP_US = 5.0
_OUTSIDE = "(no line of yours)"


class HotSpot(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a table: milliseconds and calls of a step."""

    name: str
    ms: float
    #: Of the steps' time.
    share: float
    calls: float = 0.0


class MemorySpot(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one line allocates in a step."""

    name: str
    mib: float
    calls: float = 0.0


class ProfileSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The profile of one rank, by step."""

    steps: int
    step_ms: float
    #: Milliseconds in which the device worked; None without a device.
    device_ms: float | None
    #: Milliseconds of the training thread within operators of torch, and outside of them (Python, data).
    operators_ms: float
    kernels: tuple[HotSpot, ...]
    operators: tuple[HotSpot, ...]
    lines: tuple[HotSpot, ...]
    gaps: tuple[HotSpot, ...] = ()
    syncs: tuple[HotSpot, ...] = ()
    allocations: tuple[MemorySpot, ...] = ()


def summarize(trace: ProfileTrace, steps: int, seconds: float, most: int = 8) -> ProfileSummary:
    """Return where the time went.

    Args:
        trace: The events of one rank.
        steps: The number of profiled steps.
        seconds: Wall time of all of them.
        most: Entries in each list.
    """
    tally = _Tally(max(steps, 1), seconds * 1e3 / max(steps, 1), most)
    outermost = _outermost(trace.operators)
    main = _busiest_thread(outermost)
    on_main = [one for one in outermost if one.thread == main]
    is_on_device = bool(trace.device)
    return ProfileSummary(
        steps=tally.steps,
        step_ms=tally.step_ms,
        device_ms=_covered(trace.device) / 1e3 / tally.steps if is_on_device else None,
        operators_ms=_covered(on_main) / 1e3 / tally.steps,
        kernels=tally.spots((one.name, one.duration) for one in trace.device),
        operators=() if is_on_device else tally.spots(_own_times(trace.operators)),
        lines=tally.spots(
            (trace.line_of.get(one.operator, _OUTSIDE), one.duration)
            for one in (trace.device if is_on_device else outermost)
        ),
        gaps=tally.spots(_gaps(trace)),
        syncs=tally.spots(
            (f"{_SHORT.get(one.name, one.name)} at {_line_of_wait(one, trace)}", one.duration)
            for one in trace.runtime
            if one.name in WAITING_CALLS
        ),
        allocations=_allocations(trace, tally),
    )


_SHORT = {
    "cudaStreamSynchronize": "stream sync",
    "cudaDeviceSynchronize": "device sync",
    "cudaEventSynchronize": "event sync",
    "cudaMemcpy": "copy",
}


def _line_of_wait(call: ProfileEvent, trace: ProfileTrace) -> str:
    return trace.line_of.get(call.operator) or call.line or _OUTSIDE


class _Tally:
    """Sums by name, as the largest of them by step."""

    def __init__(self, steps: int, step_ms: float, most: int) -> None:
        self.steps, self.step_ms, self.most = steps, step_ms, most

    def spots(self, parts: Iterable[tuple[str, float]]) -> tuple[HotSpot, ...]:
        sums: dict[str, float] = defaultdict(float)
        calls: dict[str, int] = defaultdict(int)
        for name, microseconds in parts:
            sums[name] += microseconds
            calls[name] += 1
        largest = sorted(sums, key=lambda name: (-sums[name], name))[: self.most]
        return tuple(
            HotSpot(
                name=name,
                ms=sums[name] / 1e3 / self.steps,
                share=sums[name] / 1e3 / self.steps / self.step_ms if self.step_ms > 0 else 0.0,
                calls=calls[name] / self.steps,
            )
            for name in largest
        )


def _outermost(operators: Sequence[ProfileEvent]) -> list[ProfileEvent]:
    """Return the operators that no other of their thread called. They are in the order of time."""
    until: dict[str, float] = {}
    found = []
    for one in operators:
        if one.start >= until.get(one.thread, float("-inf")):
            found.append(one)
            until[one.thread] = one.end
    return found


def _busiest_thread(outermost: Sequence[ProfileEvent]) -> str:
    times: dict[str, float] = defaultdict(float)
    for one in outermost:
        times[one.thread] += one.duration
    return max(times, key=lambda thread: times[thread], default="")


def _own_times(operators: Sequence[ProfileEvent]) -> list[tuple[str, float]]:
    """Return the time of each operator without those that it called."""
    own = [one.duration for one in operators]
    open_calls: dict[str, list[int]] = defaultdict(list)
    for index, one in enumerate(operators):
        calls = open_calls[one.thread]
        while calls and operators[calls[-1]].end <= one.start:
            calls.pop()
        if calls:
            own[calls[-1]] -= one.duration
        calls.append(index)
    return [(one.name, max(time, 0.0)) for one, time in zip(operators, own, strict=True)]


def _covered(events: Sequence[ProfileEvent]) -> float:
    """Return the microseconds in which at least one event was under way."""
    return covered((one.start, one.end) for one in events)


def _gaps(trace: ProfileTrace) -> list[tuple[str, float]]:
    """Return the pauses of the device, each with the line whose kernel ended it."""
    found = []
    until: float | None = None
    for one in trace.device:
        if until is not None and one.start - until >= _LEAST_GAP_US:
            found.append((f"before {trace.line_of.get(one.operator, _OUTSIDE)}", one.start - until))
        until = one.end if until is None else max(until, one.end)
    return found


def _allocations(trace: ProfileTrace, tally: _Tally) -> tuple[MemorySpot, ...]:
    """Return the lines that allocate most. An allocation belongs to the innermost operator around it."""
    sums: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    open_calls: dict[str, list[ProfileEvent]] = defaultdict(list)
    merged = sorted(
        (*trace.operators, *trace.allocations), key=lambda one: (one.start, one.name == "[memory]")
    )
    for one in merged:
        stack = open_calls[one.thread]
        while stack and stack[-1].end < one.start:
            stack.pop()
        if one.name != "[memory]":
            stack.append(one)
        elif one.bytes > 0:
            line = trace.line_of.get(stack[-1].operator, _OUTSIDE) if stack else _OUTSIDE
            sums[line] += one.bytes
            calls[line] += 1
    largest = sorted(sums, key=lambda line: (-sums[line], line))[: tally.most]
    return tuple(
        MemorySpot(name=line, mib=sums[line] / 2**20 / tally.steps, calls=calls[line] / tally.steps)
        for line in largest
    )
