"""The whole diagnosis from the records of all ranks: findings, phase times, throughput."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from powertrain.diagnosis import words
from powertrain.diagnosis.card import render
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.rules import compiling, device, machine, memory, step_time, stragglers
from powertrain.diagnosis.rules.root_cause import fold, is_trouble
from powertrain.diagnosis.summary import (
    PhaseTime,
    RankTimes,
    Report,
    Throughput,
    from_json,
    plain_finding,
    to_json,
)
from powertrain.diagnosis.tables.samples import Samples
from powertrain.diagnosis.tables.steady import SteadySteps, steady_steps
from powertrain.diagnosis.tables.steps import Floats, StepTable
from powertrain.text.loggers import module_logger
from powertrain.trace.recording import phases

__all__ = ["Report", "diagnose", "from_json", "render", "to_json"]

_COMPUTE = ("forward", "backward", "optimizer", "inside")
_logger = module_logger(__name__)


def diagnose(
    steps: StepTable,
    samples: Mapping[int, Samples] | None = None,
    hosts: Mapping[int, str] | None = None,
    *,
    name: str = "",
    seen: Mapping[str, str] | None = None,
    flops_per_sample: float = 0.0,
    step_flops: Mapping[int, float] | None = None,
    peak_flops: float = 0.0,
    compiled: Mapping[int, Sequence[Mapping[str, Any]]] | None = None,
    devices: Mapping[int, Mapping[str, Any]] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Return the diagnosis of one attempt. Never raises for any numbers.

    ``hosts`` names the hosts of ranks whose tables do not. ``seen`` has by phase the most frequent line of the user's
    code. FLOPs are those of one sample, forward and backward, if given, or those of one step by rank; the peak is that
    of one device per second. ``compiled`` has by rank the functions of
    :class:`~powertrain.trace.compilations.Compilations`, ``devices`` the facts of
    :class:`~powertrain.trace.device.watch.DeviceWatch`.
    """
    samples = _on_hosts(samples or {}, hosts or {})
    named = tuple(
        host or (hosts or {}).get(rank, "") for rank, host in zip(steps.ranks, steps.hosts, strict=True)
    )
    steps = dataclasses.replace(steps, hosts=named)
    run = steady_steps(steps)
    findings, failures = _all_findings(run, samples, seen, compiled or {}, devices or {})
    return Report(
        name=name,
        findings=findings,
        steps=len(steps),
        start_up_steps=run.start_up,
        step_seconds=_median(run.table.sum(axis=2)),
        mean_step_seconds=run.mean_step,
        phases=_phase_times(run.table),
        ranks=tuple(_rank_times(run, column) for column in range(len(steps.ranks))),
        throughput=_throughput(run, flops_per_sample, step_flops or {}, peak_flops),
        notes=(*_thinning(run), *failures, *notes),
    )


def _on_hosts(samples: Mapping[int, Samples], hosts: Mapping[int, str]) -> dict[int, Samples]:
    return {
        rank: dataclasses.replace(looks, host=looks.host or hosts.get(rank, ""))
        for rank, looks in samples.items()
    }


def _cores_of_a_rank(samples: Mapping[int, Samples]) -> float:
    """Return the cores per rank on the machine with most ranks per core; 0 if unknown."""
    ranks = Counter(looks.host for looks in samples.values())
    parts = [
        float(looks.table["host_cores"].max()) / ranks[looks.host]
        for looks in samples.values()
        if len(looks.table)
    ]
    return min(parts, default=0.0)


def _all_findings(
    run: SteadySteps,
    samples: Mapping[int, Samples],
    seen: Mapping[str, str] | None,
    compiled: Mapping[int, Sequence[Mapping[str, Any]]],
    devices: Mapping[int, Mapping[str, Any]],
) -> tuple[tuple[Finding, ...], list[str]]:
    """Return the findings, and a sentence for each check that failed."""
    steps = run.steps
    finders: dict[str, Callable[[], list[Finding]]] = {
        "step times": lambda: step_time.find(steps, seen, _cores_of_a_rank(samples)),
        "late ranks": lambda: stragglers.find(steps),
        "memory": lambda: memory.find(steps, samples, _kept_allocations(devices)),
        "machines": lambda: machine.find(steps, samples),
        "compilations": lambda: [*compiling.find(run, compiled), *compiling.find_breaks(run, devices)],
        "devices": lambda: device.find(run, devices),
    }
    found: list[Finding] = []
    failures = []
    for what, find in finders.items():
        try:
            found += find()
        except Exception as error:  # a bug of ours must not break the rest of the diagnosis, nor the run
            _logger.debug("The check of %s failed.", what, exc_info=True)
            failures.append(f"The check of {what} failed ({type(error).__name__}: {error}).")
    idle = device.idle_share(run, devices)
    if idle is not None:  # a host that waits now and then costs no more than its device is idle
        found = [one for one in found if not _is_hidden_spike(one, idle)]
    if not failures and not any(is_trouble(one) or _is_blind(one) for one in found):
        found.append(_uneven(run) or _healthy(run))
    return tuple(plain_finding(one) for one in fold(found)), failures


def _is_hidden_spike(finding: Finding, idle: float) -> bool:
    is_of_host = finding.kind == "periodic_spike" and finding.phase not in _COMPUTE
    return is_of_host and idle < 0.9 * finding.cost


def _kept_allocations(devices: Mapping[int, Mapping[str, Any]]) -> dict[int, Sequence[Mapping[str, Any]]]:
    return {rank: of["kept_allocations"] for rank, of in devices.items() if of.get("kept_allocations")}


def _is_blind(finding: Finding) -> bool:
    """Return whether too few steps were recorded to call the run healthy."""
    return finding.kind == "incomplete" and not finding.phase


def _uneven(run: SteadySteps) -> Finding | None:
    """Return a finding if a phase other than computing takes most of the time without a known cause."""
    if not run.enough:
        return None
    largest = max(range(phases.COUNT), key=run.mean_of)
    name, time = phases.NAMES[largest], run.mean_of(largest)
    usual = _median(run.table[:, :, largest])
    if name in _COMPUTE or time <= 0:
        return None
    part = run.share_of_step(time)
    return Finding(
        kind="uneven_steps",
        severity="info",
        summary=f"The largest part of a step is {name}: {words.seconds(time)} on average ({words.share(part)}), but at "
        f"most {words.seconds(usual)} in half of the steps. No single cause was found.",
        action="Train for more steps, or look at the slow steps in a viewer (powertrain trace export).",
        phase=name,
        cost=part,
        evidence={"step": run.mean_step, "time": time, "median": usual, "share": part},
    )


def _healthy(run: SteadySteps) -> Finding:
    step = run.mean_step
    computing = run.share_of_step(sum(run.mean_of(phases.NAMES.index(name)) for name in _COMPUTE))
    ranks = len(run.steps.ranks)
    return Finding(
        kind="healthy",
        severity="info",
        summary=f"No bottleneck was found: {len(run.numbers):,} steps of {words.seconds(step)} on "
        f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {words.share(computing)} of the time spent computing.",
        evidence={"step": step, "compute_share": computing},
    )


def _phase_times(table: Floats) -> tuple[PhaseTime, ...]:
    """From (steps, ranks, phases) or (steps, phases)."""
    flat = table.reshape(-1, phases.COUNT)
    spent = flat.sum(axis=0)
    whole = float(spent.sum())
    return tuple(
        PhaseTime(name, _median(flat[:, phase]), float(spent[phase]) / whole, float(flat[:, phase].mean()))
        for phase, name in enumerate(phases.NAMES)
        if spent[phase] > 0
    )


def _rank_times(run: SteadySteps, column: int) -> RankTimes:
    peaks = run.steps.peak_memory[:, column]
    return RankTimes(
        rank=run.steps.ranks[column],
        host=run.steps.hosts[column],
        step_seconds=_median(run.table[:, column].sum(axis=1)),
        phases=_phase_times(run.table[:, column]),
        peak_memory_mib=float(np.max(peaks[np.isfinite(peaks)], initial=0.0)),
    )


def _throughput(
    run: SteadySteps, flops_per_sample: float, step_flops: Mapping[int, float], peak_flops: float
) -> Throughput:
    rate = _steps_per_second(run)
    samples, tokens = (
        rate * _mean(column[run.begins :].sum(axis=1)) for column in (run.steps.samples, run.steps.tokens)
    )
    counted = [step_flops[rank] for rank in run.steps.ranks if step_flops.get(rank)]
    flops = samples * flops_per_sample
    if (
        not flops_per_sample and counted
    ):  # ranks that have not counted theirs (yet) do about as much as the others
        flops = rate * sum(counted) * len(run.steps.ranks) / len(counted)
    best = peak_flops * len(run.steps.ranks)
    return Throughput(
        steps_per_second=rate,
        samples_per_second=samples,
        tokens_per_second=tokens,
        flops_per_second=flops,
        mfu=flops / best if flops > 0 and best > 0 else None,
    )


def _steps_per_second(run: SteadySteps) -> float:
    """From the begin of the first to the end of the last, which holds for thinned runs too; else from their lengths."""
    if len(run.numbers) > 1:
        started = run.steps.start[run.begins :]
        took = started[-1] - started[0]
        took = (took + run.table[-1].sum(axis=1))[np.isfinite(took) & (took > 0)]
        if len(took):
            return float((run.numbers[-1] - run.numbers[0] + 1) / np.median(took))
    mean = _mean(run.table.sum(axis=2))
    return 1 / mean if mean > 0 else 0.0


def _thinning(run: SteadySteps) -> list[str]:
    numbers = run.steps.numbers
    if len(numbers) < 2:
        return []
    reached = int(numbers[-1] - numbers[0]) + 1
    gaps = np.flatnonzero(np.diff(numbers) > 1)
    if not len(gaps):
        return []
    return [
        f"Of {reached:,} steps {len(numbers):,} are kept: up to step {int(numbers[gaps[-1] + 1]):,} only some of each "
        "group (fastest, median, slowest), or those that every rank recorded."
    ]


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else 0.0


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else 0.0
