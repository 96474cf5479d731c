"""Rules for devices: a host that launches too slowly or waits too often, optimizers and products in slow forms. Pure.

The evidence is a short window of kernels, one step of counted operators and the allocator's figures, which ranks take
once or a few times (:mod:`powertrain.trace.device`). Times are those of one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from powertrain.diagnosis import words
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.tables.steady import SteadySteps
from powertrain.trace.machine.devices import float_peaks
from powertrain.trace.recording import phases

#: Phases of the host in which it launches no work of the model.
_BESIDE = (phases.INPUT, phases.H2D, phases.COLLECTIVE, phases.REPORT, phases.OUTSIDE)
#: Phases of the model's work.
_MODEL = (phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER, phases.INSIDE)
#: Shares of a step from which on a device that waits for launches, or for a host that waited, is a finding.
_LAUNCH_BOUND, _SYNC_BOUND = 0.25, 0.05
_LEAST_SECONDS = 2e-4
#: Seconds before a kernel from which on the host does other work than launching it.
_MOST_GAP = 1.5e-4
#: Steps of the window relative to the run's that it may be compared with: they are slower under the profiler, and
#: batches of other sizes make other steps.
_COMPARABLE = (0.6, 2.2)
_LEAST_KERNELS = 20
#: Waits in a step from which on the host never runs ahead of the device.
MANY_WAITS = 4
#: Waits in a step from which on they are not those of a step now and then.
_LEAST_WAITS = 0.5
#: Operators of an optimizer's step that updates each tensor by itself, and its share of a step.
_OPTIMIZER_OPERATORS, _OPTIMIZER_SHARE = 100, 0.08
#: Share of a step that products of full 32-bit floats take at the device's peak.
_FULL_FLOATS_SHARE = 0.2
#: Least share and MiB of the allocator's memory that is of no use.
_UNUSED_SHARE, _UNUSED_MIB = 0.25, 1024.0
#: It matters that torch holds memory of no use where it holds so much of the device, where so much of the device is of
#: no use, or where it takes more from the device so often in each step; each time takes some tenths of a millisecond.
_SCARCE, _WASTED, MANY_ALLOCATIONS = 0.4, 0.2, 10.0
#: The same for the measured share of a step that it takes.
_ALLOCATING = 0.05
#: A device that has lost so much of its memory will soon have none left for a larger batch.
_MOSTLY_WASTED = 0.5
_LINES_SHOWN = 3


@dataclass(frozen=True)
class _Rank:
    """A rank's device in one step, in seconds."""

    rank: int
    #: The number of recorded steps.
    steps: int
    step: float
    #: Of the host: phases beside the model's work.
    beside: float
    busy: float
    kernels: float
    #: Waits for the device that are not part of input, copies and reports: their number and time.
    waits: float
    waited: float
    #: Time in which the host takes memory from the device or gives it back.
    allocating: float
    facts: Mapping[str, Any]

    @property
    def idle_for_host(self) -> float:
        """Time in which the device waits for launches of the model's work."""
        return max(0.0, self.step - self.busy - self.beside)

    @property
    def lost_by_allocating(self) -> float:
        """Time in which the host takes memory and the device may be waiting for it."""
        return min(self.allocating, max(0.0, self.step - self.busy))

    @property
    def lost_by_waits(self) -> float:
        """Time that a step would be shorter if the host did not wait for the device."""
        return max(0.0, self.step - max(self.step - self.waited, self.busy + self.beside))


def find(run: SteadySteps, facts: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Return findings about devices. ``facts`` are those of :class:`~powertrain.trace.device.watch.DeviceWatch`."""
    if not run.enough:
        return list(_fragmented(facts, {}))
    ranks = [_rank(run, column, facts.get(rank, {})) for column, rank in enumerate(run.steps.ranks)]
    allocating = {one.rank: one.lost_by_allocating / one.step for one in ranks if one.step}
    found = list(_fragmented(facts, allocating))
    with_window = [one for one in ranks if one.busy > 0]
    if with_window:
        worst = max(with_window, key=lambda one: one.idle_for_host)
        slow = _slow_host(worst)
        # Where the host is never ahead, each of its waits leaves the device idle: it does no other work.
        is_known = worst.waits >= MANY_WAITS or any(one.kind == "launch_bound" for one in slow)
        found += slow if is_known else [*slow, *_busy_host(run, worst)]
    # Ranks run the same program, so the first one stands for all.
    return [*found, *_unfused_optimizer(run, ranks[0]), *_full_floats(ranks[0])]


def idle_share(run: SteadySteps, facts: Mapping[int, Mapping[str, Any]]) -> float | None:
    """Return the largest share of the time in which a rank's device is idle; None if that is not known of all."""
    if not run.enough or not run.steps.ranks:
        return None
    try:
        ranks = [_rank(run, column, facts.get(rank, {})) for column, rank in enumerate(run.steps.ranks)]
    except (AttributeError, TypeError, ValueError):  # broken facts, which :func:`find` reports
        return None
    if not all(one.busy > 0 for one in ranks):
        return None
    return max(0.0, 1.0 - min(one.busy for one in ranks) / run.mean_step)


def _rank(run: SteadySteps, column: int, facts: Mapping[str, Any]) -> _Rank:
    host = np.nan_to_num(run.steps.phases[run.begins :, column])
    step = float(np.median(host.sum(axis=1)))
    activity = facts.get("activity") or {}
    seconds = float(activity.get("seconds") or step)
    if not _COMPARABLE[0] * step < seconds < _COMPARABLE[1] * step:
        activity = {}
    part_of_input = {phases.NAMES[phase] for phase in (phases.INPUT, phases.H2D, phases.REPORT)}
    waits: Mapping[str, float] = activity.get("waits") or {}
    waited: Mapping[str, float] = activity.get("waited") or {}
    # Where the host waits for the device between steps, the device works.
    works = sum(float(waited.get(phases.NAMES[phase], 0.0)) for phase in (phases.OUTSIDE, phases.COLLECTIVE))
    return _Rank(
        rank=run.steps.ranks[column],
        steps=len(run.steps),
        step=step,
        beside=max(0.0, float(np.median(host[:, list(_BESIDE)].sum(axis=1))) - works),
        busy=float(activity.get("busy") or 0.0),
        kernels=float(activity.get("kernels") or 0.0),
        waits=sum(float(count) for name, count in waits.items() if name not in part_of_input),
        waited=sum(float(time) for name, time in waited.items() if name not in part_of_input),
        allocating=float(activity.get("allocating") or 0.0) * (step / seconds if seconds else 0.0),
        facts=facts,
    )


def _waiting_lines(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the lines at which the host waits for the device, without copies of batches to it."""
    lines: Sequence[Mapping[str, Any]] = (facts.get("operators") or {}).get("waiting") or ()
    return [line for line in lines if line["call"] != "to a GPU"]


# --------------------------------------------------------------------------- a host that is too slow


def _slow_host(rank: _Rank) -> list[Finding]:
    """Return findings about a host that waits for the device or launches too slowly."""
    idle, is_idle = rank.idle_for_host / rank.step, _is_idle(rank)
    never_ahead = is_idle and rank.waits >= MANY_WAITS
    lost = rank.lost_by_waits
    costs = rank.waits >= _LEAST_WAITS and lost >= max(_SYNC_BOUND * rank.step, _LEAST_SECONDS)
    found = []
    if never_ahead or costs:
        found.append(_sync_bound(rank, rank.idle_for_host if never_ahead else lost))
    if is_idle and rank.idle_for_host / rank.kernels <= _MOST_GAP:
        found.append(_launch_bound(rank, idle))
    return found


def _busy_host(run: SteadySteps, rank: _Rank) -> list[Finding]:
    """Return a finding if the device waits for a host that does other work than launching, in the model's phases."""
    idle_seconds = rank.idle_for_host - rank.lost_by_waits
    idle, gap = idle_seconds / rank.step, idle_seconds / max(rank.kernels, 1.0)
    if not _is_idle(rank) or idle < _LAUNCH_BOUND:
        return []
    column = run.steps.ranks.index(rank.rank)
    times = {phase: np.nan_to_num(run.steps.phases[run.begins :, column, phase]).mean() for phase in _MODEL}
    phase = phases.NAMES[max(times, key=lambda one: times[one])]
    return [
        Finding(
            kind="host_bound",
            severity="critical" if idle >= 0.5 else "warning",
            summary=f"The GPU is busy for {words.seconds(rank.busy)} of each {words.seconds(rank.step)} step "
            f"({words.share(rank.busy / rank.step)}): before each of its {rank.kernels:,.0f} kernels it waits "
            f"{words.seconds(gap)} on average for the host, which does more than launch them, mostly in {phase}.",
            action="Look with `powertrain profile RUN` which lines the GPU waits for. Common are libraries that build "
            "a plan for each new shape (bring batches to a few fixed sizes) and Python or NumPy work in the model.",
            phase=phase,
            cost=idle,
            evidence={
                "step": rank.step,
                "busy": rank.busy / rank.step,
                "idle": idle_seconds,
                "gap": gap,
                "kernels": rank.kernels,
                "operators": _operators(rank),
                **_allocator(rank),
                "seconds_in_all": idle_seconds * rank.steps,
            },
        )
    ]


def _allocator(rank: _Rank) -> dict[str, float]:
    """Return how often torch's allocator had to free memory first, and took memory from the device in a step."""
    allocator = rank.facts.get("allocator") or {}
    return {
        "alloc_retries": int(allocator.get("retries") or 0),
        "allocations": float(allocator.get("allocations") or 0.0),
    }


def _operators(rank: _Rank) -> int:
    """Return the number of torch's operators in a step."""
    return int((rank.facts.get("operators") or {}).get("operators") or 0)


def _is_idle(rank: _Rank) -> bool:
    """Return whether the device waits for the host for a large part of the step."""
    is_much = rank.idle_for_host >= max(_LAUNCH_BOUND * rank.step, _LEAST_SECONDS)
    return is_much and rank.kernels >= _LEAST_KERNELS


def _sync_bound(rank: _Rank, lost: float) -> Finding:
    lines = _waiting_lines(rank.facts)
    shown = ", ".join(
        f"{line['where']} ({line['call']}, {int(line['count'])} a step)" for line in lines[:_LINES_SHOWN]
    )
    at = f" at {shown}" if shown else ""
    times = "once" if round(rank.waits) <= 1 else f"{rank.waits:.0f} times"
    return Finding(
        kind="sync_bound",
        severity="critical" if lost >= 0.5 * rank.step else "warning",
        summary=f"The host waits for the GPU {times} in each step{at}; up to {words.seconds(lost)} of each "
        f"{words.seconds(rank.step)} step ({words.share(lost / rank.step)}) are lost, in which the GPU then waits for "
        "new work.",
        action="Keep values on the GPU (loss.detach()) and read them every hundred steps, all at once; replace masks "
        f"by torch.where; without the waits a step can take {words.seconds(max(rank.step - lost, rank.busy))}.",
        cost=lost / rank.step,
        evidence={
            "step": rank.step,
            "lost": lost,
            "waits": rank.waits,
            "waited": rank.waited,
            "busy": rank.busy / rank.step,
            "seconds_in_all": lost * rank.steps,
            "lines": [dict(line) for line in lines],
            **({"line": lines[0]["where"]} if lines else {}),
        },
    )


def _launch_bound(rank: _Rank, idle: float) -> Finding:
    busy = rank.busy / rank.step
    gap = rank.idle_for_host / rank.kernels
    larger = max(2, int(rank.step / rank.busy)) if rank.busy > 0 else 2
    return Finding(
        kind="launch_bound",
        severity="critical" if idle >= 0.5 else "warning",
        summary=f"The GPU is busy for {words.seconds(rank.busy)} of each {words.seconds(rank.step)} step "
        f"({words.share(busy)}): Python launches {rank.kernels:,.0f} kernels a step too slowly, and the GPU waits "
        f"{gap * 1e6:.0f} µs before each of them on average.",
        action="Launch fewer kernels: torch.compile(model, mode='reduce-overhead') or CUDA graphs, which allow a step "
        f"of down to {words.seconds(rank.busy + rank.beside)}; or do more in each: up to {larger} times the batch in "
        "about the same time.",
        cost=idle,
        evidence={
            "step": rank.step,
            "busy": busy,
            "busy_seconds": rank.busy,
            "idle": rank.idle_for_host,
            "gap": gap,
            "kernels": rank.kernels,
            "operators": _operators(rank),
            "batch_factor": larger,
            "seconds_in_all": rank.idle_for_host * rank.steps,
            **_allocator(rank),
        },
    )


# --------------------------------------------------------------------------- slow forms of the same work


def _unfused_optimizer(run: SteadySteps, rank: _Rank) -> list[Finding]:
    operators = int((rank.facts.get("operators") or {}).get("optimizer_operators") or 0)
    if not rank.busy or operators < _OPTIMIZER_OPERATORS:
        return []
    column = run.steps.ranks.index(rank.rank)
    times = np.nan_to_num(run.steps.phases[run.begins :, column, phases.OPTIMIZER])
    activity = rank.facts["activity"]
    spent = float(activity["busy_by_phase"].get("optimizer", 0.0))
    if rank.busy < 0.9 * rank.step:  # else the host's time is hidden behind the device's
        spent = max(spent, float(np.median(times)) - float(activity["waited"].get("optimizer", 0.0)))
    if spent < _OPTIMIZER_SHARE * rank.step:
        return []
    return [
        Finding(
            kind="unfused_optimizer",
            severity="warning",
            summary=f"The optimizer updates each tensor by itself: {operators:,} operators and {words.seconds(spent)} "
            f"of each {words.seconds(rank.step)} step ({words.share(spent / rank.step)}).",
            action="Create it with fused=True, or foreach=True where it has no fused form: a few kernels for all "
            f"tensors, and a step that is up to {words.seconds(0.9 * spent)} shorter.",
            phase="optimizer",
            cost=0.9 * spent / rank.step,
            evidence={"step": rank.step, "time": spent, "operators": operators},
        )
    ]


def _full_floats(rank: _Rank) -> list[Finding]:
    flops = float((rank.facts.get("operators") or {}).get("flops_of_full_floats") or 0.0)
    full, shortened = float_peaks(str(rank.facts.get("device") or ""))
    if not (flops and full and shortened > full and rank.step):
        return []
    now, then = flops / full, flops / shortened
    if now < _FULL_FLOATS_SHARE * rank.step:
        return []
    saved = min(now - then, rank.step)
    return [
        Finding(
            kind="full_float_products",
            severity="warning",
            summary=f"Matrix products of 32-bit floats take at least {words.seconds(min(now, rank.step))} of each "
            f"{words.seconds(rank.step)} step: they do not use the GPU's tensor cores.",
            action="Call torch.set_float32_matmul_precision('high') before training (TF32), or train in bfloat16 with "
            f"torch.autocast('cuda', torch.bfloat16); they then take {words.seconds(then)} at best.",
            cost=saved / rank.step,
            evidence={"step": rank.step, "flops": flops, "seconds": now, "seconds_then": then},
        )
    ]


# --------------------------------------------------------------------------- memory in pieces


def _fragmented(facts: Mapping[int, Mapping[str, Any]], allocating: Mapping[int, float]) -> list[Finding]:
    """Return one finding for the rank whose allocator holds most memory that it cannot use.

    ``allocating`` are the shares of a step in which ranks take memory from the device, as far as they are known.
    """
    held = {rank: of["allocator"] for rank, of in facts.items() if of.get("allocator")}
    unused = {rank: _of_no_use(one) for rank, one in held.items()}
    ranks = tuple(sorted(rank for rank, mib in unused.items() if mib))
    if not ranks:
        return []
    worst = max(ranks, key=lambda rank: unused[rank])
    one = held[worst]
    retries = int(one.get("retries") or 0)
    share = allocating.get(worst, 0.0)
    taking = f"; taking more from the GPU is {words.share(share)} of a step" if share >= _ALLOCATING else ""
    emptied = (
        f"; it had to give its cache back {retries} times, each of which stops the GPU" if retries else ""
    )
    return [
        Finding(
            kind="fragmented_memory",
            severity=_severity(one, unused[worst], share),
            summary=f"Device memory of rank {worst} is fragmented: of the {words.mebibytes(one['reserved'])} that "
            f"torch holds, {words.mebibytes(unused[worst])} lie in pieces of sizes that it cannot use"
            f"{taking}{emptied}.",
            action="Start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or bring batches to a few fixed sizes "
            "(padding), so that freed memory fits again.",
            ranks=ranks,
            cost=share if share >= _ALLOCATING else 0.0,
            evidence={
                **{name: float(value) for name, value in one.items()},
                "unused": unused[worst],
                "allocating": share,
                "where": "device",
            },
        )
    ]


def _severity(allocator: Mapping[str, Any], unused: float, allocating: float) -> str:
    """Return how much it matters: whether memory of no use costs time, or will be missed."""
    total = float(allocator.get("total") or 0.0)
    if 0 < _MOSTLY_WASTED * total <= unused:
        return "critical"
    matters = (
        int(allocator.get("retries") or 0) > 0
        or float(allocator.get("allocations") or 0.0) >= MANY_ALLOCATIONS
        or float(allocator["reserved"]) >= _SCARCE * total
        or unused >= _WASTED * total
        or allocating >= _ALLOCATING
    )
    return "warning" if matters else "info"


def _of_no_use(allocator: Mapping[str, Any]) -> float:
    """Return the MiB that tensors have never used at once, or that are split, where they are a large part; else 0."""
    reserved = float(allocator.get("reserved") or 0.0)
    peak = float(allocator.get("peak") or reserved)
    unused = max(float(allocator.get("split") or 0.0), reserved - peak)
    return unused if unused >= max(_UNUSED_MIB, _UNUSED_SHARE * reserved) else 0.0
