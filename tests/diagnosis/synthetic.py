"""Runs as ranks would have recorded them, made from a seed: phases, noise, meetings, and faults of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from powertrain.diagnosis.tables.steps import Floats, StepTable
from powertrain.trace.recording import phases

#: Seconds of a healthy step, before jitter; the exchange itself is added where ranks meet.
USUAL = {
    phases.INPUT: 0.0003,
    phases.FORWARD: 0.010,
    phases.BACKWARD: 0.014,
    phases.OPTIMIZER: 0.003,
    phases.INSIDE: 0.0006,
    phases.REPORT: 0.0001,
    phases.OUTSIDE: 0.0004,
}
EXCHANGE = 0.0012

#: Changes the times (steps, ranks, phases) that ranks would have had without it.
Fault = Callable[[Floats, np.random.Generator], None]


@dataclass(frozen=True)
class Noise:
    """How a machine disturbs its ranks."""

    #: Of the logarithm of each phase.
    jitter: float = 0.03
    #: Share of a rank's steps that are interrupted, and for how many seconds.
    hiccups: float = 0.02
    shortest: float = 0.002
    longest: float = 0.020


QUIET = Noise(jitter=0.01, hiccups=0.0)
#: Every tenth step of every rank is interrupted.
HEAVY = Noise(jitter=0.05, hiccups=0.10)


def run(
    seed: int,
    *faults: Fault,
    ranks: int = 2,
    steps: int = 200,
    noise: Noise | None = None,
    hosts: Sequence[str] | None = None,
) -> StepTable:
    """A run with ``faults``, recorded by all ranks; DDP's meetings make everybody wait for the last."""
    noise = noise or Noise()
    generator = np.random.default_rng(seed)
    times = np.zeros((steps, ranks, phases.COUNT))
    for phase, usual in USUAL.items():
        times[:, :, phase] = usual * np.exp(generator.normal(0.0, noise.jitter, (steps, ranks)))
    _start_up(times, generator)
    _interrupt(times, noise, generator)
    for fault in faults:
        fault(times, generator)
    fetch = times[:, :, phases.INPUT].copy()
    _meet(times, noise, generator)
    total = times.sum(axis=2)
    nothing = np.zeros((steps, ranks))
    return StepTable(
        ranks=tuple(range(ranks)),
        hosts=tuple(hosts) if hosts is not None else ("host-a",) * ranks,
        numbers=np.arange(steps, dtype=np.int64),
        phases=times,
        device=np.zeros_like(times),
        start=1.7e9 + np.cumsum(total, axis=0) - total,
        memory=nothing,
        peak_memory=nothing,
        fetch=fetch,
        flags=np.zeros((steps, ranks), np.int64),
        samples=np.full((steps, ranks), 32.0),
        tokens=nothing,
        weight=np.ones(steps),
    )


def _interrupt(times: Floats, noise: Noise, generator: np.random.Generator) -> None:
    """What the scheduler does: some phase, the longer the likelier, is held up for a while."""
    steps, ranks, _ = times.shape
    hit = generator.random((steps, ranks)) < noise.hiccups
    share = np.array([USUAL.get(phase, 0.0) for phase in range(phases.COUNT)])
    where = generator.choice(phases.COUNT, size=(steps, ranks), p=share / share.sum())
    length = generator.uniform(noise.shortest, noise.longest, (steps, ranks))
    rows, columns = np.nonzero(hit)
    times[rows, columns, where[rows, columns]] += length[rows, columns]


def _start_up(times: Floats, generator: np.random.Generator) -> None:
    """The first steps allocate, compile and warm caches, as those of healthy runs do."""
    slow = min(int(generator.integers(1, 5)), len(times))
    times[:slow] *= np.linspace(6.0, 2.0, slow)[:, None, None]
    times[:1, :, phases.OUTSIDE] += 0.5


def _meet(times: Floats, noise: Noise, generator: np.random.Generator) -> None:
    """Fill in COLLECTIVE: from a rank's arrival to the end of the exchange. The optimizer comes after it."""
    if times.shape[1] < 2:
        return
    before = times.sum(axis=2) - times[:, :, phases.OPTIMIZER] - times[:, :, phases.COLLECTIVE]
    arrival = before.copy()
    arrival[1:] += times[:-1, :, phases.OPTIMIZER]
    exchange = EXCHANGE * np.exp(generator.normal(0.0, noise.jitter, (len(times), 1)))
    times[:, :, phases.COLLECTIVE] += arrival.max(axis=1, keepdims=True) + exchange - arrival


def bound(phase: int, seconds: float) -> Fault:
    """Every rank takes that much longer in every step."""

    def inject(times: Floats, generator: np.random.Generator) -> None:
        times[:, :, phase] += _about(seconds, generator, times.shape[:2])

    return inject


def late(rank: int, phase: int, seconds: float) -> Fault:
    def inject(times: Floats, generator: np.random.Generator) -> None:
        times[:, rank, phase] += _about(seconds, generator, len(times))

    return inject


def by_turns(phase: int, seconds: float) -> Fault:
    """In each step one rank, drawn anew, is late."""

    def inject(times: Floats, generator: np.random.Generator) -> None:
        who = generator.integers(0, times.shape[1], len(times))
        times[np.arange(len(times)), who, phase] += _about(seconds, generator, len(times))

    return inject


def slow_host(ranks: Sequence[int], factor: float) -> Fault:
    """Everything these ranks compute takes ``factor`` times as long."""

    def inject(times: Floats, generator: np.random.Generator) -> None:
        for phase in (phases.FORWARD, phases.BACKWARD, phases.OPTIMIZER):
            times[:, list(ranks), phase] *= factor

    return inject


def first_batch(seconds: float, rank: int | None = None) -> Fault:
    def inject(times: Floats, generator: np.random.Generator) -> None:
        times[:1, slice(None) if rank is None else rank, phases.INPUT] += seconds

    return inject


def every(period: int, phase: int, seconds: float, rank: int | None = None) -> Fault:
    """The last step of each ``period`` takes that much longer."""

    def inject(times: Floats, generator: np.random.Generator) -> None:
        rows = np.arange(period - 1, len(times), period)
        columns = range(times.shape[1]) if rank is None else [rank]
        for column in columns:
            times[rows, column, phase] += _about(seconds, generator, len(rows))

    return inject


def waits(period: int, phase: int, seconds: float, after: int = 2) -> Fault:
    """A host waits so long for what it had queued, every ``period`` steps, and the ``after`` steps that follow are as
    much shorter together: the queue is empty, so that it is not held up."""

    def inject(times: Floats, generator: np.random.Generator) -> None:
        rows = np.arange(period - 1, len(times) - after, period)
        times[rows, :, phase] += _about(seconds, generator, len(rows))[:, None]
        for number in range(1, after + 1):
            times[rows + number] *= 1.0 - seconds / after / times[rows + number].sum(axis=2, keepdims=True)

    return inject


def without(phase: int) -> Fault:
    """The phase is not seen: its time is counted as inside."""

    def inject(times: Floats, generator: np.random.Generator) -> None:
        times[:, :, phases.INSIDE] += times[:, :, phase]
        times[:, :, phase] = 0.0

    return inject


def permuted(steps: StepTable, order: Sequence[int]) -> StepTable:
    """The same run with its ranks in another order: the rank at place ``order[i]`` becomes rank i."""
    places = list(order)
    return replace(
        steps,
        hosts=tuple(steps.hosts[place] for place in places),
        **{
            name: getattr(steps, name)[:, places]
            for name in (
                "phases",
                "device",
                "start",
                "memory",
                "peak_memory",
                "fetch",
                "flags",
                "samples",
                "tokens",
            )
        },
    )


def scaled(steps: StepTable, factor: float) -> StepTable:
    return replace(
        steps, phases=steps.phases * factor, device=steps.device * factor, fetch=steps.fetch * factor
    )


def _about(seconds: float, generator: np.random.Generator, shape: int | tuple[int, ...]) -> Floats:
    return seconds * np.exp(generator.normal(0.0, 0.05, shape))
