"""A profile's trace as events: Chrome's format, as torch's profiler writes it. Pure."""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from powertrain.errors import StorageError

#: Categories of events on a device.
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_GZIP = 16 + zlib.MAX_WBITS
#: Nanoseconds by which a time in the file may differ from the one in the profiler's tree.
_SAME_NS = 500


class _RawArguments(msgspec.Struct, frozen=True):
    external: int = msgspec.field(name="External id", default=0)
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    bytes: float = msgspec.field(name="Bytes", default=0.0)


class _RawEvent(msgspec.Struct, frozen=True):
    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: Any = None
    ts: float = 0.0
    dur: float = 0.0
    args: Any = None


class _RawLines(msgspec.Struct, frozen=True):
    lines: list[str] = []
    operators: dict[int, int] = {}
    waits: list[tuple[int, int, int]] = []


class _RawTrace(msgspec.Struct, frozen=True):
    # Names in the file.
    traceEvents: list[_RawEvent] = []
    #: To which the times of events are added.
    baseTimeNanoseconds: int = 0
    powertrain: _RawLines = _RawLines()


@dataclass(frozen=True)
class ProfileEvent:
    """One event. Times are microseconds."""

    kind: str
    name: str
    thread: str
    start: float
    duration: float
    #: The operator that it belongs to, or that it is; 0 for none.
    operator: int = 0
    #: Links an operator with its backward; -1 for none.
    sequence: int = -1
    #: Of an allocation; negative where memory was freed.
    bytes: float = 0.0
    #: The line of the user's code, of a wait for the device outside of operators; otherwise "".
    line: str = ""

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class ProfileTrace:
    """The events of one rank's profile, by what they are, each in the order of time."""

    operators: tuple[ProfileEvent, ...]
    #: Kernels, copies and fills on devices.
    device: tuple[ProfileEvent, ...]
    #: Calls of the CUDA runtime.
    runtime: tuple[ProfileEvent, ...]
    allocations: tuple[ProfileEvent, ...]
    #: By operator, the line of the user's code; that of a backward is its forward's.
    line_of: dict[int, str]


def read_trace(packed: bytes) -> ProfileTrace:
    """Return the events of a compressed trace. Raises StorageError for one that cannot be read."""
    try:
        text = zlib.decompress(packed, _GZIP)
        raw = msgspec.json.decode(text, type=_RawTrace)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StorageError(
            f"The profile is damaged: {error}. Make it again with 'powertrain profile'."
        ) from error
    events = sorted((_event(one) for one in raw.traceEvents if _is_used(one)), key=lambda one: one.start)
    operators = tuple(one for one in events if one.kind == "cpu_op")
    return ProfileTrace(
        operators=operators,
        device=tuple(one for one in events if one.kind in _ON_DEVICE),
        runtime=_with_lines(events, raw),
        allocations=tuple(one for one in events if one.name == "[memory]"),
        line_of=_lines(operators, raw.powertrain),
    )


def _is_used(raw: _RawEvent) -> bool:
    return raw.ph == "X" or (raw.ph == "i" and raw.name == "[memory]")


def _event(raw: _RawEvent) -> ProfileEvent:
    try:
        arguments = msgspec.convert(raw.args or {}, type=_RawArguments)
    except msgspec.ValidationError:  # of another event, whose arguments have other types
        arguments = _RawArguments()
    return ProfileEvent(
        kind=raw.cat,
        name=raw.name,
        thread=str(raw.tid),
        start=raw.ts,
        duration=raw.dur,
        operator=arguments.external,
        sequence=arguments.sequence,
        bytes=arguments.bytes,
    )


def _with_lines(events: Sequence[ProfileEvent], raw: _RawTrace) -> tuple[ProfileEvent, ...]:
    """Return calls of the CUDA runtime, with the lines of those that ``torch.cuda.synchronize()`` and the like make.

    The lines are known by the begin of the Python call around them. A call and what it calls are on one thread.
    """
    known = raw.powertrain
    waits = sorted((begin, index) for begin, _, index in known.waits if 0 <= index < len(known.lines))
    #: By thread the last of these Python calls that has begun.
    current: dict[str, ProfileEvent] = {}
    found = []
    for one in events:
        if one.kind == "python_function" and "synchronize" in one.name:
            begin = raw.baseTimeNanoseconds + round(one.start * 1e3)
            if line := _line_at(begin, waits, known.lines):
                current[one.thread] = replace(one, line=line)
        elif one.kind in ("cuda_runtime", "cuda_driver"):
            call = current.get(one.thread)
            found.append(replace(one, line=call.line) if call and one.start <= call.end else one)
    return tuple(found)


def _line_at(begin: int, waits: Sequence[tuple[int, int]], lines: Sequence[str]) -> str:
    """Return the line of the call that begins then, as exactly as the file has it; "" for none."""
    index = bisect.bisect_left(waits, (begin - _SAME_NS, 0))
    return lines[waits[index][1]] if index < len(waits) and waits[index][0] <= begin + _SAME_NS else ""


def _lines(operators: tuple[ProfileEvent, ...], known: _RawLines) -> dict[int, str]:
    """Return the line of each operator; that of a backward is named after the forward that it undoes."""
    lines = {
        operator: known.lines[index]
        for operator, index in known.operators.items()
        if 0 <= index < len(known.lines)
    }
    forward = {
        one.sequence: lines[one.operator]
        for one in operators
        if one.sequence >= 0 and one.operator in lines and not _is_backward(one)
    }
    #: By thread the end of the backward that it is in, and the line of its forward.
    current: dict[str, tuple[float, str]] = {}
    for one in operators:
        until, line = current.get(one.thread, (float("-inf"), ""))
        if one.start >= until and _is_backward(one) and one.sequence in forward:
            until, line = current[one.thread] = one.end, forward[one.sequence]
        if one.start < until:
            lines[one.operator] = f"backward of {line}"
    return lines


def _is_backward(operator: ProfileEvent) -> bool:
    return "Backward" in operator.name or operator.name.startswith("autograd::engine")
