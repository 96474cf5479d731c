"""Steps as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing. Pure, and event by event.

Each rank is a process of the trace, with a row of steps, a row of phases and, with a device, a row of phases there.
Within a step only the time of each phase is known: phases are drawn in their usual order. Ranks are aligned by their
own clocks. A step without measured device times has none in that row: its record holds the usual times, not its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from powertrain.diagnosis.tables.samples import Samples
from powertrain.diagnosis.tables.steps import Floats, StepTable
from powertrain.trace.recording import phases

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
#: Fields of samples that are drawn as curves, and their names.
_CURVES = {
    "cpu": "CPU cores busy",
    "rss": "process memory (MiB)",
    "gpu_busy": "GPU busy",
    "gpu_memory": "GPU memory (MiB)",
    "gpu_power": "GPU power (W)",
}
_MICROSECONDS = 1e6
#: Steps of a part: its tables are copied while it is written, those of the whole run never.
_PART = 2_000
#: Bytes that are written at once.
_PIECE = 1 << 20

Event = dict[str, Any]


def write(file: IO[bytes], steps: Iterable[StepTable], samples: Mapping[int, Samples] | None = None) -> int:
    """Write the trace and return how many events it has.

    ``steps`` may come in parts, in the order of time: one is held in memory at a time.
    """
    count = 0
    encoder = msgspec.json.Encoder()
    piece = bytearray(b'{"displayTimeUnit":"ms","traceEvents":[')
    for event in events(steps, samples):
        piece += b",\n" if count else b"\n"
        encoder.encode_into(event, piece, -1)
        count += 1
        if len(piece) >= _PIECE:
            file.write(piece)
            piece.clear()
    file.write(piece + b"\n]}\n")
    return count


def parts(steps: StepTable, size: int = _PART) -> Iterator[StepTable]:
    """Yield the steps in parts of ``size``, in order."""
    for start in range(0, len(steps), size):
        yield _rows(steps, slice(start, start + size))


def newest(
    steps: StepTable, samples: Mapping[int, Samples], count: int
) -> tuple[StepTable, dict[int, Samples]]:
    """Return the last ``count`` steps, and each rank's samples since the first of these began."""
    kept = _rows(steps, slice(max(0, len(steps) - count), None))
    began = dict(zip(kept.ranks, kept.start[0].tolist(), strict=True)) if len(kept) else {}
    first = min(began.values(), default=-np.inf)
    return kept, {
        rank: replace(looks, table=looks.table[looks.column("time") >= began.get(rank, first)])
        for rank, looks in samples.items()
    }


def _rows(steps: StepTable, rows: slice) -> StepTable:
    whole = {"ranks", "hosts"}
    cut = {f.name: getattr(steps, f.name)[rows] for f in fields(steps) if f.name not in whole}
    return replace(steps, **cut)


def events(steps: Iterable[StepTable], samples: Mapping[int, Samples] | None = None) -> Iterator[Event]:
    """Yield the events of a trace, with times in microseconds since the first step."""
    rest = iter(steps)
    first = next(rest, None)
    samples = samples or {}
    began = _beginning(first, samples)
    named: set[tuple[int, int]] = set()
    for part in itertools.chain([first] if first is not None else [], rest):
        yield from _names(part, named)
        yield from _step_events(part, began)
    for rank in sorted(samples):
        yield from _curves(samples[rank], began)


def _beginning(steps: StepTable | None, samples: Mapping[int, Samples]) -> float:
    starts = steps.start.ravel() if steps is not None else np.zeros(0)
    times = [starts, *(looks.column("time") for looks in samples.values())]
    known = np.concatenate(times)
    known = known[np.isfinite(known) & (known > 0)]
    return float(known.min()) if len(known) else 0.0


def _names(steps: StepTable, named: set[tuple[int, int]]) -> Iterator[Event]:
    """Yield the names of new ranks and rows of these steps; adds them to ``named``."""
    has_device = _on_device(steps).sum(axis=(0, 2)) > 0
    for column, (rank, host) in enumerate(zip(steps.ranks, steps.hosts, strict=True)):
        if (rank, STEPS) not in named:
            name = f"rank {rank} on {host}" if host else f"rank {rank}"
            yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
            yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for row, row_name in _ROW_NAMES.items():
            if (rank, row) not in named and (row != DEVICE or has_device[column]):
                named.add((rank, row))
                yield {"ph": "M", "pid": rank, "tid": row, "name": "thread_name", "args": {"name": row_name}}


def _as_usual(steps: StepTable) -> NDArray[np.bool_]:
    """Return (steps, ranks): whether the recorded device times are usual times, not measured ones."""
    return (steps.flags & phases.AS_USUAL_ON_DEVICE).astype(bool)


def _on_device(steps: StepTable) -> Floats:
    """Return (steps, ranks, phases): measured device times."""
    device = np.maximum(_numbers(steps.device), 0.0)
    return np.where(_as_usual(steps)[:, :, None], 0.0, device)


def _step_events(steps: StepTable, began: float) -> Iterator[Event]:
    thread, device = np.maximum(_numbers(steps.phases), 0.0), _on_device(steps)
    as_usual = _as_usual(steps)
    memory = np.where(as_usual, 0.0, steps.memory)
    starts = _numbers(steps.start - began)
    for row, number in enumerate(steps.numbers.tolist()):
        for column, rank in enumerate(steps.ranks):
            start = float(starts[row, column])
            spent = thread[row, column].tolist()
            arguments: dict[str, float | str] = {"step": number}
            if as_usual[row, column]:
                arguments["device"] = "not timed in this step"
            for name, values in (("samples", steps.samples), ("tokens", steps.tokens), ("MiB", memory)):
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
    """Return values without infinity and NaN, which JSON lacks."""
    return np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)


def _curves(looks: Samples, began: float) -> Iterator[Event]:
    times = ((looks.column("time") - began) * _MICROSECONDS).round(3).tolist()
    for field, name in _CURVES.items():
        values = looks.column(field)
        if not np.any(values > 0):
            continue
        for time, value in zip(times, _numbers(values).tolist(), strict=True):
            yield {"ph": "C", "pid": looks.rank, "name": name, "ts": time, "args": {"value": value}}
