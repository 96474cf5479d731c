"""Steps as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing. Pure, and event by event.

Each rank is a process of the trace, with a row of steps, a row of phases and, with a device, a row of phases there.
Within a step only the time of each phase is known: phases are laid out in the order in which a loop usually comes
through them. Ranks are laid beside each other by their own clocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import msgspec
import numpy as np

from powertrain.diagnosis.samples import Samples
from powertrain.diagnosis.steps import Floats, Steps
from powertrain.trace import phases

#: Rows of a rank.
STEPS, PHASES, DEVICE = 1, 2, 3
_ROW_NAMES = {STEPS: "steps", PHASES: "phases", DEVICE: "device"}
#: Within a step.
_ORDER = (
    phases.OUTSIDE,
    phases.REPORT,
    phases.INPUT,
    phases.H2D,
    phases.FORWARD,
    phases.INSIDE,
    phases.BACKWARD,
    phases.COLLECTIVE,
    phases.OPTIMIZER,
)
_ON_DEVICE = tuple(phase for phase in _ORDER if phase in phases.ON_DEVICE)
#: What is drawn as a curve: a field of samples, and its name.
_CURVES = {
    "cpu": "CPU cores busy",
    "rss": "process memory (MiB)",
    "gpu_busy": "GPU busy",
    "gpu_memory": "GPU memory (MiB)",
    "gpu_power": "GPU power (W)",
}
_MICROSECONDS = 1e6

Event = dict[str, Any]


def write(file: IO[bytes], steps: Iterable[Steps], samples: Mapping[int, Samples] | None = None) -> int:
    """Write the trace and return how many events it has.

    ``steps`` may come in parts, in the order of time: one is held in memory at a time.
    """
    count = 0
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for event in events(steps, samples):
        file.write(b",\n" if count else b"\n")
        file.write(msgspec.json.encode(event))
        count += 1
    file.write(b"\n]}\n")
    return count


def events(steps: Iterable[Steps], samples: Mapping[int, Samples] | None = None) -> Iterator[Event]:
    """The events of a trace, with times in microseconds since the first step."""
    parts = iter(steps)
    first = next(parts, None)
    samples = samples or {}
    began = _beginning(first, samples)
    named: set[int] = set()
    for part in itertools.chain([first] if first is not None else [], parts):
        for column, rank in enumerate(part.ranks):
            if rank not in named:
                named.add(rank)
                yield from _names(rank, part.hosts[column], bool(part.device[:, column].any()))
        yield from _step_events(part, began)
    for rank in sorted(samples):
        yield from _curves(samples[rank], began)


def _beginning(steps: Steps | None, samples: Mapping[int, Samples]) -> float:
    starts = steps.start.ravel() if steps is not None else np.zeros(0)
    times = [starts, *(looks.column("time") for looks in samples.values())]
    known = np.concatenate(times)
    known = known[np.isfinite(known) & (known > 0)]
    return float(known.min()) if len(known) else 0.0


def _names(rank: int, host: str, has_device: bool) -> Iterator[Event]:
    name = f"rank {rank} on {host}" if host else f"rank {rank}"
    yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
    for row, row_name in _ROW_NAMES.items():
        if row != DEVICE or has_device:
            yield {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": row_name}}


def _step_events(steps: Steps, began: float) -> Iterator[Event]:
    thread, device = (np.maximum(_numbers(table), 0.0) for table in (steps.phases, steps.device))
    starts = _numbers(steps.start - began)
    for row, number in enumerate(steps.numbers.tolist()):
        for column, rank in enumerate(steps.ranks):
            start = float(starts[row, column])
            spent = thread[row, column].tolist()
            arguments: dict[str, float] = {"step": number}
            for name, values in (("samples", steps.samples), ("tokens", steps.tokens), ("MiB", steps.memory)):
                if 0 < values[row, column] < np.inf:
                    arguments[name] = float(values[row, column])
            yield {
                **_span(rank, STEPS, f"step {number}", start, sum(spent)),
                "args": arguments,
            }
            yield from _phase_events(rank, PHASES, start, spent, _ORDER)
            before_device = sum(spent[phase] for phase in (phases.OUTSIDE, phases.REPORT, phases.INPUT))
            on_device = device[row, column].tolist()
            yield from _phase_events(rank, DEVICE, start + before_device, on_device, _ON_DEVICE)


def _phase_events(
    rank: int, row: int, start: float, spent: list[float], order: tuple[int, ...]
) -> Iterator[Event]:
    for phase in order:
        if spent[phase] > 0:
            yield _span(rank, row, phases.NAMES[phase], start, spent[phase])
            start += spent[phase]


def _span(rank: int, row: int, name: str, start: float, seconds: float) -> Event:
    return {
        "ph": "X",
        "pid": rank,
        "tid": row,
        "name": name,
        "ts": round(start * _MICROSECONDS, 3),
        "dur": round(seconds * _MICROSECONDS, 3),
    }


def _numbers(values: Floats) -> Floats:
    """JSON knows neither infinity nor NaN."""
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def _curves(looks: Samples, began: float) -> Iterator[Event]:
    times = ((looks.column("time") - began) * _MICROSECONDS).round(3).tolist()
    for field, name in _CURVES.items():
        values = looks.column(field)
        if not np.any(values > 0):
            continue
        for time, value in zip(times, _numbers(values).tolist(), strict=True):
            yield {"ph": "C", "pid": looks.rank, "name": name, "ts": time, "args": {"value": value}}
