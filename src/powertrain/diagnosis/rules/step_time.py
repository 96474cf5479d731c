"""Rules for step times: bottlenecks of all ranks, slow starts and periodic spikes. Pure.

Time that every rank spends in a phase is handled here. Time that one rank spends beyond the others is handled in
:mod:`powertrain.diagnosis.rules.stragglers`, so that no cause is reported twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.rules import spikes
from powertrain.diagnosis.rules.spikes import Rows
from powertrain.diagnosis.tables import statistics
from powertrain.diagnosis.tables.steady import DOING, LEAST_STEPS, WINDOW, SteadySteps, steady_steps
from powertrain.diagnosis.tables.steps import Floats, StepTable
from powertrain.diagnosis.words import seconds, share
from powertrain.trace.recording import phases

#: Minimum shares of a step, and minimum seconds, for a bottleneck.
_BOUND = {
    phases.INPUT: 0.15,
    phases.H2D: 0.15,
    phases.COLLECTIVE: 0.2,
    phases.OUTSIDE: 0.15,
    phases.REPORT: 0.15,
}
_LEAST = 1e-3
_COMPUTE = (phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER, phases.INSIDE)
#: Shares above which a run is compute bound, and the rest of the step takes too much of it.
_COMPUTE_BOUND = 0.6
_HEAVY_INSIDE = 1 / 3
#: Limits of a first batch, in usual steps and in seconds; and the same for the first steps in total.
_FIRST_BATCH = (5.0, 0.2)
_FIRST_STEPS = (20.0, 2.0)
#: Share of the run, and seconds, that make a start-up worth a warning; and the share that makes a spike worth one.
_SLOW_START = (0.05, 0.5)
_COSTLY_SPIKE = 0.01
#: A loader with as many workers delivers in bursts of that period: a bound, not a spike.
_BURST = 4
#: More loader workers than this are not advised: the machine has no cores for them.
_MOST_WORKERS = 64
#: Target share of reports, for the advice how often to make them.
_REPORT_SHARE = 0.05


def find(steps: StepTable, seen: Mapping[str, str] | None = None, cores: float = 0.0) -> list[Finding]:
    """Return the bottlenecks, the costliest first; only ``incomplete`` if there are too few steps.

    ``seen`` has by phase the most frequent line of the user's code ("train.py:31 in evaluate");
    ``cores`` is the number of cores per rank, 0 if unknown.
    """
    run = steady_steps(steps)
    if not run.enough:
        return [_too_few(run)]
    lines = dict(seen or {})
    periodic = spikes.find(run)
    bounds = _bounds(run, periodic, lines, cores)
    findings = [*bounds, *_unseen_phases(run), *_slow_start(run), *_compute_bound(run, bool(bounds), lines)]
    findings += [_spike(run, spike, lines) for spike in periodic if not _is_explained_by_bound(spike, bounds)]
    return sorted(findings, key=lambda finding: -finding.cost)


def _is_explained_by_bound(spike: spikes.Periodic, bounds: list[Finding]) -> bool:
    """Return whether a bottleneck already explains the spikes: bursts of a loader, or costly checkpoints."""
    bound_by = {finding.phase for finding in bounds}
    if spike.phase == phases.REPORT:
        return "report" in bound_by
    return _is_burst(spike) and "input" in bound_by


def _is_burst(spike: spikes.Periodic) -> bool:
    return spike.phase == phases.INPUT and spike.period <= _BURST


def _too_few(run: SteadySteps) -> Finding:
    count = len(run.steps)
    recorded = f"Only {count} step{'s were' if count > 1 else ' was'} recorded on all ranks"
    late = f"{len(run.numbers)} of them after start-up: too few for a diagnosis."
    return Finding(
        kind="incomplete",
        severity="info",
        summary=f"{recorded}, {late}"
        if count
        else "No training step was recorded, so the run's speed cannot be diagnosed.",
        action=f"Train for at least {2 * LEAST_STEPS} steps to get a diagnosis of the run's speed.",
        evidence={"steps": count, "settled": len(run.numbers)},
    )


def _bounds(
    run: SteadySteps, periodic: Sequence[spikes.Periodic], lines: Mapping[str, str], cores: float
) -> list[Finding]:
    """Phases that take too much of every step. Steps with a periodic spike do not count: they are named by that."""
    rows = np.arange(len(run.numbers))
    for spike in periodic:
        if not _is_burst(spike):
            rows = np.setdiff1d(rows, spike.rows)
    step = _usual(run.critical[rows])
    findings = []
    for phase, least in _BOUND.items():
        if phase == phases.REPORT:
            continue
        times = _spent_by_every_rank(run, phase, rows)
        if step <= 0 or statistics.median(times) < max(_LEAST, least * step):
            continue
        if statistics.median_interval(times, block=1).low >= 0.5 * least * step:
            alike = not any(spike.phase == phase and not _is_burst(spike) for spike in periodic)
            findings.append(_bound(run, phase, None if alike else rows, lines, cores))
    return findings + _checkpoint_bound(run, periodic, lines)


def _spent_by_every_rank(run: SteadySteps, phase: int, rows: Rows) -> Floats:
    """Return the time of every rank in windows of steps, in seconds per step.

    Processes of a loader deliver in bursts, and those of ranks come in different steps: each rank waits in its own, all
    of them as much in the end.
    """
    if phase == phases.INPUT and not (_fetches(run).any() and _made_in_loop(run)):
        by_rank = run.table[rows, :, phase].T
        means = np.stack([statistics.window_means(times, WINDOW) for times in by_rank])
        return np.asarray(means.min(axis=0), np.float64)
    return statistics.window_means(run.common()[rows, phase], WINDOW)


def _mean_of_every_rank(run: SteadySteps, phase: int, rows: Rows | None) -> tuple[str, float]:
    """Return the mean seconds per step that every rank spends in ``phase``, and "at least " if it is a lower bound.

    ``rows`` selects steps, if others are reported as spikes of the same phase.
    """
    chosen = slice(None) if rows is None else rows
    if phase == phases.INPUT and not (_fetches(run).any() and _made_in_loop(run)):
        time = float(run.table[chosen, :, phase].mean(axis=0).min())
    else:
        time = float(run.common()[chosen, phase].mean())
    is_all_of_it = len(run.steps.ranks) == 1 and rows is None
    return ("" if is_all_of_it else "at least "), min(time, run.mean_of(phase))


def _bound(
    run: SteadySteps, phase: int, rows: Rows | None, lines: Mapping[str, str], cores: float
) -> Finding:
    name, step = phases.NAMES[phase], run.mean_step
    at_least, time = _mean_of_every_rank(run, phase, rows)
    part = run.share_of_step(time)
    rest = run.step_without(float((run.critical - run.critical_without(phase)).mean()))
    evidence: dict[str, Any] = {"step": step, "time": time, "share": part, "rest": rest, **_line(lines, name)}
    saved = f"without it a step would take {seconds(rest)} instead of {seconds(step)}"
    if phase == phases.INPUT:
        kind, said = "input_bound", "waits for its next batch"
        action, sizes = _loader_advice(run, step, rest, cores)
        evidence |= sizes
    elif phase == phases.H2D:
        kind, said = "transfer_bound", "copies its batch to the device"
        evidence["pageable"] = pageable = _pageable(run)
        action = _transfer_advice(pageable, saved)
        said += " from memory that is not pinned" if pageable else ""
    elif phase == phases.COLLECTIVE:
        kind, said = "collective_bound", "exchanges gradients or parameters with the others"
        evidence["accumulation"] = batches = _accumulation(time, rest)
        action = (
            f"Accumulate gradients over {batches} batches, exchange them in 16 bits, or place the ranks closer "
            f"together; {saved}."
        )
    else:
        kind, said = "outside_bound", f"is between two steps{_at(lines, name)}"
        action = f"Move the work between steps out of the loop, or do it every tenth step only; {saved}."
    return Finding(
        kind=kind,
        severity="critical" if part >= 0.5 else "warning",
        summary=f"{run.everybody} {said} for {at_least}{seconds(time)} of each {seconds(step)} step ({share(part)}).",
        action=action,
        phase=name,
        cost=part,
        evidence=evidence,
    )


def _line(lines: Mapping[str, str], phase: str) -> dict[str, str]:
    return {"line": lines[phase]} if lines.get(phase) else {}


def _at(lines: Mapping[str, str], phase: str) -> str:
    return f" (mostly at {lines[phase]})" if lines.get(phase) else ""


def _accumulation(time: float, rest: float) -> int:
    """Over how many batches gradients must be accumulated to make ``time`` at most a tenth of their time."""
    return min(64, max(2, math.ceil(9.0 * time / max(rest, 1e-6))))


def _pageable(run: SteadySteps) -> bool:
    flags = run.steps.flags[run.begins :]
    return bool(flags.size) and bool(((flags & phases.PAGEABLE) != 0).mean(axis=0).max() >= 0.5)


def _transfer_advice(pageable: bool, saved: str) -> str:
    if pageable:
        return f"Give the DataLoader pin_memory=True and copy with .to(device, non_blocking=True); {saved}."
    return f"Send less: smaller types (uint8 pixels, 16-bit floats) turned to floats on the device; {saved}."


def _loader_advice(run: SteadySteps, step: float, rest: float, cores: float) -> tuple[str, dict[str, Any]]:
    """Return the remedy for slow loading, sized from the times of making a batch and of the rest of a step."""
    rest = max(rest, 0.02 * step)
    fetches = _fetches(run)
    fetch = max(_usual(column) for column in fetches.T)
    if fetch <= 0.0:
        factor = step / rest
        action = (
            f"Give the loader {factor:.1f} times as many workers as it has (num_workers), or make batches cheaper: "
            f"they come every {seconds(step)} and are needed every {seconds(rest)}."
        )
        return action, {"workers_factor": factor}
    needs = f"a batch takes {seconds(fetch)} to make and is needed every {seconds(rest)}"
    in_loop = _made_in_loop(run)
    if not in_loop and fetch <= rest:
        worst = max(statistics.quantile(column, 0.95) for column in fetches.T)
        prefetch = max(2, math.ceil(worst / rest) + 1)
        action = f"Load {prefetch} batches ahead (prefetch): {needs}, but single ones take {seconds(worst)}."
        return action, {"fetch": fetch, "prefetch": prefetch}
    workers = math.ceil(fetch / rest) + 1
    sizes: dict[str, Any] = {"fetch": fetch, "workers": workers}
    if workers > _MOST_WORKERS:
        return f"Make batches cheaper: {needs}, which would take {workers} loader workers.", sizes
    where = "are made in the training loop" if in_loop else "come too late"
    action = (
        f"Give the DataLoader num_workers={workers}, or the dataset shard prefetch_batches={workers} (batches "
        f"{where}): {needs}."
    )
    if 0 < cores < workers:
        action += (
            f" This machine has {_cores(cores)} for each rank: where a batch takes computing and not waiting, make it "
            "cheaper instead."
        )
    return action, sizes


def _cores(cores: float) -> str:
    return "one core" if cores == 1 else f"{cores:.3g} cores"


def _fetches(run: SteadySteps) -> Floats:
    """(steps, ranks): how long making the batches of a step took, wherever that was."""
    return np.asarray(np.nan_to_num(run.steps.fetch[run.begins :], posinf=0.0, neginf=0.0), np.float64)


def _made_in_loop(run: SteadySteps) -> bool:
    """Return whether the training thread makes its batches itself, and so waits for as long."""
    fetches, waited = _fetches(run), run.table[:, :, phases.INPUT]
    return bool(np.abs(fetches - waited).sum() <= 0.25 * fetches.sum())


def _checkpoint_bound(
    run: SteadySteps, periodic: Sequence[spikes.Periodic], lines: Mapping[str, str]
) -> list[Finding]:
    """Return a finding if reports and checkpoints delay the last rank, which may be one rank that saves for all."""
    work = run.work()
    reports = run.between[:, :, phases.REPORT]
    added = run.longest(phases.REPORT)
    part = run.share_of_step(float(added.mean()))
    often = np.flatnonzero(added > max(0.05 * run.step, _LEAST / 2))
    per_step = float(added.mean())
    if part < _BOUND[phases.REPORT] or per_step < _LEAST or len(often) < 3:
        return []
    every = max(1, round(float(np.median(np.diff(run.numbers[often])))))
    usual = max(run.step - per_step, statistics.median(work.max(axis=1)), _LEAST)
    by_rank = reports[often].mean(axis=0)
    columns = np.flatnonzero(by_rank >= 0.5 * by_rank.max()).tolist()
    alone = len(columns) < len(run.steps.ranks)
    each = float(by_rank[columns].mean())
    part = part if alone else run.share_of_step(run.mean_of(phases.REPORT))
    wanted = max(every + 1, math.ceil(each / (_REPORT_SHARE * usual)))
    lines = {} if alone else lines
    who = run.who(columns).capitalize() if alone else run.everybody
    evidence = {"step": usual, "time": each, "share": part, "every": every, "every_wanted": wanted}
    periods = [spike.period for spike in periodic if spike.phase == phases.REPORT]
    if periods:
        evidence["period"] = periods[0]
    rhythm = "in every step" if every == 1 else f"every {every} steps"
    return [
        Finding(
            kind="checkpoint_bound",
            severity="critical" if part >= 0.5 else "warning",
            summary=f"{who} {'spend' if len(columns) > 1 and alone else 'spends'} {seconds(each)} {rhythm} in "
            f"report() or saving{_at(lines, 'report')}{', which delays the run by' if alone else ':'} {share(part)} of "
            "its time.",
            action=f"Report or save every {wanted} steps, which makes it {share(_REPORT_SHARE)} of the time, or save "
            "with save_state, which returns to training while files are uploaded to storage.",
            phase=phases.NAMES[phases.REPORT],
            ranks=run.ranks_at(columns) if alone else (),
            hosts=run.hosts_at(columns) if alone else (),
            cost=part,
            evidence={**evidence, **_line(lines, "report")},
        )
    ]


def _unseen_phases(run: SteadySteps) -> list[Finding]:
    """A phase that must have been there but was not seen: its time lies in another."""
    present = run.table.sum(axis=(0, 1)) > 0
    missing = None
    if present[phases.BACKWARD] and not present[phases.FORWARD]:
        missing, why = phases.FORWARD, "the model's forward was called directly, or is a plain function"
    elif present[phases.OPTIMIZER] and present[phases.FORWARD] and not present[phases.BACKWARD]:
        missing, why = phases.BACKWARD, "gradients were made without backward()"
    if missing is None:
        return []
    name = phases.NAMES[missing]
    return [
        Finding(
            kind="incomplete",
            severity="info",
            summary=f"The {name} phase was never seen ({why}); its time is counted as inside the step.",
            action=f"Call the model itself, or mark it with powertrain.trace.wrap_{name}.",
            phase=name,
            evidence={"missing": name},
        )
    ]


def _compute_bound(run: SteadySteps, otherwise_bound: bool, lines: Mapping[str, str]) -> list[Finding]:
    """The largest part of the computing, where a run does little else or that part is not the model's."""
    table = run.common()
    times = {phase: _usual(table[:, phase]) for phase in _COMPUTE}
    whole, step = sum(times.values()), run.step
    largest = max(times, key=lambda phase: times[phase])
    name, time = phases.NAMES[largest], times[largest]
    on_device_unknown = bool(run.steps.memory.any()) and not (run.steps.flags & phases.TIMED_ON_DEVICE).any()
    heavy = largest == phases.INSIDE and time >= max(_HEAVY_INSIDE * step, _LEAST) and not on_device_unknown
    if times[phases.FORWARD] <= 0.0 or (not heavy and (otherwise_bound or whole < _COMPUTE_BOUND * step)):
        return []
    shown = {phase: run.mean_of(phase) for phase in _COMPUTE}
    largest = phases.INSIDE if heavy else max(shown, key=lambda phase: shown[phase])
    name, time, whole, step = phases.NAMES[largest], shown[largest], sum(shown.values()), run.mean_step
    said, action = _on_computing(step, whole, time, name)
    if heavy:
        said, action = _on_heavy_inside(step, time, _at(lines, name))
    return [
        Finding(
            kind="compute_bound",
            severity="warning" if heavy else "info",
            summary=f"{'A' if len(run.steps.ranks) > 1 else 'The'} rank {said}.",
            action=action,
            phase=name,
            cost=time / step if heavy else 0.0,
            evidence={
                "step": step,
                "time": time,
                "share": time / step,
                "compute": whole,
                **{phases.NAMES[phase]: spent for phase, spent in shown.items()},
                **_line(lines, name),
            },
        )
    ]


def _on_computing(step: float, whole: float, time: float, name: str) -> tuple[str, str]:
    """Return the sentence about computing, and the remedy."""
    said = (
        f"computes for {seconds(whole)} of each {seconds(step)} step ({share(whole / step)}); the largest part is "
        f"{name}: {seconds(time)} ({share(time / step)})"
    )
    return said, "Make the model or its batch cheaper (mixed precision, torch.compile), or use more ranks."


def _on_heavy_inside(step: float, time: float, where: str) -> tuple[str, str]:
    said = (
        f"spends {seconds(time)} of each {seconds(step)} step ({share(time / step)}) outside model and optimizer, for "
        f"example in loss, metrics or gradient clipping{where}"
    )
    action = (
        f"Reduce the work in the step outside model and optimizer: without it a step would take "
        f"{seconds(step - time)} instead of {seconds(step)}."
    )
    return said, action


def _usual(values: Floats) -> float:
    return statistics.median(statistics.window_means(values, WINDOW))


def _slow_start(run: SteadySteps) -> list[Finding]:
    """Return a finding for a slow first batch, or slow first steps; other ranks' waiting for it is an echo."""
    if not run.start_up:
        return []
    usual = np.median(run.table, axis=0)
    beyond = np.maximum(run.start.sum(axis=0) - run.start_up * usual, 0.0)
    judged = float(run.critical.sum()) * int(run.numbers[-1] + 1 - run.start_up) / len(run.numbers)
    whole = judged + float(run.start.sum(axis=2).max(axis=1).sum())
    first = float(beyond[:, phases.INPUT].max())
    if first >= max(_FIRST_BATCH[0] * run.step, _FIRST_BATCH[1]):
        return [_slow_first(run, phases.INPUT, beyond[:, phases.INPUT], whole)]
    computing = (phases.H2D, *_COMPUTE)
    largest = max(computing, key=lambda phase: float(beyond[:, phase].max()))
    if float(beyond[:, largest].max()) >= max(_FIRST_STEPS[0] * run.step, _FIRST_STEPS[1]):
        return [_slow_first(run, largest, beyond[:, largest], whole)]
    return []


def _slow_first(run: SteadySteps, phase: int, beyond: Floats, whole: float) -> Finding:
    name = phases.NAMES[phase]
    took = float(beyond.max())
    columns = np.flatnonzero(beyond >= 0.5 * took).tolist()
    alone = len(columns) < len(run.steps.ranks)
    who = f" on {run.who(columns)}" if alone else ""
    part = took / whole
    warned = phase == phases.INPUT and part >= _SLOW_START[0] and took >= _SLOW_START[1]
    if phase == phases.INPUT:
        what = f"The first batch took {seconds(took)} longer than a usual one{who}"
        action = (
            "Open files and start loader workers before the loop, or keep them with persistent_workers=True."
        )
    else:
        what = (
            f"The first {run.start_up} steps took {seconds(took)} longer than later ones{who}, {DOING[phase]}"
        )
        action = "That is mostly compilation and first use: it pays in long runs; cache it for short ones."
    return Finding(
        kind="slow_first_batch",
        severity="warning" if warned else "info",
        summary=f"{what}, as much as {took / run.mean_step:.0f} steps ({share(part)} of the time since the start).",
        action=action,
        phase=name,
        ranks=run.ranks_at(columns) if alone else (),
        hosts=run.hosts_at(columns) if alone else (),
        cost=part,
        evidence={"time": took, "step": run.mean_step, "start_up_steps": run.start_up, "share": part},
    )


def _spike(run: SteadySteps, spike: spikes.Periodic, lines: Mapping[str, str]) -> Finding:
    name = phases.NAMES[spike.phase]
    alone = len(spike.columns) < len(run.steps.ranks)
    lines = {} if alone else lines  # which are those of one rank, perhaps another
    who = f" on {run.who(spike.columns)}" if alone else ""
    period = spike.period
    return Finding(
        kind="periodic_spike",
        severity="warning" if spike.cost >= _COSTLY_SPIKE else "info",
        summary=f"Every {period} steps one takes {seconds(spike.excess)} longer{who}, {DOING[spike.phase]}"
        f"{_at(lines, name)}: "
        f"{share(spike.cost)} of the run's time.",
        action=_spike_advice(spike),
        phase=name,
        ranks=run.ranks_at(spike.columns) if alone else (),
        hosts=run.hosts_at(spike.columns) if alone else (),
        cost=spike.cost,
        evidence={
            "period": period,
            "time": spike.excess,
            "step": run.mean_step,
            "share": spike.cost,
            "count": len(spike.rows),
            **_line(lines, name),
        },
    )


def _spike_advice(spike: spikes.Periodic) -> str:
    period = spike.period
    if spike.phase == phases.INPUT:
        workers = f"; if the loader has {period} workers, use more" if period <= 16 else ""
        return (
            f"If an epoch has {period} batches, keep loader workers between epochs (persistent_workers=True){workers}; "
            f"otherwise look at what making a batch does every {period} times (opening the next file), and load ahead."
        )
    if spike.phase == phases.REPORT:
        return f"Report or save less often than every {period} steps, or save with save_state."
    if spike.phase == phases.OUTSIDE:
        return f"Look at what the loop does every {period} steps (evaluation, logging); do it less often or elsewhere."
    return f"Look at what happens every {period} steps while a rank is {DOING[spike.phase]}."
