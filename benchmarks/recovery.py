"""Time from the death of a rank to the first new step, compared with torchrun and Ray Train.

Two ranks train a small model with steps of about 20 ms and a checkpoint every 20 steps (``recovery_scripts/``). After
its 30th step rank 1 is killed with SIGKILL, from outside; the clock stops when the slowest rank has made its first
optimizer step in a new process. The user's setup is included, and also printed separately: from the entry of the
training function to that step (model, process group's first use, optimizer, checkpoint read, one step of 20 ms).

The limit is two bare forks: a process that has torch loaded forks two ranks, they form a process group and train.
No death has to be detected there, and no checkpoint is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from harness import (
    Bound,
    Contender,
    Outcome,
    Rounds,
    Row,
    conclude,
    interleave,
    median,
    median_ratio,
    parse_options,
    things_left,
)
from launch import compile_ours
from recovery_scripts.conducted import (
    BARE_FORKS,
    POWERTRAIN,
    RANKS,
    RAY,
    TORCHRUN,
    TORCHRUN_NOTE,
    Conductor,
    Launcher,
    conduct,
    first_step_of_new_process,
)

REPETITIONS, QUICK_REPETITIONS = 7, 2
TIMEOUT_SECONDS = 180.0
VICTIM, KILLED_AFTER_STEP = 1, 30

#: The claims of the issue: Powertrain takes at most this share of the named peer's time, and at most this many seconds
#: more than the user's own setup.
BOUNDS = ((1 / 10, TORCHRUN), (1 / 30, RAY))
AT_MOST_BEYOND_SET_UP = 0.5
#: Ordered so that compared launchers are neighbours.
LAUNCHERS = (RAY, POWERTRAIN, TORCHRUN, BARE_FORKS)


@dataclass(frozen=True)
class Recovery:
    """One recovery, in seconds: kill to the slowest rank's first new step, and that rank's setup within it."""

    seconds: float
    set_up: float
    redone_steps: int
    left_behind: tuple[str, ...]

    @property
    def beyond_set_up(self) -> float:
        return self.seconds - self.set_up


def recover_once(launcher: Launcher, killed_after: int = KILLED_AFTER_STEP) -> Recovery:
    """Start, kill rank 1 after its step, wait for the first new step of both, and end."""
    kill_and_wait = partial(_kill_and_wait, killed_after=killed_after)
    conducted = conduct(launcher, _begin_anew if launcher is BARE_FORKS else kill_and_wait, TIMEOUT_SECONDS)
    moment = conducted.found
    new = [first_step_of_new_process(conducted.diaries[rank], moment) for rank in RANKS]
    came_back = [one for one in new if one is not None]
    entered, stepped = max(came_back, key=lambda one: one[1].at)
    done = max((entry.step for entry in conducted.diaries[VICTIM] if entry.at <= moment), default=0)
    return Recovery(
        seconds=stepped.at - moment,
        set_up=stepped.at - entered.at,
        redone_steps=max(0, done - stepped.step + 1),
        left_behind=conducted.left_behind,
    )


def _kill_and_wait(conductor: Conductor, killed_after: int) -> float:
    """Kill the victim after its step; return the time. The run ends once both ranks train again."""

    def has_come_far_enough() -> bool | None:
        return any(entry.step >= killed_after for entry in conductor.steps(VICTIM)) or None

    conductor.await_(f"step {killed_after} of rank {VICTIM}", has_come_far_enough)
    moment = conductor.kill(VICTIM)
    for rank in RANKS:
        conductor.await_(
            f"the first new step of rank {rank}",
            lambda rank=rank: first_step_of_new_process(conductor.diary(rank), moment),
        )
    conductor.end()
    return moment


def _begin_anew(conductor: Conductor) -> float:
    """Do the same with bare forks: return the time of the first fork."""
    for rank in RANKS:
        conductor.await_(f"the first step of rank {rank}", lambda rank=rank: conductor.steps(rank) or None)
    conductor.end()
    return conductor.diary(RANKS[0])[0].at


def rows_of(rounds: Rounds[Recovery]) -> list[Row]:
    """Return two rows per launcher: the total, and the user's own setup."""
    ours = rounds.numbers(POWERTRAIN.name, lambda one: one.seconds)
    least = median(rounds.numbers(BARE_FORKS.name, lambda one: one.seconds))
    limit = "" if least is None else f"two bare forks {least:.2f} s"
    rows = []
    for launcher in (POWERTRAIN, TORCHRUN, RAY):
        seconds = rounds.numbers(launcher.name, lambda one: one.seconds)
        ratio = None if launcher is POWERTRAIN else median_ratio(ours, seconds)
        rows.append(Row("kill to first new step", launcher.name, "s", seconds, ratio, limit))
    for launcher in (POWERTRAIN, TORCHRUN, RAY, BARE_FORKS):
        set_up = rounds.numbers(launcher.name, lambda one: one.set_up)
        rows.append(Row("of it the user's set-up", launcher.name, "s", set_up))
    beyond = rounds.numbers(POWERTRAIN.name, lambda one: one.beyond_set_up)
    return [*rows, Row("beyond set-up", POWERTRAIN.name, "s", beyond)]


def bounds_of(rounds: Rounds[Recovery]) -> list[Bound]:
    """Return the issue's bounds, and the bound that Powertrain leaves nothing behind."""
    seconds = {one.name: rounds.numbers(one.name, lambda one: one.seconds) for one in LAUNCHERS}
    ours = seconds[POWERTRAIN.name]
    bounds = [
        Bound(f"{POWERTRAIN.name} / {theirs.name}", median_ratio(ours, seconds[theirs.name]), at_most=share)
        for share, theirs in BOUNDS
    ]
    beyond = median(rounds.numbers(POWERTRAIN.name, lambda one: one.beyond_set_up))
    left = [len(one.left_behind) for one in rounds.measured[POWERTRAIN.name] if one is not None]
    return [
        *bounds,
        Bound(f"{POWERTRAIN.name}: seconds beyond the set-up", beyond, at_most=AT_MOST_BEYOND_SET_UP),
        Bound("Powertrain: processes, files, sockets left behind", sum(left) if left else None, at_most=0),
    ]


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options("Time from the death of a rank to the first new optimizer step.")
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    compile_ours()
    contenders = [Contender(one.name, one.requires, partial(recover_once, one)) for one in LAUNCHERS]
    rounds = interleave(contenders, repetitions, warm_up=not options.quick)
    outcome = Outcome(
        title=f"Death of a rank to the first new optimizer step, {repetitions} x interleaved",
        repetitions=repetitions,
        rows=rows_of(rounds),
        bounds=bounds_of(rounds),
        missing=rounds.missing,
        failures=rounds.failures,
        notes=[TORCHRUN_NOTE, *things_left(rounds)],
        samples={
            name: [None if one is None else vars(one) for one in recoveries]
            for name, recoveries in rounds.measured.items()
        },
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
