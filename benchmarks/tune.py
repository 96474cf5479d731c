"""Cost of a trial of a sweep: 64 trivial ones of 5 reports each, 2 at a time, compared with Ray Tune and Optuna.

Each contender runs in its own process; a trial of Powertrain and of Ray Tune is a process, one of Optuna's a call in a
thread. The limit is a bare fork of a process that has torch loaded. Then Powertrain runs 2,000 trials in one sweep, to
measure the growth of the driver's memory after the first 200, and whether late trials take longer than early ones.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    Bound,
    Contender,
    MeasurementFailed,
    Outcome,
    Row,
    conclude,
    interleave,
    median,
    median_ratio,
    parse_options,
)

SCRIPTS = Path(__file__).resolve().parent / "tune_scripts"
OURS, RAY, OPTUNA, LIMIT = "powertrain.tune", "Ray Tune", "Optuna (threads)", "bare fork"
CONTENDERS = {
    OURS: ("with_powertrain.py", "powertrain"),
    RAY: ("with_ray_tune.py", "ray"),
    OPTUNA: ("with_optuna.py", "optuna"),
    LIMIT: ("bare_forks.py", "torch"),
}
REPETITIONS, QUICK_REPETITIONS = 3, 1
TRIALS, QUICK_TRIALS = 64, 16
LONG_TRIALS, QUICK_LONG_TRIALS = 2000, 400
SETTLED = 200
TIMEOUT_SECONDS = 1500.0
#: The claims of the issue.
RATIO_AT_MOST = 0.05
GROWTH_AT_MOST_MB = 20.0
SHOW_AT_MOST_SECONDS = 1.0
#: "A constant time per trial", as a number: the last 200 beside the first 200, on a machine whose speed varies.
SLOWING_AT_MOST = 1.25


def run_script(script: str, directory: str, trials: int) -> dict[str, Any]:
    """Run one script to its end; return what it printed last."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), directory, str(trials)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    if done.returncode:
        raise MeasurementFailed(f"{script} ended with {done.returncode}: {done.stderr[-1500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def seconds_per_trial(script: str, trials: int) -> float:
    """Seconds of a whole sweep, divided by its trials."""
    with tempfile.TemporaryDirectory() as directory:
        return float(run_script(script, directory, trials)["seconds"]) / trials


def measure_long_sweep(trials: int) -> dict[str, float]:
    """Run one long sweep of Powertrain; return memory growth, early and late seconds per trial, and those of
    ``show``.
    """
    with tempfile.TemporaryDirectory() as directory:
        found = run_script("with_powertrain.py", directory, trials)
        began = time.monotonic()
        subprocess.run(
            [str(Path(sys.executable).with_name("powertrain")), "show", f"{directory}/sweep"],
            check=True,
            capture_output=True,
        )
        show = time.monotonic() - began
    ends, memory = found["ends"], found["memory"]
    return {
        "growth": max(memory[SETTLED:]) - statistics.median(memory[SETTLED - 20 : SETTLED]),
        "early": (ends[SETTLED - 1] - ends[0]) / (SETTLED - 1),
        "late": (ends[-1] - ends[-SETTLED]) / (SETTLED - 1),
        "show": show,
    }


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options(__doc__.splitlines()[0])
    repetitions, trials, long = (
        (QUICK_REPETITIONS, QUICK_TRIALS, QUICK_LONG_TRIALS)
        if options.quick
        else (REPETITIONS, TRIALS, LONG_TRIALS)
    )
    contenders = [
        Contender(name, (module,), partial(seconds_per_trial, script, trials))
        for name, (script, module) in CONTENDERS.items()
    ]
    rounds = interleave(contenders, repetitions, warm_up=not options.quick)
    ours, what = rounds.measured[OURS], f"seconds per trial ({trials} trials)"
    rows = [
        Row(
            what,
            name,
            "s",
            rounds.measured[name],
            None if name == OURS else median_ratio(ours, rounds.measured[name]),
        )
        for name in CONTENDERS
    ]
    found = measure_long_sweep(long)
    rows += [
        Row(f"sweep of {long} trials", "memory after the first 200", "MB", [found["growth"]], None),
        Row(f"sweep of {long} trials", "first 200, per trial", "s", [found["early"]], None),
        Row(f"sweep of {long} trials", "last 200, per trial", "s", [found["late"]], None),
        Row(f"sweep of {long} trials", "powertrain show", "s", [found["show"]], None),
    ]
    bounds = [
        Bound("a trial / Ray Tune's", median_ratio(ours, rounds.measured[RAY]), at_most=RATIO_AT_MOST),
        Bound("MB that the driver grows by", found["growth"], at_most=GROWTH_AT_MOST_MB),
        Bound("a late trial / an early one", found["late"] / found["early"], at_most=SLOWING_AT_MOST),
        Bound("seconds of powertrain show", found["show"], at_most=SHOW_AT_MOST_SECONDS),
    ]
    samples = {"seconds per trial": dict(rounds.measured), "long sweep": found}
    outcome = Outcome("Sweeps", repetitions, rows, bounds, rounds.missing, rounds.failures, samples=samples)
    outcome.notes.append(f"the limit, a bare fork: {median(rounds.measured[LIMIT]) or 0:.4f} s")
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
