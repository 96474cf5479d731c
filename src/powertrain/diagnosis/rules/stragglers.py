"""Rules for stragglers: one rank, all ranks of a host, or another rank in each step. Pure.

Ranks meet where they exchange gradients. The rank with most work before a meeting comes last and waits least; the
others' wait is listed under it. Durations are compared, never clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.tables import statistics
from powertrain.diagnosis.tables.steady import DOING, WAITS, SteadySteps, steady_steps
from powertrain.diagnosis.tables.steps import Floats, StepTable
from powertrain.diagnosis.words import seconds, share
from powertrain.trace.recording import phases

#: Minimum delay of a straggler, as a share of a step and in seconds.
_LATE = 0.1
_LEAST = 1e-3
#: Share of steps in which it must be.
_MOSTLY = 0.6
#: Share of steps from which on it is the others' turn to be late too often to call one rank the late one.
_OTHER_TURN = 0.25
#: Maximum probability of such a delay by chance.
_CHANCE = 0.01
#: Share of steps in which some rank must be late by turns, and share of those in which it must be in one phase: what
#: interrupts processes at random hits any phase.
_BY_TURNS = 0.6
_SAME_PHASE = 0.7
#: From here on being late by turns costs so much that it needs no two clear levels, long and short.
_COSTLY_TURNS = 0.2
#: Minimum distance of those levels otherwise, in spreads of the lower one.
_LEVELS_APART = 3.0
#: A machine is slow, not one phase on it, where no phase has more than this share of what is lost.
_ONE_PHASE = 0.7

#: Share of a step that makes a late rank critical.
_CRITICAL = 0.3

KINDS = {
    phases.INPUT: "input_straggler",
    phases.H2D: "transfer_straggler",
    phases.FORWARD: "forward_straggler",
    phases.BACKWARD: "backward_straggler",
    phases.OPTIMIZER: "optimizer_straggler",
    phases.INSIDE: "inside_straggler",
    phases.OUTSIDE: "outside_straggler",
}
_LIKE_THE_OTHERS = (
    "Check that {who} gets no larger batches than the others and has its device or cores to itself"
)
_ADVICE = {
    phases.INPUT: "Look at where {who} reads from and give every rank as much to read and decode",
    phases.H2D: "Look at the link to the device of {who} (other traffic, memory of another socket, not pinned)",
    phases.FORWARD: _LIKE_THE_OTHERS,
    phases.BACKWARD: _LIKE_THE_OTHERS,
    phases.OPTIMIZER: "Look at what the optimizer does on {who} alone, and for another process on its device or cores",
    phases.INSIDE: "Look at what the step does on {who} alone (metrics, logging, printing)",
    phases.OUTSIDE: "Look at what the loop does between steps on {who} alone (logging, evaluation, saving)",
}
#: The same where ranks are late by turns.
_EQUAL_WORK = "Give all ranks the same amount of work in each step (batches of one length, as many rows)"
_BY_THE_WAY = (
    "Look at the work that single ranks do there by turns (logging, saving), and do it on all of them at once"
)
_TURNS_ADVICE = {
    phases.INPUT: "Load further ahead on every rank, so that one slow batch is not waited for",
    phases.INSIDE: _BY_THE_WAY,
    phases.OUTSIDE: _BY_THE_WAY,
}


@dataclass(frozen=True)
class _Late:
    """Ranks that are late in the same way, by their columns."""

    columns: tuple[int, ...]
    phase: int
    #: Seconds a step beyond the ranks that are not late, in all and by phase, and where the first lies.
    excess: float
    by_phase: Floats
    sure: statistics.Interval
    #: Share of steps in which they were.
    often: float
    #: Seconds a step by which the last rank would come earlier without them, and without all others that are late too.
    saved: float
    saved_by_all: float


def find(steps: StepTable) -> list[Finding]:
    """Return stragglers, the costliest first; [] if there are none, or too few steps."""
    run = steady_steps(steps)
    if not run.enough or len(run.steps.ranks) < 2:
        return []
    late = sorted(_late_ranks(run), key=lambda one: -one.excess)
    if late:
        return [_straggler(run, group, late) for group in late]
    return _late_by_turns(run)


def _floor(run: SteadySteps) -> float:
    return max(_LATE * run.step, _LEAST)


def _late_ranks(run: SteadySteps) -> list[_Late]:
    """Ranks above the widest gap between the usual work of any two, grouped by where they lose their time.

    Those that lose it in one phase are grouped by that phase; those that lose it all over are one group.
    """
    work = run.work()
    usual = np.median(work, axis=0)
    order = np.argsort(usual, kind="stable")
    gaps = np.diff(usual[order])
    widest = int(np.argmax(gaps))
    if gaps[widest] < _floor(run):
        return []
    punctual, behind = order[: widest + 1], order[widest + 1 :]
    ahead = np.median(work[:, punctual], axis=1) - np.median(work[:, behind], axis=1)
    if float((ahead >= _floor(run)).mean()) >= _OTHER_TURN:
        return []
    reference = np.median(run.between[:, punctual], axis=1)
    expected = np.median(work[:, punctual], axis=1)
    groups: dict[int | None, list[int]] = {}
    for column in behind.tolist():
        excess = work[:, column] - expected
        if _is_late(run, excess):
            phase, part = _phase_behind(run.between[:, column] - reference)
            one_phase = part >= _ONE_PHASE * statistics.median(excess)
            groups.setdefault(phase if one_phase else None, []).append(column)
    everybody = [column for columns in groups.values() for column in columns]
    saved = _saved(work, everybody, expected)
    return [_group(run, columns, reference, expected, saved) for columns in groups.values()]


def _saved(work: Floats, columns: Sequence[int], expected: Floats) -> float:
    """Seconds a step by which the last rank would come earlier if these took no more than is expected."""
    without = work.copy()
    without[:, columns] = np.minimum(work[:, columns], expected[:, None])
    return max(0.0, statistics.median(work.max(axis=1)) - statistics.median(without.max(axis=1)))


def _is_late(run: SteadySteps, excess: Floats) -> bool:
    """Return whether a rank is late in most steps, and in more parts of the run than by chance."""
    behind = excess > 0.5 * _floor(run)
    parts = statistics.window_means(behind, statistics.block_length(len(behind)))
    chance = statistics.sign_test(int((parts > 0.5).sum()), len(parts))
    return float(behind.mean()) >= _MOSTLY and chance < _CHANCE


def _phase_behind(excess: Floats) -> tuple[int, float]:
    """The phase with the most of it, from (steps, phases), and how much."""
    usual = np.median(excess, axis=0)
    usual[list(WAITS)] = -np.inf
    phase = int(np.argmax(usual))
    return phase, float(usual[phase])


def _group(
    run: SteadySteps, columns: list[int], reference: Floats, expected: Floats, saved_by_all: float
) -> _Late:
    work = run.work()
    excess = np.median(work[:, columns], axis=1) - expected
    beyond = np.median(run.between[:, columns], axis=1) - reference
    blocks = statistics.window_medians(excess, statistics.block_length(len(excess)))
    return _Late(
        columns=tuple(sorted(columns)),
        phase=_phase_behind(beyond)[0],
        excess=statistics.median(excess),
        by_phase=np.median(beyond, axis=0),
        sure=statistics.median_interval(blocks, block=1),
        often=float((excess > 0.5 * _floor(run)).mean()),
        saved=_saved(work, columns, expected),
        saved_by_all=saved_by_all,
    )


def _straggler(run: SteadySteps, late: _Late, everybody_late: Sequence[_Late]) -> Finding:
    """Told after ``everybody_late[0]``, which is the latest and hides those that are less late."""
    node = _slow_node(run, late)
    who = run.who(late.columns)
    leads = late is everybody_late[0]
    saved = late.saved_by_all if leads else late.saved
    verb = "is" if len(late.columns) == 1 else "are"
    said = f"{_capital(who)} {verb} {seconds(late.excess)} behind {_the_others(run)} in each step"
    where = f", {DOING[late.phase]}"
    advice = _ADVICE[late.phase].format(who=who)
    if node:
        said = f"All ranks of {node} are {seconds(late.excess)} behind those of other hosts in each step"
        where = f", most of it {DOING[late.phase]}"
        advice = f"Look at {node} (other processes, clocks, temperature, network, disk) or leave it out"
    hidden = not leads and saved < 0.5 * _floor(run)
    if hidden:
        where += f"; it costs little as long as {run.who(everybody_late[0].columns)} comes later still"
    cured = "with all late ranks cured " if len(everybody_late) > 1 else ""
    return Finding(
        kind="slow_node" if node else KINDS[late.phase],
        severity="info" if hidden else "critical" if saved >= _CRITICAL * run.step else "warning",
        summary=f"{said} ({share(run.share_of_step(late.excess))} of it){where}.",
        action=f"{advice}: {cured}a step would take {seconds(run.step_without(late.saved_by_all))} instead of "
        f"{seconds(run.mean_step)}.",
        phase=phases.NAMES[late.phase],
        ranks=run.ranks_at(late.columns),
        hosts=run.hosts_at(late.columns),
        cost=run.share_of_step(saved),
        evidence=_evidence(run, late),
        echoes=_echoes(run, late),
    )


def _the_others(run: SteadySteps) -> str:
    return "the others" if len(run.steps.ranks) > 2 else "the other"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _evidence(run: SteadySteps, late: _Late) -> dict[str, object]:
    return {
        "step": run.mean_step,
        "excess": late.excess,
        "low": late.sure.low,
        "high": late.sure.high,
        "share": run.share_of_step(late.excess),
        "late_in": late.often,
        "saved": late.saved,
        "by_phase": {
            phases.NAMES[phase]: float(late.by_phase[phase])
            for phase in KINDS
            if late.by_phase[phase] > 0.02 * run.step
        },
    }


def _echoes(run: SteadySteps, late: _Late) -> tuple[Finding, ...]:
    """Return findings for the wait of the others, which is an effect of the straggler."""
    waits = np.median(run.between[:, :, phases.COLLECTIVE], axis=0)
    least = float(waits[list(late.columns)].min())
    columns = [column for column in range(len(waits)) if column not in late.columns]
    waiting = [column for column in columns if waits[column] - least >= 0.5 * _floor(run)]
    if not waiting:
        return ()
    time = float(np.median(waits[waiting]))
    verb = "waits" if len(waiting) == 1 else "wait"
    who = run.who(waiting)
    return (
        Finding(
            kind="collective_bound",
            severity="info",
            summary=f"{_capital(who)} {verb} {seconds(time)} a step for {run.who(late.columns)}.",
            phase=phases.NAMES[phases.COLLECTIVE],
            ranks=run.ranks_at(waiting),
            hosts=run.hosts_at(waiting),
            cost=run.share_of_step(time),
            evidence={"step": run.mean_step, "time": time, "share": run.share_of_step(time)},
        ),
    )


def _slow_node(run: SteadySteps, late: _Late) -> str:
    """Return the host with exactly these ranks; "" if there is none.

    One rank alone on its host is a slow node only if it loses time all over, not in one phase.
    """
    hosts = run.hosts_at(late.columns)
    everywhere = {host for host in run.steps.hosts if host}
    if len(hosts) != 1 or len(everywhere) < 2:
        return ""
    its_own = {column for column, host in enumerate(run.steps.hosts) if host == hosts[0]}
    if its_own != set(late.columns):
        return ""
    spread = float(late.by_phase[late.phase]) < _ONE_PHASE * late.excess
    return hosts[0] if len(its_own) > 1 or spread else ""


def _late_by_turns(run: SteadySteps) -> list[Finding]:
    """Return a finding if no rank is always late, but some rank is in most steps."""
    work = run.work()
    steps, ranks = work.shape
    last = work.argmax(axis=1)
    others = np.where(np.arange(ranks)[None, :] == last[:, None], np.nan, work)
    excess = work.max(axis=1) - np.nanmedian(others, axis=1)
    late = np.flatnonzero(excess >= _floor(run))
    if len(late) < _BY_TURNS * steps:
        return []
    phase, same = _phase_by_turns(run, late, last)
    part = statistics.median(excess) / run.step
    if same < _SAME_PHASE or (part < _COSTLY_TURNS and not _two_levels(run, late, last, phase)):
        return []
    turns = np.bincount(last[late], minlength=ranks) / len(late)
    return [_by_turns(run, phase, statistics.median(excess), turns, len(late) / steps)]


def _phase_by_turns(run: SteadySteps, late: NDArray[np.int64], last: NDArray[np.int64]) -> tuple[int, float]:
    """The phase in which the last ranks of those rows mostly lost their time, and in which share of the rows."""
    table = run.between[late].copy()
    rows = np.arange(len(late))
    own = table[rows, last[late]].copy()
    table[rows, last[late]] = np.nan
    beyond = own - np.nanmedian(table, axis=1)
    beyond[:, list(WAITS)] = -np.inf
    times = np.bincount(beyond.argmax(axis=1), minlength=phases.COUNT)
    return int(times.argmax()), float(times.max() / len(late))


def _two_levels(run: SteadySteps, late: NDArray[np.int64], last: NDArray[np.int64], phase: int) -> bool:
    """Return whether that phase is either short or long, rather than in between: a fault, not jitter."""
    chosen = np.zeros(run.between.shape[:2], dtype=bool)
    chosen[late, last[late]] = True
    times = run.between[:, :, phase]
    short, long = times[~chosen], times[chosen]
    return statistics.median(long) - statistics.median(short) > _LEVELS_APART * statistics.mad(short)


def _by_turns(run: SteadySteps, phase: int, excess: float, turns: Floats, often: float) -> Finding:
    part = run.share_of_step(excess)
    mostly = [column for column in range(len(turns)) if turns[column] >= 0.5 / len(turns)]
    first = int(np.argmax(turns))
    saved = f"a step would take {seconds(run.step_without(excess))} instead of {seconds(run.mean_step)}"
    said = f"{seconds(excess)} ({share(part)} of a step) behind {_the_others(run)}, {DOING[phase]}"
    alone = float(turns[first]) >= 1.0 - _OTHER_TURN
    columns = [first] if alone else mostly
    if alone:
        who = run.who(columns)
        summary = f"{_capital(who)} is {said}, in {share(often)} of the steps."
        action = f"{_ADVICE[phase].format(who=who)}: {saved}."
    else:
        when = "every step" if often > 0.995 else f"{share(often)} of the steps"
        summary = f"In {when} one rank is {said}; it is another one each time ({run.who(columns)})."
        action = f"{_TURNS_ADVICE.get(phase, _EQUAL_WORK)}: {saved}."
    return Finding(
        kind=KINDS[phase] if alone else "alternating_straggler",
        severity="warning",
        summary=summary,
        action=action,
        phase=phases.NAMES[phase],
        ranks=run.ranks_at(columns),
        hosts=run.hosts_at(columns),
        cost=part,
        evidence={
            "step": run.mean_step,
            "excess": excess,
            "share": part,
            "late_in": often,
            "turns": {str(rank): float(turn) for rank, turn in zip(run.steps.ranks, turns, strict=True)},
        },
    )
