"""The part of a run by which its speed is judged: start-up cut off, time on devices counted where it was spent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from powertrain.diagnosis.tables import statistics
from powertrain.diagnosis.tables.steps import Floats, StepTable
from powertrain.trace.recording import phases

#: Minimum number of steps of a run, and after its start-up.
LEAST_STEPS = 20
LEAST_STEADY_STEPS = 12
#: This many newest steps without gaps are preferred to all steps with gaps.
_LEAST_UNBROKEN = 200
#: Steps whose mean counts as one value: loaders deliver in bursts that are shorter, hiccups are rarer.
WINDOW = 20
#: Phases in which a thread waits rather than works: they make no rank late.
WAITS = (phases.COLLECTIVE, phases.REPORT)
#: The activity of a rank in a phase, for the middle of a sentence.
DOING = {
    phases.INPUT: "waiting for a batch",
    phases.H2D: "copying a batch to the device",
    phases.FORWARD: "in forward",
    phases.BACKWARD: "in backward",
    phases.COLLECTIVE: "exchanging gradients or parameters",
    phases.OPTIMIZER: "in the optimizer",
    phases.INSIDE: "in the step outside model and optimizer (loss, metrics)",
    phases.REPORT: "in report() or saving a checkpoint",
    phases.OUTSIDE: "between steps",
}
#: Limit of start-up: this many steps, or this share of the run if that is more.
_START_STEPS = 20
_START_SHARE = 0.1
#: A step belongs to start-up while it takes this much longer than a usual one.
_START_EXCESS = 0.25
#: Phases that a thread is in while its device may still be busy with an earlier one.
_BEFORE_THE_DEVICE = (phases.OUTSIDE, phases.REPORT, phases.INPUT)


@dataclass(frozen=True)
class SteadySteps:
    """Steps after start-up. Columns are places in ``steps.ranks``; rows are places in ``numbers``."""

    steps: StepTable
    #: Rows of ``steps`` that belong to start-up, and the first of those that are judged: later, where older steps were
    #: thinned, because what is left of them is not what they were like on average.
    start_up: int
    begins: int
    #: (steps, ranks, phases): where their time went.
    start: Floats
    numbers: np.ndarray[tuple[int], np.dtype[np.int64]]
    #: (steps, ranks, phases): where the time of each step went.
    table: Floats
    #: The same from one meeting of the ranks to the next: with the optimizer of the step before, which comes after that
    #: step's meeting, so that a rank that is late at a meeting is late in the same row.
    between: Floats
    #: Seconds of each step on the last rank, and of the meeting itself.
    critical: Floats
    #: Seconds of a usual step.
    step: float

    @property
    def enough(self) -> bool:
        """Whether there are enough steps, and any time was measured."""
        return len(self.steps) >= LEAST_STEPS and len(self.numbers) >= LEAST_STEADY_STEPS and self.step > 0.0

    def work(self) -> Floats:
        """Return (steps, ranks): each rank's own work before it met the others."""
        waits = self.between[:, :, list(WAITS)]
        return np.asarray(self.between.sum(axis=2) - waits.sum(axis=2), np.float64)

    def common(self) -> Floats:
        """Return (steps, phases): the time that every rank spends in a phase, the minimum over ranks."""
        return np.asarray(self.table.min(axis=1), np.float64)

    def longest(self, phase: int) -> Floats:
        """Return the delay of each step by a phase on its slowest rank.

        For an exchange only its own time, without the wait for late ranks; for reports the time that they add to the
        last rank, without the wait at their barriers.
        """
        times = self.between[:, :, phase]
        if phase == phases.COLLECTIVE:
            return np.asarray(times.min(axis=1), np.float64)
        if phase == phases.REPORT:
            work = self.work()
            return np.asarray((work + times).max(axis=1) - work.max(axis=1), np.float64)
        return np.asarray(times.max(axis=1), np.float64)

    @property
    def mean_step(self) -> float:
        """Mean seconds of a step on the rank that takes longest: the one base of all times and shares that are shown.

        Ranks that meet in every step all take as long, so it is each rank's. Whether a phase takes too much is decided
        from medians, which outliers do not move; those are never shown beside it.
        """
        return float(self.table.sum(axis=2).mean(axis=0).max()) if self.table.size else 0.0

    def mean_of(self, phase: int) -> float:
        """Mean seconds of ``phase`` in a step, over all ranks."""
        return float(self.table[:, :, phase].mean()) if self.table.size else 0.0

    def share_of_step(self, time: float) -> float:
        """``time`` as a part of :attr:`mean_step`, from 0 to 1."""
        return min(1.0, max(0.0, time / self.mean_step)) if self.mean_step > 0 else 0.0

    def step_without(self, saved: float) -> float:
        """Mean seconds that a step would take with so many saved."""
        return max(0.0, self.mean_step - max(0.0, saved))

    def critical_without(self, phase: int) -> Floats:
        """Return the seconds of each step if no rank spent time in ``phase``; waiting for late ranks stays."""
        if phase == phases.COLLECTIVE:
            return self.critical - self.longest(phase)
        between = self.between.copy()
        between[:, :, phase] = 0.0
        return _critical(between)

    @property
    def everybody(self) -> str:
        return "Every rank" if len(self.steps.ranks) > 1 else "The rank"

    def ranks_at(self, columns: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self.steps.ranks[column] for column in columns))

    def hosts_at(self, columns: Iterable[int]) -> tuple[str, ...]:
        return tuple(sorted({self.steps.hosts[column] for column in columns} - {""}))

    def who(self, columns: Iterable[int]) -> str:
        """ "rank 1 on host-a", "ranks 0 and 2 on host-a", "ranks 0, 1, 2 and 9 more on 3 hosts"."""
        chosen = list(columns)
        ranks, hosts = self.ranks_at(chosen), self.hosts_at(chosen)
        place = "" if not hosts else f" on {hosts[0]}" if len(hosts) == 1 else f" on {len(hosts)} hosts"
        if 1 < len(hosts) <= 3:
            place = f" on {listed(hosts)}"
        names = [str(rank) for rank in ranks]
        if len(names) > 5:
            names = [*names[:3], f"{len(names) - 3} more"]
        return f"rank{'s' if len(ranks) > 1 else ''} {listed(names)}{place}"


def listed(names: Sequence[str]) -> str:
    """ "", "a", "a and b", "a, b and c"."""
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


def steady_steps(steps: StepTable) -> SteadySteps:
    """Return ``steps`` without start-up; never raises for any numbers."""
    table = spent(steps)
    between = _between_meetings(table, steps)
    critical = _critical(between)
    cut = _start_up(critical, steps)
    begins = max(cut, _first_unbroken(steps))
    return SteadySteps(
        steps=steps,
        start_up=cut,
        begins=begins,
        start=table[:cut],
        numbers=steps.numbers[begins:],
        table=table[begins:],
        between=between[begins:],
        critical=critical[begins:],
        step=statistics.median(statistics.window_means(critical[begins:], WINDOW)),
    )


def _first_unbroken(steps: StepTable) -> int:
    """The first row from which on no step is missing; 0 where too few come after it to judge by them alone."""
    gaps = np.flatnonzero(np.diff(steps.numbers) > 1)
    first = int(gaps[-1]) + 1 if len(gaps) else 0
    return first if len(steps) - first >= _LEAST_UNBROKEN else 0


def spent(steps: StepTable) -> Floats:
    """Return (steps, ranks, phases): the attributed time.

    Without a device that is the time of the threads. With one, a thread runs ahead and then waits somewhere for it: the
    phases on the device count with their time there, and only the idle time of the device is left to the thread's
    other phases, those before the step's work first.
    """
    thread = _clean(steps.phases)
    device = np.zeros_like(thread)
    device[:, :, list(phases.TIMED_PHASES)] = _clean(steps.device)[:, :, list(phases.TIMED_PHASES)]
    timed = (steps.flags & phases.TIMED_ON_DEVICE).astype(bool) & (device.sum(axis=2) > 0)
    if not timed.any():
        return thread
    total, busy = thread.sum(axis=2), device.sum(axis=2)
    idle = np.maximum(total - busy, 0.0)
    device *= (np.minimum(busy, total) / np.where(busy > 0, busy, 1.0))[:, :, None]
    ahead = _part(thread, _BEFORE_THE_DEVICE)
    device += _shared_out(ahead, idle)
    idle = np.maximum(idle - ahead.sum(axis=2), 0.0)
    inside = _part(thread, (phases.INSIDE,))
    device += _shared_out(inside, idle)
    idle = np.maximum(idle - inside.sum(axis=2), 0.0)
    device += _shared_out(_part(thread, phases.ON_DEVICE), idle)
    return np.where(timed[:, :, None], device, thread)


def _clean(values: Floats) -> Floats:
    """Return values without impossible times."""
    return np.maximum(np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), 0.0)


def _part(table: Floats, chosen: Iterable[int]) -> Floats:
    part = np.zeros_like(table)
    places = list(chosen)
    part[:, :, places] = table[:, :, places]
    return part


def _shared_out(wanted: Floats, available: Floats) -> Floats:
    """``wanted`` where there is enough, otherwise cut down alike."""
    total = wanted.sum(axis=2)
    part = np.minimum(total, available) / np.where(total > 0, total, 1.0)
    return np.asarray(wanted * part[:, :, None], np.float64)


def _between_meetings(table: Floats, steps: StepTable) -> Floats:
    between = table.copy()
    follows = np.flatnonzero(np.diff(steps.numbers) == 1) + 1
    between[follows, :, phases.OPTIMIZER] = table[follows - 1, :, phases.OPTIMIZER]
    return between


def _critical(between: Floats) -> Floats:
    if not between.size:
        return np.zeros(between.shape[0])
    meeting = between[:, :, phases.COLLECTIVE]
    return np.asarray((between.sum(axis=2) - meeting).max(axis=1) + meeting.min(axis=1), np.float64)


def _start_up(critical: Floats, steps: StepTable) -> int:
    """Return the number of start-up rows: the first step of an attempt always, then those longer than a usual one.

    It continues over a single quick step, as long as two of the next three are slow.
    """
    rows = len(critical)
    limit = min(max(_START_STEPS, int(rows * _START_SHARE)), rows // 2)
    rest = critical[limit:]
    usual = statistics.median(rest)
    bound = usual + max(_START_EXCESS * usual, 4.0 * statistics.mad(rest))
    cut = 1 if rows and steps.numbers[0] == 0 else 0
    while cut < limit and (critical[cut] > bound or statistics.median(critical[cut : cut + 3]) > bound):
        cut += 1
    return cut
