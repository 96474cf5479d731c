"""Rules for the machine: idle or throttled GPUs, more threads than cores, and other users of the cores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from powertrain.diagnosis import words
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.tables.samples import Samples, by_host
from powertrain.diagnosis.tables.steps import StepTable
from powertrain.run.health.hang_report import rank_names
from powertrain.trace.machine.samples import HARDWARE, POWER, THERMAL, THROTTLE_WORDS
from powertrain.trace.recording import phases

#: Minimum number of samples.
LEAST_LOOKS = 10
#: A GPU that is busy for less than this part of the time is idle.
BUSY = 0.5
#: Looks in which a GPU was held back: this part of them, and this many.
_THROTTLED = 0.1
_THROTTLED_LOOKS = 3
#: Threads for each core, and cores of all that must be busy: without work for them, too many threads cost nothing.
_THREADS_PER_CORE = 1.5
_CORES_BUSY = 0.7
#: Shares of all cores that must be busy, and that other processes must use, to delay the ranks on a machine.
_NO_CORE_LEFT = 0.9
_CORES_OF_OTHERS = 0.25
#: Minimum share of stolen cores for a finding.
_STOLEN = 0.05


def find(steps: StepTable, samples: Mapping[int, Samples]) -> list[Finding]:
    """Return findings about the machines; none if there are too few samples."""
    training = {rank: looks.while_training() for rank, looks in samples.items()}
    return [
        *_idle_gpus(steps, training),
        *_throttled_gpus(training),
        *_too_many_threads(training),
        *_others_on_the_machine(training),
        *_stolen_cores(training),
    ]


# --------------------------------------------------------------------------- GPUs


def _idle_gpus(steps: StepTable, samples: Mapping[int, Samples]) -> list[Finding]:
    """Return one finding for all ranks whose GPU is idle most of the time."""
    busy = {rank: _median_busy(samples[rank]) for rank in sorted(samples)}
    idle = tuple(rank for rank, part in busy.items() if part < BUSY)
    if not idle:
        return []
    longest = _longest_host_phase(steps, idle)
    worst = min(busy[rank] for rank in idle)
    hosts = _hosts(samples[rank] for rank in idle)
    return [
        Finding(
            kind="gpu_idle",
            severity="warning",
            summary=f"The GPU of {rank_names(idle)}{words.hosts(hosts)} is busy only {words.share(worst)} of the time.",
            action=_IDLE_ACTIONS.get(longest, _IDLE_ACTIONS[""]),
            phase=longest,
            ranks=idle,
            hosts=hosts,
            cost=1.0 - worst,
            evidence={"busy": [busy[rank] for rank in idle]},
        )
    ]


_IDLE_ACTIONS = {
    "": "Give it more work at a time: a larger batch, or torch.compile(model, mode='reduce-overhead') where kernels "
    "are short.",
    "input": "It waits for batches: more loader workers, or more of them prefetched.",
    "report": "It waits for reports and checkpoints: make them rarer, or save without waiting.",
    "outside": "It waits for work between steps: do it less often, or on another thread.",
}


def _median_busy(looks: Samples) -> float:
    """Return the median busy share of a rank's GPU; infinite if it has none, or too few samples."""
    busy = looks.column("gpu_busy")[np.isfinite(looks.known("gpu_memory_total"))]
    busy = busy[np.isfinite(busy)]
    return float(np.median(busy)) if len(busy) >= LEAST_LOOKS else math.inf


def _longest_host_phase(steps: StepTable, ranks: Sequence[int]) -> str:
    """Return the longest phase without a device on these ranks; "" if none takes a fifth of the time."""
    columns = [column for column, rank in enumerate(steps.ranks) if rank in ranks]
    spent = np.nan_to_num(steps.phases[:, columns]).sum(axis=(0, 1))
    candidates = (phases.INPUT, phases.REPORT, phases.OUTSIDE)
    longest = max(candidates, key=lambda phase: float(spent[phase]))
    return phases.NAMES[longest] if spent[longest] > 0.2 * spent.sum() else ""


def _throttled_gpus(samples: Mapping[int, Samples]) -> list[Finding]:
    """Return one finding for all ranks with a throttled GPU; a power limit alone is normal for a busy GPU."""
    reasons = {rank: _throttle_shares(samples[rank]) for rank in sorted(samples)}
    held_back = {rank: shares for rank, shares in reasons.items() if shares}
    defects = tuple(rank for rank, shares in held_back.items() if set(shares) - {POWER})
    ranks = defects or tuple(held_back)
    if not ranks:
        return []
    shares = {bit: max(held_back[rank].get(bit, 0.0) for rank in ranks) for bit in (THERMAL, POWER, HARDWARE)}
    reason, part = max(shares.items(), key=lambda item: (item[0] != POWER and item[1] > 0, item[1]))
    hosts = _hosts(samples[rank] for rank in ranks)
    hottest = max(_largest(samples[rank], "gpu_temperature") for rank in ranks)
    return [
        Finding(
            kind="gpu_throttled",
            severity="warning" if defects else "info",
            summary=f"The GPU of {rank_names(ranks)}{words.hosts(hosts)} runs below its clock in {words.share(part)} "
            f"of the samples: {THROTTLE_WORDS[reason]}{f', up to {hottest:.0f} degrees' if hottest > 0 else ''}.",
            action=_THROTTLE_ACTIONS[reason],
            ranks=ranks,
            hosts=hosts,
            evidence={
                "reasons": {THROTTLE_WORDS[bit]: part for bit, part in shares.items() if part > 0},
                "temperature": hottest,
                "power": max(_largest(samples[rank], "gpu_power") for rank in ranks),
            },
        )
    ]


_THROTTLE_ACTIONS = {
    THERMAL: "Check its cooling (fans, dust, air flow, hot neighbours), or use another machine.",
    HARDWARE: "Check its power supply and cables, because the board itself slows it down; or use another machine.",
    POWER: "A GPU that works hard reaches its power limit; raise the limit (nvidia-smi -pl) where the machine allows.",
}


def _throttle_shares(looks: Samples) -> dict[int, float]:
    """Return the share of samples with a throttled GPU by reason; only relevant reasons."""
    flags = looks.flags("throttle")[np.isfinite(looks.known("gpu_memory_total"))]
    if len(flags) < LEAST_LOOKS:
        return {}
    found = {}
    for bit in THROTTLE_WORDS:
        held_back = int(np.count_nonzero(flags & bit))
        if held_back >= max(_THROTTLED_LOOKS, _THROTTLED * len(flags)):
            found[bit] = held_back / len(flags)
    return found


# --------------------------------------------------------------------------- threads


def _too_many_threads(samples: Mapping[int, Samples]) -> list[Finding]:
    """Return one finding for all hosts whose ranks use more threads than there are cores, and keep the cores busy."""
    crowded = [on_host for on_host in by_host(samples).values() if _is_crowded(on_host)]
    if not crowded:
        return []
    worst = max(crowded, key=lambda on_host: _threads(on_host) / _cores(on_host))
    threads, cores, fair = _threads(worst), _cores(worst), _fair_threads(worst)
    hosts = _hosts(chain(*crowded))
    return [
        Finding(
            kind="threads_oversubscribed",
            severity="warning",
            summary=f"{len(worst)} {'rank' if len(worst) == 1 else 'ranks'}{words.hosts(hosts)} together use "
            f"{threads:.0f} compute threads on {cores:.0f} cores, and the cores are busy.",
            action=f"Set OMP_NUM_THREADS={fair}, or call torch.set_num_threads({fair}) in the training function.",
            ranks=_ranks_on(crowded),
            hosts=hosts,
            evidence={
                "threads": threads,
                "cores": cores,
                "threads_per_rank": fair,
                "busy_cores": _median(worst, "host_cpu"),
            },
        )
    ]


def _is_crowded(ranks: Sequence[Samples]) -> bool:
    """Not where each rank has its fair number already: then there are too many ranks, and fewer threads cannot help."""
    cores = _cores(ranks)
    if not _were_looked_at(ranks):
        return False
    too_many = max(_median([looks], "threads") for looks in ranks) > _fair_threads(ranks)
    busy = _median(ranks, "host_cpu") >= _CORES_BUSY * cores
    return too_many and busy and _threads(ranks) > _THREADS_PER_CORE * cores


def _threads(ranks: Sequence[Samples]) -> float:
    return sum(_median([looks], "threads") for looks in ranks)


def _cores(ranks: Sequence[Samples]) -> float:
    return _median(ranks, "host_cores")


def _fair_threads(ranks: Sequence[Samples]) -> int:
    return max(1, int(_cores(ranks) // len(ranks)))


# --------------------------------------------------------------------------- others


def _others_on_the_machine(samples: Mapping[int, Samples]) -> list[Finding]:
    """Return one finding for all hosts whose cores are busy, many of them with other processes than ranks.

    Informational by itself: its severity follows from the findings that it explains.
    """
    shared = [on_host for on_host in by_host(samples).values() if _is_shared(on_host)]
    if not shared:
        return []
    worst = max(shared, key=lambda on_host: _cores_of_others(on_host) / _cores(on_host))
    others, cores = _cores_of_others(worst), _cores(worst)
    hosts = _hosts(chain(*shared))
    return [
        Finding(
            kind="machine_shared",
            severity="info",
            summary=f"Processes other than the ranks keep {others:.1f} of the {cores:.0f} cores{words.hosts(hosts)} "
            "busy, and none is free: ranks are delayed in every phase.",
            action="Stop the other processes, or give the run a machine or cores of its own; other findings "
            "may change once it is gone.",
            ranks=_ranks_on(shared),
            hosts=hosts,
            evidence={"cores": cores, "busy_cores": _mean(worst, "host_cpu"), "others_cores": others},
        )
    ]


def _is_shared(ranks: Sequence[Samples]) -> bool:
    cores = _cores(ranks)
    if not _were_looked_at(ranks):
        return False
    if not all(
        _mean([looks], "cpu") > 0 for looks in ranks
    ):  # otherwise all of it would be attributed to other processes
        return False
    is_full = _mean(ranks, "host_cpu") >= _NO_CORE_LEFT * cores
    return is_full and _cores_of_others(ranks) >= _CORES_OF_OTHERS * cores


def _cores_of_others(ranks: Sequence[Samples]) -> float:
    return max(0.0, _mean(ranks, "host_cpu") - sum(_mean([looks], "cpu") for looks in ranks))


def _stolen_cores(samples: Mapping[int, Samples]) -> list[Finding]:
    """Return one finding for all hosts that are virtual machines and do not get all of their cores.

    As with :func:`_others_on_the_machine`, its severity follows from the findings that it explains.
    """
    affected = [on_host for on_host in by_host(samples).values() if _has_cpu_steal(on_host)]
    if not affected:
        return []
    worst = max(affected, key=lambda on_host: _mean(on_host, "stolen") / _cores(on_host))
    stolen, cores = _mean(worst, "stolen"), _cores(worst)
    hosts = _hosts(chain(*affected))
    return [
        Finding(
            kind="cpu_stolen",
            severity="info",
            summary=f"CPU steal: the hypervisor gives {stolen:.1f} of the {cores:.0f} cores{words.hosts(hosts)} to "
            "other virtual machines, which delays ranks in any phase.",
            action="Use an instance type with dedicated cores, or another host; other findings may change without CPU "
            "steal.",
            ranks=_ranks_on(affected),
            hosts=hosts,
            evidence={"cores": cores, "stolen_cores": stolen},
        )
    ]


def _has_cpu_steal(ranks: Sequence[Samples]) -> bool:
    return _were_looked_at(ranks) and _mean(ranks, "stolen") >= _STOLEN * _cores(ranks)


# --------------------------------------------------------------------------- small things


def _mean(ranks: Sequence[Samples], name: str) -> float:
    """Return the mean of all finite values of these ranks; 0 if there are none."""
    values = np.concatenate([looks.column(name) for looks in ranks])
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else 0.0


def _median(ranks: Sequence[Samples], name: str) -> float:
    """Return the median of all known values of these ranks; 0 if there are none."""
    values = np.concatenate([looks.known(name) for looks in ranks])
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else 0.0


def _largest(looks: Samples, name: str) -> float:
    values = looks.column(name)
    return float(np.max(values[np.isfinite(values)], initial=0.0))


def _were_looked_at(ranks: Sequence[Samples]) -> bool:
    """Return whether there are enough samples of the cores of their host."""
    return _cores(ranks) > 0 and all(len(looks) >= LEAST_LOOKS for looks in ranks)


def _ranks_on(hosts: Sequence[Sequence[Samples]]) -> tuple[int, ...]:
    return tuple(sorted(looks.rank for looks in chain(*hosts)))


def _hosts(looks: Iterable[Samples]) -> tuple[str, ...]:
    return tuple(sorted({one.host for one in looks if one.host}))
