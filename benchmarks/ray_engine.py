"""Powertrain's Ray engine beside Ray Train, on the same Ray: two launches, a restart after SIGKILL, and a report.

One Ray is started for the whole benchmark, in separate processes. Both sides run the same scripts as the benchmarks for
one machine, with 2 workers, as drivers that are connected to it (``ray_engine_scripts/connected.py``).

- Launch: from the construction of the trainer, all imports of the script done, to the slowest rank's first optimizer
  step. The limit is one bare process: an interpreter that imports torch and builds one optimizer.
- Second launch: the same of a second trainer in the same driver, such as a trial of a sweep.
- Restart: from the SIGKILL of rank 1 to the slowest rank's first new step, which follows the newest checkpoint. The
  limit is two bare forks that form a process group.
- Report: one ``report()`` without a checkpoint, timed on the training thread. Ray Train makes a handful, since each
  waits for its controller's next poll. The limit is a queue append.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import launch
import recovery
import report
from child_process import adopt_orphans, outlasting_programs
from harness import (
    Bound,
    Contender,
    Outcome,
    Rounds,
    Row,
    conclude,
    interleave,
    is_installed,
    median,
    median_ratio,
    parse_options,
    things_left,
)
from recovery_scripts import conducted

sys.path.append(str(Path(__file__).resolve().parent.parent))

SCRIPTS = Path(__file__).resolve().parent / "ray_engine_scripts"
CONNECTED, HEAD, TWICE = SCRIPTS / "connected.py", SCRIPTS / "head.py", SCRIPTS / "second_launch.py"
REPETITIONS, QUICK_REPETITIONS = 3, 1
CPUS = 4

#: The claims of the issue: Powertrain takes at most this share of Ray Train's time.
LAUNCH_AT_MOST, SECOND_LAUNCH_AT_MOST, RESTART_AT_MOST, REPORT_AT_MOST = 0.6, 0.05, 0.1, 0.001

#: Late enough for a checkpoint: Ray Train's controller may learn of that of step 20 only with the report of step 40.
KILLED_AFTER_STEP = 50

#: Our reports of each rank, and the seconds between two: a step is never much shorter.
REPORTS, GAP_SECONDS = 2_000, 0.001


@dataclass(frozen=True)
class Side:
    """One of the two sides: its script, and the script's imports."""

    name: str
    requires: tuple[str, ...]
    script: str
    modules: str
    is_ours: bool = False

    def through(self, address: str) -> tuple[str, ...]:
        """Return the command that runs the script on the Ray at ``address``."""
        return (str(CONNECTED), address, self.modules)


OURS = Side(
    "Powertrain on Ray", ("torch", "powertrain", "ray"), "with_powertrain.py", "torch,powertrain.torch", True
)
RAY = Side("Ray Train", ("torch", "ray"), "with_ray_train.py", "torch,ray.train.torch")


@dataclass(frozen=True)
class Comparison:
    """One comparison: its contenders are Ray Train, Powertrain and the limit.

    ``take`` extracts the number of a measurement.
    """

    what: str
    unit: str
    at_most: float
    contenders: tuple[Contender[Any], ...]
    take: Callable[[Any], float]
    warm_up: bool = False

    @property
    def limit(self) -> str:
        """The name of the limit."""
        return self.contenders[-1].name


@contextmanager
def ray_cluster() -> Iterator[str]:
    """Start a Ray with its defaults, in a separate process group. Yields its address."""
    from tests.ray_nodes import processes_of_ray

    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="ptb-") as directory:
        head = subprocess.Popen(
            [sys.executable, str(HEAD), str(CPUS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Its files, and its workers', are deleted with it; usage statistics are disabled.
            env={**os.environ, "TMPDIR": directory, "RAY_USAGE_STATS_ENABLED": "0"},
        )
        with head, outlasting_programs(lambda: {head.pid} | processes_of_ray(os.getpid())):
            yield _address(head)


def _address(head: subprocess.Popen[str]) -> str:
    """Return the address that the head prints once it has started."""
    assert head.stdout is not None
    for line in head.stdout:
        word, _, address = line.strip().partition(" ")
        if word == "address":
            return address
    raise SystemExit("Ray did not start, so there is nothing to measure on. What it printed stands above.")


def compare_launch(address: str, what: str, at_most: float, through: tuple[str, ...] = ()) -> Comparison:
    """Compare launches of the scripts, run by the script ``through`` where it is given. The warm-up consumes the idle
    workers of a new Ray, which would favour the first contender."""

    def launches(side: Side) -> Contender[launch.Launch]:
        command = (sys.executable, *side.through(address), *through, str(launch.SCRIPTS / side.script))
        launcher = launch.Launcher(side.name, 2, side.requires, command, ("2",), ours=side.is_ours)
        return Contender(side.name, side.requires, partial(launch.launch_once, launcher))

    bare = next(one for one in launch.LAUNCHERS if one.name == launch.BARE)
    limit = Contender(bare.name, bare.requires, partial(launch.launch_once, bare))
    return Comparison(
        what,
        "s",
        at_most,
        (launches(RAY), launches(OURS), limit),
        lambda one: one.seconds,
        warm_up=True,
    )


def compare_restart(address: str) -> Comparison:
    """Compare restarts as in ``recovery.py``: steps of 20 ms, a checkpoint every 20."""

    def restarts(side: Side) -> Contender[recovery.Recovery]:
        command = (sys.executable, *side.through(address), str(conducted.SCRIPTS / side.script))
        launcher = conducted.Launcher(side.name, side.requires, command, ours=side.is_ours)
        return Contender(
            side.name, side.requires, partial(recovery.recover_once, launcher, KILLED_AFTER_STEP)
        )

    forks = conducted.BARE_FORKS
    limit = Contender(forks.name, forks.requires, partial(recovery.recover_once, forks))
    return Comparison(
        "SIGKILL to first new step",
        "s",
        RESTART_AT_MOST,
        (restarts(RAY), restarts(OURS), limit),
        lambda one: one.seconds,
    )


def compare_report(address: str) -> Comparison:
    """Compare reports as in ``report.py``, at a low rate."""

    def reports(side: Side, count: int, gap: float) -> Contender[report.Reporting]:
        through = side.through(address)
        return Contender(
            side.name,
            side.requires,
            lambda: report.run_script(side.script, count, gap, through=through)[0],
        )

    limit = Contender(report.LIMIT, (), lambda: report.run_script("queue_append.py", REPORTS, GAP_SECONDS)[0])
    return Comparison(
        "one report(), median",
        "us",
        REPORT_AT_MOST,
        (reports(RAY, report.RAY_REPORTS, 0.0), reports(OURS, REPORTS, GAP_SECONDS), limit),
        partial(report.cost_of_call, share=0.5),
    )


def rows_of(comparison: Comparison, rounds: Rounds[Any]) -> list[Row]:
    """Return rows for Powertrain, Ray Train and the limit."""
    numbers = {
        name: rounds.numbers(name, comparison.take) for name in (OURS.name, RAY.name, comparison.limit)
    }
    least = median(numbers[comparison.limit])
    limit = "" if least is None else f"{comparison.limit} {least:.3g} {comparison.unit}"
    return [
        Row(
            comparison.what,
            name,
            comparison.unit,
            numbers[name],
            None if name == OURS.name else median_ratio(numbers[OURS.name], numbers[name]),
            limit,
        )
        for name in numbers
    ]


def bound_of(comparison: Comparison, rounds: Rounds[Any]) -> Bound:
    """Return the issue's bound."""
    ours, theirs = (rounds.numbers(name, comparison.take) for name in (OURS.name, RAY.name))
    return Bound(
        f"{comparison.what}: {OURS.name} / {RAY.name}", median_ratio(ours, theirs), at_most=comparison.at_most
    )


def nothing_left(all_rounds: list[Rounds[Any]]) -> Bound:
    """Return the bound that Powertrain leaves nothing behind, in all of its runs."""
    measured = [one for rounds in all_rounds for one in rounds.measured[OURS.name] if one is not None]
    left = sum(len(one.left_behind) for one in measured) if measured else None
    return Bound(f"{OURS.name}: processes, files, actors, placement groups left behind", left, at_most=0)


def outcome_of(comparisons: list[Comparison], all_rounds: list[Rounds[Any]], repetitions: int) -> Outcome:
    """Return all comparisons as one table."""
    pairs = list(zip(comparisons, all_rounds, strict=True))
    return Outcome(
        title=f"Powertrain and Ray Train on one Ray, 2 workers, {repetitions} x interleaved",
        repetitions=repetitions,
        rows=[row for pair in pairs for row in rows_of(*pair)],
        bounds=[*(bound_of(*pair) for pair in pairs), nothing_left(all_rounds)],
        missing=tuple(dict.fromkeys(name for rounds in all_rounds for name in rounds.missing)),
        failures=tuple(
            f"{comparison.what}: {failure}" for comparison, rounds in pairs for failure in rounds.failures
        ),
        notes=list(dict.fromkeys(note for rounds in all_rounds for note in things_left(rounds))),
        samples={
            comparison.what: {
                name: [None if one is None else asdict(one) for one in measured]
                for name, measured in rounds.measured.items()
            }
            for comparison, rounds in pairs
        },
    )


def measure(address: str, repetitions: int) -> Outcome:
    """Measure each comparison in turn, its contenders interleaved, on the Ray at ``address``."""
    comparisons = [
        compare_launch(address, "launch to first step", LAUNCH_AT_MOST),
        compare_launch(address, "second launch in one driver", SECOND_LAUNCH_AT_MOST, (str(TWICE),)),
        compare_restart(address),
        compare_report(address),
    ]
    all_rounds = [interleave(one.contenders, repetitions, one.warm_up) for one in comparisons]
    return outcome_of(comparisons, all_rounds, repetitions)


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options("Two launches, a restart and a report on Ray, beside Ray Train.")
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    launch.compile_ours()
    if is_installed("ray"):
        with ray_cluster() as address:
            outcome = measure(address, repetitions)
    else:
        outcome = measure("", repetitions)  # only the limits: both sides need Ray, and are named as missing
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
