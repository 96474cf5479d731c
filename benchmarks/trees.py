"""Comparison of this checkout with another one of Powertrain, to find performance regressions.

Takes Powertrain's own measurements of ``launch.py``, ``report.py``, ``recovery.py`` and ``metrics_store.py``, without
their peers, with the two checkouts interleaved. Give the other one by its directory, such as a worktree of an earlier
commit: ``python benchmarks/trees.py --base ../before``. The limit of every figure is the other checkout's.

The environment must let ``PYTHONPATH`` choose the package, as an editable install does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import launch
import metrics_store
import recovery
import report
from harness import (
    Bound,
    Contender,
    Outcome,
    Row,
    conclude,
    interleave,
    median_ratio,
    parse_options,
)
from recovery_scripts.conducted import POWERTRAIN

HERE = Path(__file__).resolve().parent.parent
THIS, OTHER = "this checkout", "the other checkout"
#: How much slower than the other checkout a figure may be.
AT_MOST = 1.03
POINTS, QUICK_POINTS = 1_000_000, 100_000


@dataclass(frozen=True)
class Figure:
    """One number of Powertrain, lower is better, and how often each checkout is measured for it."""

    what: str
    unit: str
    measure: Callable[[], float]
    repetitions: int


def launch_seconds(workers: int) -> float:
    return launch.launch_once(launch.powertrain("", workers)).seconds


def report_microseconds() -> float:
    reporting, _ = report.run_script(report.OUR_SCRIPT, 20_000, 1e-4)
    return report.cost_of_call(reporting, 0.5)


def recovery_seconds() -> float:
    return recovery.recover_once(POWERTRAIN).seconds


def seconds_to_write(points: int) -> float:
    return metrics_store.measure("with_powertrain.py", points).write_seconds


def milliseconds_to_view(points: int) -> float:
    return metrics_store.view_milliseconds(metrics_store.measure("with_powertrain.py", points))


def figures(quick: bool, repetitions: int) -> list[Figure]:
    """Return all figures to compare."""
    points, often = (QUICK_POINTS, 2) if quick else (POINTS, repetitions)
    return [
        Figure("launch to first step, 2 workers", "s", partial(launch_seconds, 2), often),
        Figure("one report()", "us", report_microseconds, often),
        Figure("kill to first new step", "s", recovery_seconds, often),
        Figure(f"writing {points:,} points", "s", partial(seconds_to_write, points), often),
        Figure(f"{points:,} points to 1,000 pixels", "ms", partial(milliseconds_to_view, points), often),
    ]


@contextmanager
def package_of(checkout: Path) -> Iterator[None]:
    """Make processes started inside the block import the package of ``checkout``."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(checkout / "src")
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def measure_in(checkout: Path, figure: Figure) -> float:
    with package_of(checkout):
        return figure.measure()


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--base", type=Path, help="the directory of the other checkout")
    parser.add_argument("--repetitions", type=int, default=15, help="rounds of each figure")
    parsed, rest = parser.parse_known_args()
    options = parse_options("This checkout beside another one (--base DIRECTORY).", rest)
    if parsed.base is None:
        print("Nothing is compared: give the directory of another checkout with --base.")
        return 0
    if not (parsed.base / "src" / "powertrain").is_dir():
        parser.error(f"--base {parsed.base}: there is no src/powertrain in it. Give the root of a checkout.")
    # Without cached bytecode every process compiles the package, and more source would look like slower code.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    rows, bounds, failures, samples = [], [], [], {}
    for figure in figures(options.quick, parsed.repetitions):
        contenders = [
            Contender(name, ("powertrain",), partial(measure_in, checkout, figure))
            for name, checkout in ((THIS, HERE), (OTHER, parsed.base.resolve()))
        ]
        rounds = interleave(contenders, figure.repetitions, warm_up=True)
        ours, theirs = rounds.measured[THIS], rounds.measured[OTHER]
        ratio = median_ratio(ours, theirs)
        rows += [
            Row(figure.what, THIS, figure.unit, ours),
            Row(figure.what, OTHER, figure.unit, theirs, ratio),
        ]
        bounds.append(Bound(f"{figure.what}: {THIS} / {OTHER}", ratio, at_most=AT_MOST))
        failures += rounds.failures
        samples[figure.what] = dict(rounds.measured)
    outcome = Outcome("This checkout beside another", 0, rows, bounds, (), failures, samples=samples)
    return conclude(outcome, options)


if __name__ == "__main__":
    sys.exit(main())
