"""What a machine says of itself: GPUs that stand idle or run below their clock, more threads than cores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from powertrain.diagnosis import words
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.samples import Samples, by_host
from powertrain.diagnosis.steps import Steps
from powertrain.run.hang_report import rank_names
from powertrain.trace import phases
from powertrain.trace.samples import HARDWARE, POWER, THERMAL, THROTTLE_WORDS

#: Fewer looks say nothing.
LEAST_LOOKS = 10
#: A GPU that is busy for less than this part of the time is idle.
BUSY = 0.5
#: Looks in which a GPU was held back: this part of them, and this many.
_THROTTLED = 0.1
_THROTTLED_LOOKS = 3
#: Threads for each core, and cores of all that must be busy: without work for them, too many threads cost nothing.
_THREADS_PER_CORE = 1.5
_CORES_BUSY = 0.7


def find(steps: Steps, samples: Mapping[int, Samples]) -> list[Finding]:
    """What is wrong with the machines; nothing where nothing is, or where too little was recorded to say."""
    training = {rank: looks.while_training() for rank, looks in samples.items()}
    return [*_idle_gpus(steps, training), *_throttled_gpus(training), *_too_many_threads(training)]


# --------------------------------------------------------------------------- GPUs


def _idle_gpus(steps: Steps, samples: Mapping[int, Samples]) -> list[Finding]:
    """One finding for all ranks whose GPU waits for them more than it works."""
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
            summary=f"The GPU of {rank_names(idle)}{words.hosts(hosts)} works only {words.share(worst)} of the time.",
            action=_IDLE_ACTIONS.get(longest, _IDLE_ACTIONS[""]),
            phase=longest,
            ranks=idle,
            hosts=hosts,
            cost=1.0 - worst,
            evidence={"busy": [busy[rank] for rank in idle]},
        )
    ]


_IDLE_ACTIONS = {
    "": "Give it more to do at a time: a larger batch, or torch.compile(model, mode='reduce-overhead') where kernels "
    "are short.",
    "input": "It waits for batches: more loader workers, or more of them prefetched.",
    "report": "It waits for reports and checkpoints: make them rarer, or save without waiting.",
    "outside": "It waits for what the loop does between steps: do that rarely, or on another thread.",
}


def _median_busy(looks: Samples) -> float:
    """The busy share of a rank's GPU over its looks; infinite where it has none, or too few looks were taken."""
    busy = looks.column("gpu_busy")[np.isfinite(looks.known("gpu_memory_total"))]
    busy = busy[np.isfinite(busy)]
    return float(np.median(busy)) if len(busy) >= LEAST_LOOKS else math.inf


def _longest_host_phase(steps: Steps, ranks: Sequence[int]) -> str:
    """Which of the phases without a device takes longest on these ranks, "" where none takes a fifth of the time."""
    columns = [column for column, rank in enumerate(steps.ranks) if rank in ranks]
    spent = np.nan_to_num(steps.phases[:, columns]).sum(axis=(0, 1))
    candidates = (phases.INPUT, phases.REPORT, phases.OUTSIDE)
    longest = max(candidates, key=lambda phase: float(spent[phase]))
    return phases.NAMES[longest] if spent[longest] > 0.2 * spent.sum() else ""


def _throttled_gpus(samples: Mapping[int, Samples]) -> list[Finding]:
    """One finding for all ranks whose GPU runs below its clock; a power limit alone is what a busy GPU runs into."""
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
            f"of the looks: {THROTTLE_WORDS[reason]}{f', up to {hottest:.0f} degrees' if hottest > 0 else ''}.",
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
    THERMAL: "Have its cooling looked at (fans, dust, air flow, a neighbour that heats it), or use another machine.",
    HARDWARE: "Have its power supply and cables looked at: the board itself slows it down; or use another machine.",
    POWER: "A GPU that works hard reaches its power limit; raise the limit (nvidia-smi -pl) where the machine allows.",
}


def _throttle_shares(looks: Samples) -> dict[int, float]:
    """By reason, in which part of the looks the GPU was held back; only reasons that count."""
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
    """One finding for all hosts whose ranks use more threads than there are cores, and keep the cores busy."""
    crowded = [on_host for on_host in by_host(samples).values() if _is_crowded(on_host)]
    if not crowded:
        return []
    worst = max(crowded, key=lambda on_host: _threads(on_host) / _cores(on_host))
    threads, cores, fair = _threads(worst), _cores(worst), _fair_threads(worst)
    hosts = _hosts(looks for on_host in crowded for looks in on_host)
    return [
        Finding(
            kind="threads_oversubscribed",
            severity="warning",
            summary=f"{len(worst)} {'rank' if len(worst) == 1 else 'ranks'}{words.hosts(hosts)} together use "
            f"{threads:.0f} compute threads on {cores:.0f} cores, and the cores are busy.",
            action=f"Set OMP_NUM_THREADS={fair}, or call torch.set_num_threads({fair}) in the training function.",
            ranks=tuple(sorted(looks.rank for on_host in crowded for looks in on_host)),
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
    if not cores > 0 or any(len(looks) < LEAST_LOOKS for looks in ranks):
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


# --------------------------------------------------------------------------- small things


def _median(ranks: Sequence[Samples], name: str) -> float:
    """Of all known values of these ranks, 0 where there are none."""
    values = np.concatenate([looks.known(name) for looks in ranks])
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else 0.0


def _largest(looks: Samples, name: str) -> float:
    values = looks.column(name)
    return float(np.max(values[np.isfinite(values)], initial=0.0))


def _hosts(looks: Iterable[Samples]) -> tuple[str, ...]:
    return tuple(sorted({one.host for one in looks if one.host}))
