"""Time from the start of the script to the first optimizer step, compared with one bare process, torchrun and Ray
Train.

The clock starts just before the interpreter is started and stops when the slowest rank has done its first
``optimizer.step()``. Every launcher trains the same tiny model (``launch_scripts/``, which can be run manually) and
then exits; the next one begins when all its processes are gone.

The limit is the bare process: no launcher reaches the first step before one interpreter has imported torch
and built one optimizer.
"""

from __future__ import annotations

import sys
import tempfile
from compileall import compile_dir
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from child_process import run_to_end
from harness import (
    Bound,
    Contender,
    MeasurementFailed,
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

SCRIPTS = Path(__file__).resolve().parent / "launch_scripts"
REPETITIONS, QUICK_REPETITIONS = 7, 2
TIMEOUT_SECONDS = 180.0
#: Seconds for Powertrain's processes to exit. Peers get longer: the next launcher needs the machine to itself.
OUR_GRACE_SECONDS, PEER_GRACE_SECONDS = 5.0, 20.0

BARE = "one bare process"
TORCHRUN_2, TORCHRUN_8 = "torchrun, 2 workers", "torchrun, 8 workers"
RAY_2 = "Ray Train, 2 workers"
OURS_2, OURS_8 = "Powertrain, 2 workers", "Powertrain, 8 workers"

#: The claims of the issue: Powertrain takes at most this share of the named peer's time.
BOUNDS = (
    (OURS_2, 1.20, BARE),
    (OURS_2, 0.75, TORCHRUN_2),
    (OURS_2, 0.15, RAY_2),
    (OURS_8, 0.30, TORCHRUN_8),
)


@dataclass(frozen=True)
class Launcher:
    """A launcher of the training function; the output directory goes between command and arguments."""

    name: str
    workers: int
    requires: tuple[str, ...]
    command: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    ours: bool = False


def torchrun(name: str, workers: int) -> Launcher:
    """Return torchrun's command for one node; ``-m torch.distributed.run`` is the same program."""
    options = ("--standalone", f"--nproc-per-node={workers}")
    command = (sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPTS / "with_torchrun.py"))
    return Launcher(name, workers, ("torch",), command)


def powertrain(name: str, workers: int) -> Launcher:
    """Return Powertrain's launcher: a plain Python script."""
    command = (sys.executable, str(SCRIPTS / "with_powertrain.py"))
    return Launcher(name, workers, ("torch", "powertrain"), command, (str(workers),), ours=True)


#: Ordered so that compared launchers are neighbours.
LAUNCHERS = (
    Launcher(RAY_2, 2, ("torch", "ray"), (sys.executable, str(SCRIPTS / "with_ray_train.py")), ("2",)),
    Launcher(BARE, 1, ("torch",), (sys.executable, str(SCRIPTS / "bare_process.py"))),
    powertrain(OURS_2, 2),
    torchrun(TORCHRUN_2, 2),
    torchrun(TORCHRUN_8, 8),
    powertrain(OURS_8, 8),
)


@dataclass(frozen=True)
class Launch:
    """One launch: the time of each rank's first step, and leftovers of the program."""

    seconds_of_rank: tuple[float, ...]
    left_behind: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Seconds until the slowest rank's first step."""
        return max(self.seconds_of_rank)


def launch_once(launcher: Launcher) -> Launch:
    """Launch once, wait for all processes to exit, and read the ranks' files."""
    with tempfile.TemporaryDirectory(prefix="ptb-") as directory:
        workspace = Path(directory)
        steps = workspace / "steps"
        steps.mkdir()
        ended = run_to_end(
            (*launcher.command, str(steps), *launcher.arguments),
            workspace=workspace,
            timeout=TIMEOUT_SECONDS,
            grace=OUR_GRACE_SECONDS if launcher.ours else PEER_GRACE_SECONDS,
        )
        seconds = tuple(float(file.read_text()) for file in sorted(steps.glob("rank-*")))
    if len(seconds) != launcher.workers:
        raise MeasurementFailed(
            f"{len(seconds)} of {launcher.workers} ranks wrote the time of their first step."
        )
    # A peer's files (Ray keeps its session's logs) are not an error; a remaining process always is.
    return Launch(seconds, ended.left_behind if launcher.ours else ended.left_processes)


def rows_of(rounds: Rounds[Launch]) -> list[Row]:
    """Return one row per launcher, with Powertrain's ratio at the same number of workers."""
    bare = median(rounds.numbers(BARE, lambda launch: launch.seconds))
    limit = "" if bare is None else f"bare process {bare:.2f} s"
    rows = []
    for launcher in sorted(LAUNCHERS, key=lambda one: (one.workers == 8, one.ours, one.workers)):
        numbers = rounds.numbers(launcher.name, lambda launch: launch.seconds)
        ours = rounds.numbers(OURS_8 if launcher.workers == 8 else OURS_2, lambda launch: launch.seconds)
        ratio = None if launcher.ours else median_ratio(ours, numbers)
        rows.append(Row("launch to first step", launcher.name, "s", numbers, ratio, limit))
    return rows


def bounds_of(rounds: Rounds[Launch]) -> list[Bound]:
    """Return the issue's bounds, and the bound that Powertrain leaves nothing behind."""
    seconds = {one.name: rounds.numbers(one.name, lambda launch: launch.seconds) for one in LAUNCHERS}
    bounds = [
        Bound(f"{ours} / {theirs}", median_ratio(seconds[ours], seconds[theirs]), at_most=share)
        for ours, share, theirs in BOUNDS
    ]
    launches = [one for name in (OURS_2, OURS_8) for one in rounds.measured[name] if one is not None]
    left = sum(len(one.left_behind) for one in launches) if launches else None
    return [*bounds, Bound("Powertrain: processes, files, sockets left behind", left, at_most=0)]


def compile_ours() -> None:
    """Byte-compile the package, as installing a wheel does; the peers were installed that way."""
    for folder in find_spec("powertrain").submodule_search_locations:
        compile_dir(folder, quiet=2)


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options("Time from the start of the script to the first optimizer step.")
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    compile_ours()
    contenders = [Contender(one.name, one.requires, partial(launch_once, one)) for one in LAUNCHERS]
    rounds = interleave(contenders, repetitions, warm_up=not options.quick)
    outcome = Outcome(
        title=f"Start of the script to the first optimizer step, {repetitions} x interleaved",
        repetitions=repetitions,
        rows=rows_of(rounds),
        bounds=bounds_of(rounds),
        missing=rounds.missing,
        failures=rounds.failures,
        notes=things_left(rounds),
        samples={
            name: [None if one is None else one.seconds_of_rank for one in launches]
            for name, launches in rounds.measured.items()
        },
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
