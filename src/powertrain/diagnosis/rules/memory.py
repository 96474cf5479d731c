"""Memory: too little of it left, more of it with every step, and ranks that need unequally much.

The memory of the device that a step leaves in use is recorded with the step (``StepTable.memory``); that of the
process and of the machine is sampled about every second (:class:`Samples`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from powertrain.diagnosis import words
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.rules.trend import LEAST_VALUES, Trend, steady_growth
from powertrain.diagnosis.tables.samples import Samples, by_host
from powertrain.diagnosis.tables.steps import Floats, StepTable
from powertrain.run.health.hang_report import rank_names

#: From here on memory is short: the part of the machine or device in use.
FULL = 0.92
_NEARLY_FULL = 0.97
#: Looks that must find it so; or so many at the very end, of a run that may have been ended by it.
_FULL_LOOKS = 3
_FULL_LAST_LOOKS = 2
#: Device memory in use beyond this share that is not torch's tensors is its cache, or another process's.
_UNEXPLAINED = 0.2
#: The part that should stay free.
_FREE = 0.1

#: Minimum growth for a finding, in MiB and relative to the initial memory.
_GROWTH = 16.0
_GROWTH_SHARE = 0.02
#: The first tenth of a run fills caches and pools.
_STARTUP = 0.1
#: Memory that is full within so many seconds is critical; later than that only worth knowing.
_SOON = 3600.0
_FAR = 30 * 86400.0

#: Ranks differ when one needs so much more than the median of the others, in so many of at least so many rows.
IMBALANCE = 0.2
_LASTING = 0.8
_LEAST_ROWS = 20
_DEVICE_DIFFERENCE = 64.0
_HOST_DIFFERENCE = 256.0


def find(
    steps: StepTable,
    samples: Mapping[int, Samples],
    kept: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
) -> list[Finding]:
    """Return findings about memory; none if there are too few records.

    ``kept`` has by rank the lines whose device memory stayed in use, with their MiB a step.
    """
    with np.errstate(all="ignore"):
        return [
            *_host_leaks(samples),
            *_device_creep(steps, samples, kept or {}),
            *_host_pressure(samples),
            *_device_pressure(steps, samples),
            *_device_imbalance(steps),
            *_host_imbalance(steps, samples),
        ]


# --------------------------------------------------------------------------- growth


@dataclass(frozen=True)
class _Growing:
    """A rank whose memory grows: by the trend, for each step or, where none are counted, each second."""

    rank: int
    host: str
    trend: Trend
    by_step: bool
    per_minute: float
    #: Seconds until the machine or device is full, at this pace; infinite where its size is not known.
    full_in: float


def _host_leaks(samples: Mapping[int, Samples]) -> list[Finding]:
    growing = [found for looks in by_host(samples).values() for found in _leaks_of_host(looks)]
    if not growing:
        return []
    return [_growth_finding("host_memory_leak", "Host memory", growing, _LEAK_ACTION)]


def _leaks_of_host(ranks: Sequence[Samples]) -> list[_Growing]:
    """The ranks of one host that leak; each with the time that all of them together leave the machine."""
    found = []
    for looks in ranks:
        steady = _without_startup(looks.while_training())
        against, by_step = _against(steady)
        if trend := _worth_telling(steady_growth(against, steady.known("rss"))):
            found.append((looks, trend, by_step, trend.slope * _per_minute(against, steady.column("time"))))
    together = sum(per_minute for *_, per_minute in found)
    return [
        _Growing(
            rank=looks.rank,
            host=looks.host,
            trend=trend,
            by_step=by_step,
            per_minute=per_minute,
            full_in=_full_in(looks, "ram_used", "ram_total", together),
        )
        for looks, trend, by_step, per_minute in found
    ]


def _device_creep(
    steps: StepTable, samples: Mapping[int, Samples], kept: Mapping[int, Sequence[Mapping[str, Any]]]
) -> list[Finding]:
    growing = []
    for series in _device_memory(steps, samples):
        trend = _worth_telling(steady_growth(series.against, series.memory))
        if trend is None and _still_rises(steps, series.rank):
            trend = _worth_telling(_trend_of_lines(kept.get(series.rank, ()), series))
        if trend:
            per_minute = trend.slope * _per_minute(series.against, series.seconds)
            full_in = _full_in(samples.get(series.rank), "gpu_memory", "gpu_memory_total", per_minute)
            growing.append(_Growing(series.rank, series.host, trend, series.by_step, per_minute, full_in))
    if not growing:
        return []
    found = _growth_finding("device_memory_creep", "Device memory", growing, _CREEP_ACTION)
    lines = next((kept[one.rank] for one in growing if kept.get(one.rank)), ())
    return [_with_lines(found, lines) if lines else found]


def _still_rises(steps: StepTable, rank: int) -> bool:
    """Return whether the peak of a rank's device memory has risen in the last third of its steps."""
    if rank not in steps.ranks:
        return False
    peaks = _positive(steps.peak_memory[:, steps.ranks.index(rank)])
    peaks = peaks[np.isfinite(peaks)]
    return len(peaks) > 1 and bool(peaks[-1] > peaks[len(peaks) * 2 // 3])


def _trend_of_lines(lines: Sequence[Mapping[str, Any]], series: _Series) -> Trend | None:
    """Return the growth by lines of which every step kept memory.

    The memory in use goes up and down within a step, so that a few values of it do not show growth of some MiB.
    """
    mibs = [sum(of_step) for of_step in zip(*(line["mib"] for line in lines), strict=False)]
    known = series.memory[np.isfinite(series.memory)]
    if not mibs or not series.by_step or not len(known):
        return None
    slope, last = float(np.mean(mibs)), float(known[-1])
    grown = slope * float(series.against[-1] - series.against[0])
    return Trend(slope, float(min(mibs)), float(max(mibs)), max(0.0, last - grown), last)


def _with_lines(found: Finding, lines: Sequence[Mapping[str, Any]]) -> Finding:
    """Add where the memory was allocated that stays in use."""
    first = lines[0]
    allocated = f"{words.mebibytes(float(first['mib_per_step']))} a step allocated at {first['where']}"
    return msgspec.structs.replace(
        found,
        summary=f"{found.summary[:-1]}: {allocated} are kept.",
        evidence={**found.evidence, "line": first["where"], "lines": [dict(line) for line in lines]},
    )


class _Series(NamedTuple):
    """MiB of a rank's device, over steps or seconds."""

    rank: int
    host: str
    against: Floats
    by_step: bool
    memory: Floats
    seconds: Floats


def _device_memory(steps: StepTable, samples: Mapping[int, Samples]) -> Iterator[_Series]:
    """Return the device memory of each rank after start-up: at the end of steps, else from samples."""
    begin = int(len(steps) * _STARTUP)
    columns = {rank: column for column, rank in enumerate(steps.ranks)}
    for rank in sorted({*columns, *samples}):
        column = columns.get(rank)
        if column is not None and np.any(steps.memory[:, column] > 0):
            memory, seconds = _positive(steps.memory[begin:, column]), steps.start[begin:, column]
            numbers = steps.numbers[begin:].astype(np.float64)
            yield _Series(rank, steps.hosts[column], numbers, True, memory, seconds)
        elif rank in samples:
            looks = _without_startup(samples[rank].while_training())
            yield _Series(rank, looks.host, *_against(looks), looks.known("gpu_memory"), looks.column("time"))


def _worth_telling(trend: Trend | None) -> Trend | None:
    if trend is None or trend.growth < max(_GROWTH, _GROWTH_SHARE * trend.first):
        return None
    return trend


def _growth_finding(kind: str, what: str, growing: Sequence[_Growing], action: str) -> Finding:
    growing = sorted(growing, key=lambda one: one.rank)
    ranks, hosts = tuple(one.rank for one in growing), tuple(one.host for one in growing)
    worst = max(growing, key=lambda one: one.per_minute)
    soonest = min(one.full_in for one in growing)
    full = f", and is full in {words.long_time(soonest)} at this pace" if np.isfinite(soonest) else ""
    return Finding(
        kind=kind,
        severity="critical" if soonest < _SOON else "info" if _FAR < soonest < np.inf else "warning",
        summary=f"{what} of {rank_names(ranks)}{words.hosts(hosts)} grows steadily, by "
        f"{_pace(worst)}{words.mebibytes(worst.per_minute)} a minute{full}.",
        action=action,
        ranks=ranks,
        hosts=_known(hosts),
        evidence={
            "mib_per_step": [one.trend.slope if one.by_step else None for one in growing],
            "mib_per_step_low": [one.trend.low if one.by_step else None for one in growing],
            "mib_per_step_high": [one.trend.high if one.by_step else None for one in growing],
            "mib_per_minute": [one.per_minute for one in growing],
            "first_mib": [one.trend.first for one in growing],
            "last_mib": [one.trend.last for one in growing],
            "seconds_until_full": soonest if np.isfinite(soonest) else None,
        },
    )


def _pace(one: _Growing) -> str:
    if not one.by_step:
        return ""
    slope, low, high = (words.mebibytes(value) for value in (one.trend.slope, one.trend.low, one.trend.high))
    interval = "" if low == high else f" ({low} to {high} with 95 % confidence)"
    return f"{slope} a step{interval}, "


_LEAK_ACTION = (
    "Look for objects that outlive their step: tensors or losses appended to a list without .item() or .detach(), a "
    "cache without a bound, a dataset that keeps decoded samples; fewer loader workers only delay it."
)
_CREEP_ACTION = (
    "Look for tensors that outlive their step: a loss kept with its graph (use .item() or .detach()), outputs appended "
    "to a list, retain_graph=True, hidden states carried over without .detach()."
)


def _without_startup(looks: Samples) -> Samples:
    """Return the values without start-up, but at least as many as a trend needs if there are as many."""
    begin = min(int(len(looks) * _STARTUP), max(0, len(looks) - LEAST_VALUES))
    return Samples(looks.rank, looks.host, looks.table[begin:])


def _against(looks: Samples) -> tuple[Floats, bool]:
    """Return the axis of growth, and whether it is steps: seconds if no steps are counted."""
    steps = looks.column("step")
    advances = len(steps) > 0 and bool(steps[-1] > steps[0])
    return (steps if advances else looks.column("time")), advances


def _per_minute(numbers: Floats, seconds: Floats) -> float:
    """Return the advance of ``numbers`` in a minute; 0 if the time is unknown."""
    if len(numbers) < 2 or not seconds[-1] > seconds[0]:
        return 0.0
    return float((numbers[-1] - numbers[0]) / (seconds[-1] - seconds[0]) * 60)


def _full_in(looks: Samples | None, used: str, total: str, per_minute: float) -> float:
    if looks is None or not len(looks) or per_minute <= 0:
        return np.inf
    left = looks.known(total)[-1] - looks.known(used)[-1]
    return max(0.0, float(left) / per_minute * 60) if np.isfinite(left) else np.inf


# --------------------------------------------------------------------------- pressure


def _host_pressure(samples: Mapping[int, Samples]) -> list[Finding]:
    """Return one finding for all hosts that are short of memory."""
    short: list[tuple[float, list[Samples]]] = []
    for on_host in by_host(samples).values():
        peak = max(_peak_when_full(looks.known("ram_used") / looks.known("ram_total")) for looks in on_host)
        if peak > 0:
            short.append((peak, on_host))
    if not short:
        return []
    peak, worst = max(short, key=lambda one: one[0])
    total, own = _last(worst[0], "ram_total"), sum(_last(looks, "rss") for looks in worst)
    hosts = _known(looks.host for _, on_host in short for looks in on_host)
    return [
        Finding(
            kind="memory_pressure",
            severity=_severity_when_full(peak),
            summary=f"Memory of the machine{words.hosts(hosts)} is up to {words.share(peak)} full; its ranks hold "
            f"{words.mebibytes(own)} of {words.mebibytes(total)}.",
            action=f"Free {words.mebibytes((peak - 1 + _FREE) * total)}: fewer loader workers or a smaller prefetch, "
            "smaller caches, or fewer ranks on this machine. The kernel kills a process when none is left.",
            ranks=tuple(sorted(looks.rank for _, on_host in short for looks in on_host)),
            hosts=hosts,
            evidence={"where": "host", "full": peak, "total_mib": total, "ranks_mib": own},
        )
    ]


def _device_pressure(steps: StepTable, samples: Mapping[int, Samples]) -> list[Finding]:
    """Return one finding for all ranks whose device is short of memory."""
    short: list[tuple[float, float, Samples]] = []
    for rank in sorted(samples):
        looks = samples[rank].while_training()
        total = _last(looks, "gpu_memory_total")
        if not total > 0:
            continue
        tensors = _tensor_peak(steps, rank) / total
        full = max(_peak_when_full(looks.known("gpu_memory") / total), tensors if tensors > FULL else 0.0)
        if full > 0:
            short.append((min(full, 1.0), tensors, looks))
    if not short:
        return []
    full, tensors, worst = max(short, key=lambda one: one[:2])
    ranks = tuple(looks.rank for *_, looks in short)
    explained = tensors == 0 or full - tensors <= _UNEXPLAINED
    return [
        Finding(
            kind="memory_pressure",
            severity=_severity_when_full(full) if explained else "info",
            summary=f"Device memory of {rank_names(ranks)}{words.hosts(looks.host for *_, looks in short)} is up to "
            f"{words.share(full)} full{_of_tensors(tensors)}.",
            action=_pressure_action(full, _last(worst, "gpu_memory_total"), explained),
            ranks=ranks,
            hosts=_known(looks.host for *_, looks in short),
            evidence={
                "where": "device",
                "full": full,
                "tensors": tensors,
                "total_mib": _last(worst, "gpu_memory_total"),
            },
        )
    ]


def _of_tensors(tensors: float) -> str:
    return f", tensors of the run take up to {words.share(tensors)}" if tensors > 0 else ""


def _pressure_action(full: float, total: float, explained: bool) -> str:
    if not explained:
        return "The rest is torch's own cache, which it gives back when needed, or another process on the device."
    return (
        f"Free {words.mebibytes((full - 1 + _FREE) * total)}: a smaller batch with more gradient accumulation, "
        "activation checkpointing, or sharded parameters."
    )


def _peak_when_full(used: Floats) -> float:
    """The largest part in use, 0 where memory is not short for more than a moment."""
    used = used[np.isfinite(used)]
    if not len(used) or not used.max() > FULL:
        return 0.0
    ended_full = len(used) >= _FULL_LAST_LOOKS and bool(np.all(used[-_FULL_LAST_LOOKS:] > FULL))
    return float(used.max()) if ended_full or np.sum(used > FULL) >= _FULL_LOOKS else 0.0


def _tensor_peak(steps: StepTable, rank: int) -> float:
    """The most MiB of tensors a step had at a time, 0 where that is not known."""
    if rank not in steps.ranks or not len(steps):
        return 0.0
    peaks = steps.peak_memory[:, steps.ranks.index(rank)]
    return float(np.max(peaks[np.isfinite(peaks)], initial=0.0))


def _severity_when_full(full: float) -> str:
    return "critical" if full > _NEARLY_FULL else "warning"


# --------------------------------------------------------------------------- imbalance


def _device_imbalance(steps: StepTable) -> list[Finding]:
    known = np.where(steps.peak_memory > 0, steps.peak_memory, steps.memory)
    begin = int(len(steps) * _STARTUP)
    return _imbalance("device", steps, _positive(known[begin:]), _DEVICE_DIFFERENCE, "warning")


def _host_imbalance(steps: StepTable, samples: Mapping[int, Samples]) -> list[Finding]:
    """Return a finding about the ranks' host memory; only without devices, where its balance matters."""
    if np.any(steps.memory > 0) or np.any(steps.peak_memory > 0) or len(steps.ranks) < 2:
        return []
    tables = [_without_startup(samples[rank].while_training()) for rank in steps.ranks if rank in samples]
    rows = min((len(table) for table in tables), default=0)
    if len(tables) < len(steps.ranks) or rows < 1:
        return []
    memory = np.stack([table.known("rss")[-rows:] for table in tables], axis=1)
    return _imbalance("host", steps, memory, _HOST_DIFFERENCE, "info")


def _imbalance(where: str, steps: StepTable, memory: Floats, least: float, severity: str) -> list[Finding]:
    """Return a finding for ranks whose column of ``memory`` (rows, ranks) stays above the median of the others."""
    if memory.shape[0] < _LEAST_ROWS or memory.shape[1] < 2:
        return []
    others = np.stack(
        [_row_medians(np.delete(memory, rank, axis=1)) for rank in range(memory.shape[1])], axis=1
    )
    above = (memory > (1 + IMBALANCE) * others) & (memory > others + least)
    high = np.flatnonzero(above.mean(axis=0) >= _LASTING)
    if not len(high):
        return []
    worst = max(high, key=lambda rank: float(np.nanmedian(memory[:, rank] / others[:, rank])))
    most, usual = float(np.nanmedian(memory[:, worst])), float(np.nanmedian(others[:, worst]))
    ranks = tuple(steps.ranks[rank] for rank in high)
    need = "needs" if len(ranks) == 1 else "need"
    return [
        Finding(
            kind="memory_imbalance",
            severity=severity,
            summary=f"{rank_names(ranks).capitalize()}{words.hosts(steps.hosts[rank] for rank in high)} {need} more "
            f"{where} memory than the other ranks: {words.mebibytes(most)} against {words.mebibytes(usual)}, "
            f"{words.share(most / usual - 1)} more.",
            action="Look for work that only this rank does (validation, logging, gathering outputs), or batches that "
            "are larger there; the largest rank sets the batch size of all.",
            ranks=ranks,
            hosts=_known(steps.hosts[rank] for rank in high),
            evidence={"where": where, "mib": most, "others_mib": usual, "share_more": most / usual - 1},
        )
    ]


def _row_medians(table: Floats) -> Floats:
    """NaN in a row where any value is not known."""
    return np.asarray(np.median(table, axis=1), np.float64)


# --------------------------------------------------------------------------- small things


def _positive(values: Floats) -> Floats:
    return np.where(np.isfinite(values) & (values > 0), values, np.nan)


def _last(looks: Samples, name: str) -> float:
    """Return the newest known value; 0 if there is none."""
    values = looks.known(name)
    values = values[np.isfinite(values)]
    return float(values[-1]) if len(values) else 0.0


def _known(hosts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({host for host in hosts if host}))
