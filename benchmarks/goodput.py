"""Useful steps under a death every 15 s, over those of the same function without one, torchrun's beside it.

Two ranks train a small model with steps of about 20 ms and a checkpoint every 20 steps (``recovery_scripts/``). In the
faulty blocks a random rank (the same sequence for both launchers) is killed with SIGKILL every 15 s for 3 minutes,
counted from the first step. Useful steps are those that count in the end: a step that was done, lost and repeated
counts once. The fault-free block of the same launcher, equally long, is the reference.

The loss has two parts: steps since the newest checkpoint, which are repeated, and the time from a death to the first
new step. The limit is 1: deaths make no launcher faster.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from harness import Bound, Contender, Outcome, Rounds, Row, conclude, interleave, parse_options, worst
from launch import compile_ours
from recovery_scripts.conducted import (
    POWERTRAIN,
    RANKS,
    TORCHRUN,
    TORCHRUN_NOTE,
    Conductor,
    Launcher,
    conduct,
    first_step_of_new_process,
)
from recovery_scripts.diary import STEPPED, Entry

KILL_EVERY_SECONDS = 15.0
SECONDS, QUICK_SECONDS = 180.0, 45.0
#: Extra time for the start, the end, and a slow restart.
EXTRA_SECONDS = 120.0
SEED = 20
AT_LEAST = 0.94
LAUNCHERS = (POWERTRAIN, TORCHRUN)


@dataclass(frozen=True)
class Kill:
    """One death: its rank and time."""

    rank: int
    at: float


@dataclass(frozen=True)
class Show:
    """The conductor's record: the first step of the slowest rank, the end, the deaths between."""

    begin: float
    end: float
    kills: tuple[Kill, ...]


@dataclass(frozen=True)
class Block:
    """One block of training: useful steps, repeated steps, seconds from each death to the first new step."""

    seconds: float
    useful_steps: int
    redone_steps: tuple[int, ...]
    restart_seconds: tuple[float, ...]
    left_behind: tuple[str, ...]


def train_for(launcher: Launcher, seconds: float, kill_every: float | None) -> Block:
    """Train for a duration, with deaths or without."""
    conducted = conduct(launcher, partial(_let_train, seconds, kill_every), seconds + EXTRA_SECONDS)
    show, diaries = conducted.found, conducted.diaries
    losses = [_loss(diaries, kill) for kill in show.kills]
    return Block(
        seconds=seconds,
        useful_steps=min(_newest_step(diaries[rank], show.end) for rank in RANKS),
        redone_steps=tuple(redone for redone, _ in losses),
        restart_seconds=tuple(restart for _, restart in losses),
        left_behind=conducted.left_behind,
    )


def _let_train(seconds: float, kill_every: float | None, conductor: Conductor) -> Show:
    """Kill ranks and end the run on schedule. A rank that is being restarted is killed once it trains."""
    firsts = [
        conductor.await_(
            f"the first step of rank {rank}", lambda rank=rank: conductor.steps(rank)[:1] or None
        )
        for rank in RANKS
    ]
    begin = max(first[0].at for first in firsts)
    lots = random.Random(SEED)
    kills = []
    for number in range(1, math.ceil(seconds / kill_every) if kill_every else 1):
        conductor.wait_until(begin + number * (kill_every or 0.0))
        rank = lots.choice(RANKS)
        kills.append(Kill(rank, conductor.kill(rank)))
    conductor.wait_until(begin + seconds)
    conductor.end()
    return Show(begin, begin + seconds, tuple(kills))


def _newest_step(entries: Sequence[Entry], moment: float) -> int:
    """Return the current step of a rank: after a restart it may be lower than before."""
    return next((e.step for e in reversed(entries) if e.kind == STEPPED and e.at <= moment), 0)


def _loss(diaries: dict[int, list[Entry]], kill: Kill) -> tuple[int, float]:
    """Return the cost of one death: repeated steps, and seconds until the slowest rank's first new step."""
    before = max(_newest_step(diaries[rank], kill.at) for rank in RANKS)
    came_back = [first_step_of_new_process(diaries[rank], kill.at) for rank in RANKS]
    steps = [one[1] for one in came_back if one is not None]
    if not steps:
        return 0, 0.0
    slowest = max(steps, key=lambda step: step.at)
    return max(0, before - slowest.step + 1), slowest.at - kill.at


def name_of(launcher: Launcher, faulty: bool) -> str:
    return f"{launcher.name}, {'a death every 15 s' if faulty else 'no deaths'}"


def goodput(rounds: Rounds[Block], launcher: Launcher) -> list[float | None]:
    """Return the ratio of useful steps to those without faults, one number per round."""
    faulty, fault_free = (rounds.measured[name_of(launcher, faulty)] for faulty in (True, False))
    return [
        a.useful_steps / b.useful_steps if a is not None and b is not None and b.useful_steps else None
        for a, b in zip(faulty, fault_free, strict=True)
    ]


def rows_of(rounds: Rounds[Block]) -> list[Row]:
    rows = []
    for launcher in LAUNCHERS:
        for faulty in (False, True):
            name = name_of(launcher, faulty)
            rows.append(Row("useful steps", name, "", rounds.numbers(name, lambda one: one.useful_steps)))
    ours = worst(goodput(rounds, POWERTRAIN), min)
    for launcher in LAUNCHERS:
        numbers = goodput(rounds, launcher)
        theirs = worst(numbers, min)
        ratio = ours / theirs if launcher is not POWERTRAIN and ours is not None and theirs else None
        rows.append(Row("goodput", launcher.name, "", numbers, ratio, "1"))
    return rows


def losses_in_words(rounds: Rounds[Block], launcher: Launcher) -> list[str]:
    """Return the parts of the loss, one sentence per round."""
    sentences = []
    blocks = zip(
        rounds.measured[name_of(launcher, True)], rounds.measured[name_of(launcher, False)], strict=True
    )
    for faulty, fault_free in blocks:
        if faulty is None or fault_free is None or not faulty.restart_seconds:
            continue
        deaths, possible = len(faulty.restart_seconds), fault_free.useful_steps
        restarts, redone = sum(faulty.restart_seconds), sum(faulty.redone_steps)
        lost = 1 - faulty.useful_steps / possible
        by_restarts, by_redoing = restarts / faulty.seconds, redone / possible
        sentences.append(
            f"{launcher.name} lost {lost:.2%} by {deaths} deaths: {by_restarts:.2%} waiting for the first new step "
            f"({restarts / deaths:.2f} s a death), {by_redoing:.2%} doing steps again ({redone / deaths:.1f} a death), "
            f"{lost - by_restarts - by_redoing:.2%} otherwise."
        )
    return sentences


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options("Useful steps under a death every 15 s, over those without.")
    seconds = QUICK_SECONDS if options.quick else SECONDS
    compile_ours()
    contenders = [
        Contender(
            name_of(launcher, faulty),
            launcher.requires,
            partial(train_for, launcher, seconds, KILL_EVERY_SECONDS if faulty else None),
        )
        for launcher in LAUNCHERS
        for faulty in (False, True)
    ]
    rounds = interleave(contenders, 1, warm_up=False)
    ours = [one for faulty in (True, False) for one in rounds.measured[name_of(POWERTRAIN, faulty)]]
    left = sorted({thing for one in ours if one is not None for thing in one.left_behind})
    measured = [one for one in ours if one is not None]
    outcome = Outcome(
        title=f"Useful steps of {seconds:.0f} s with a death every {KILL_EVERY_SECONDS:.0f} s, over those without",
        repetitions=1,
        rows=rows_of(rounds),
        bounds=[
            Bound(
                "Powertrain: useful steps / fault-free",
                worst(goodput(rounds, POWERTRAIN), min),
                at_least=AT_LEAST,
            ),
            Bound("Powertrain: things left behind", len(left) if measured else None, at_most=0),
        ],
        missing=rounds.missing,
        failures=rounds.failures,
        notes=[
            TORCHRUN_NOTE,
            *(sentence for launcher in LAUNCHERS for sentence in losses_in_words(rounds, launcher)),
            *(f"Powertrain left behind: {thing}" for thing in left),
        ],
        samples={
            name: [None if one is None else vars(one) for one in blocks]
            for name, blocks in rounds.measured.items()
        },
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
