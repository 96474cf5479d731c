"""Overhead of tracing on a step of 1 ms, and lost steps at 2,000 a second; compared with TraceML.

A usual loop (loader, copy, forward, loss, backward, optimizer) runs in blocks of 200 steps, traced and not by turns in
one process, so that whatever else the machine does meets both. What is added is the median over pairs of neighbouring
blocks of the difference of their medians; its 95 % bound is that of the pairs. Beside it stands the difference of their
means, without the longest of a hundred steps: in it is also what is done only every few steps; and the difference of
their 10th percentiles, which a machine that does other things too changes least.

Then small steps come at 2,000 a second, and those that were recorded are counted. Where there is a GPU, the same blocks
are made with steps of 5 ms on it, and since only some of those are timed there, the difference of the means counts.

The limit is two readings of the clock for each of seven phases.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
    percentile,
    worst,
)

SCRIPTS = Path(__file__).resolve().parent / "trace_scripts"
REPETITIONS, QUICK_REPETITIONS = 5, 1
TIMEOUT_SECONDS = 300.0
STEPS_OF_BLOCK = 200
#: As in trace_scripts/training.py, which this file does not load: it loads torch.
SETTLING_STEPS = 5

#: The claims of the issue.
STEP_SECONDS, STEPS = 0.001, 5000
ADDED_AT_MOST_MILLISECONDS = 0.03
P999_ADDED_AT_MOST_MILLISECONDS = 1.0
PACE, PACE_SECONDS, QUICK_PACE_SECONDS = 2000.0, 20.0, 4.0
LOST_AT_MOST = 0
#: Share of the requested rate: a late step is followed by the next immediately.
PACE_KEPT_AT_LEAST = 0.99
GPU_STEP_SECONDS = 0.005
ADDED_ON_GPU_AT_MOST = 0.01

OURS, TRACEML, LIMIT = "Powertrain", "TraceML", "two clock readings a phase"
ON_GPU = "Powertrain on a GPU"


@dataclass(frozen=True)
class Traced:
    """One program: nanoseconds of steps in pairs of blocks (not traced, traced), and what it made of a steady pace."""

    pairs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    made: int = 0
    kept: int = 0
    seconds: float = 1.0
    left_behind: tuple[str, ...] = ()

    def added(self) -> list[float]:
        """Return the added milliseconds per step, for each pair of blocks."""
        return [(statistics.median(on) - statistics.median(off)) / 1e6 for off, on in self.pairs]

    @property
    def added_median(self) -> float:
        return statistics.median(self.added())

    @property
    def added_on_average(self) -> float:
        return statistics.median((usual_mean(on) - usual_mean(off)) / 1e6 for off, on in self.pairs)

    @property
    def added_to_quick_steps(self) -> float:
        """Milliseconds between the 10th percentiles, of steps that nothing else on the machine has disturbed."""
        off, on = ([taken for pair in self.pairs for taken in pair[kind]] for kind in (0, 1))
        return (percentile(on, 0.1) - percentile(off, 0.1)) / 1e6

    @property
    def step(self) -> float:
        """Milliseconds of a step that is not traced."""
        return statistics.median(taken for off, _ in self.pairs for taken in off) / 1e6

    @property
    def p999_added(self) -> float:
        """Milliseconds between the 99.9th percentiles of traced steps and of others."""
        off, on = ([taken for pair in self.pairs for taken in pair[kind]] for kind in (0, 1))
        return (percentile(on, 0.999) - percentile(off, 0.999)) / 1e6

    @property
    def a_second(self) -> float:
        return self.made / self.seconds


def usual_mean(numbers: Sequence[float]) -> float:
    """Without the longest of a hundred, which are the machine's."""
    ordered = sorted(numbers)
    return statistics.fmean(ordered[: max(1, len(ordered) - math.ceil(len(ordered) / 100))])


def bound_of_median(numbers: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median: order statistics, no assumption about their distribution."""
    ordered, count = sorted(numbers), len(numbers)
    reach = 0.98 * count**0.5
    return ordered[max(0, int(count / 2 - reach))], ordered[min(count - 1, int(count / 2 + reach))]


def settings_of(is_quick: bool, device: str = "cpu") -> dict[str, Any]:
    is_cpu = device == "cpu"
    return {
        "device": device,
        "step_seconds": STEP_SECONDS if is_cpu else GPU_STEP_SECONDS,
        "blocks": (STEPS // STEPS_OF_BLOCK if is_cpu else 10) // (5 if is_quick else 1),
        "steps": STEPS_OF_BLOCK,
        "settling": SETTLING_STEPS,
        "pace": PACE,
        "pace_seconds": (QUICK_PACE_SECONDS if is_quick else PACE_SECONDS) if is_cpu else 0.0,
    }


def measure_ours(settings: dict[str, Any]) -> Traced:
    """Measure Powertrain's tracing, in a separate process."""
    with tempfile.TemporaryDirectory(prefix="ptb-") as directory:
        workspace = Path(directory)
        command = (sys.executable, str(SCRIPTS / "with_powertrain.py"), str(workspace), json.dumps(settings))
        ended = run_to_end(command, workspace=workspace, timeout=TIMEOUT_SECONDS, grace=5.0)
        answer = json.loads((workspace / "answer.json").read_text())
    expected = settings["blocks"] * (STEPS_OF_BLOCK + SETTLING_STEPS)
    if answer["turns"]["recorded"] != expected:
        raise MeasurementFailed(
            f"{answer['turns']['recorded']} of {expected} traced steps were recorded: what was measured is not tracing."
        )
    return Traced(left_behind=ended.left_behind, **_told(answer))


def measure_traceml(settings: dict[str, Any]) -> Traced:
    """Measure TraceML's tracing, started by its own launcher with its summary mode."""
    with tempfile.TemporaryDirectory(prefix="ptb-") as directory:
        workspace = Path(directory)
        os.environ["TRACED_DIRECTORY"] = str(workspace)
        os.environ["TRACED_SETTINGS"] = json.dumps(settings)
        script = str(SCRIPTS / "with_traceml.py")
        options = ("run", "--mode", "summary", "--logs-dir", str(workspace / "logs"), script)
        command = (sys.executable, "-m", "traceml_ai.launcher.cli", *options)
        ended = run_to_end(command, workspace=workspace, timeout=TIMEOUT_SECONDS, grace=20.0)
        answer = json.loads((workspace / "answer.json").read_text())
        answer["pace"]["kept"] = _steps_of_traceml(workspace / "logs") - answer["pace"].pop("before")
    return Traced(left_behind=ended.left_processes, **_told(answer))


def _told(answer: dict[str, Any]) -> dict[str, Any]:
    pairs = tuple((tuple(off), tuple(on)) for off, on in answer["turns"]["pairs"])
    return {"pairs": pairs, **answer["pace"]}


def _steps_of_traceml(logs: Path) -> int:
    """Return the number of steps in its session's database."""
    (found,) = logs.glob("*/aggregator/telemetry")
    connection = sqlite3.connect(found)
    try:
        return int(connection.execute("select count(distinct step) from step_time_samples").fetchone()[0])
    finally:
        connection.close()


def measure_limit() -> Traced:
    """Measure two clock readings for each phase, in blocks like the others."""

    def block(readings: int) -> tuple[int, ...]:
        taken = []
        for _ in range(STEPS_OF_BLOCK):
            began = time.perf_counter_ns()
            for _ in range(readings):
                time.perf_counter_ns()
            taken.append(time.perf_counter_ns() - began)
        return tuple(taken)

    return Traced(tuple((block(0), block(14)) for _ in range(STEPS // STEPS_OF_BLOCK)))


def contenders(is_quick: bool) -> list[Contender[Traced]]:
    settings = settings_of(is_quick)
    found = [
        Contender(OURS, (), partial(measure_ours, settings)),
        Contender(TRACEML, ("traceml_ai",), partial(measure_traceml, settings)),
        Contender(LIMIT, (), measure_limit),
    ]
    if has_gpu():
        found.append(Contender(ON_GPU, (), partial(measure_ours, settings_of(is_quick, "cuda"))))
    return found


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def rows_of(rounds: Rounds[Traced]) -> list[Row]:
    names = [OURS, TRACEML, LIMIT, *([ON_GPU] if has_gpu() else [])]
    added = {name: rounds.numbers(name, lambda one: one.added_median) for name in names}
    rows = [
        Row(
            "added to a step",
            name,
            "ms",
            added[name],
            ratio=None if name in (OURS, ON_GPU) else median_ratio(added[OURS], added[name]),
        )
        for name in names
    ]
    measured = [name for name in names if name != LIMIT]
    rows += [
        Row("added on average", name, "ms", rounds.numbers(name, lambda one: one.added_on_average))
        for name in measured
    ]
    rows += [
        Row(
            "added to the quickest 10 %",
            name,
            "ms",
            rounds.numbers(name, lambda one: one.added_to_quick_steps),
        )
        for name in measured
    ]
    rows += [
        Row("step, not traced", name, "ms", rounds.numbers(name, lambda one: one.step)) for name in measured
    ]
    rows += [
        Row("p99.9, traced less not", name, "ms", rounds.numbers(name, lambda one: one.p999_added))
        for name in measured
    ]
    for name in (OURS, TRACEML):
        rows.append(Row("steps a second", name, "", rounds.numbers(name, lambda one: one.a_second)))
        rows.append(
            Row("steps lost of them", name, "", rounds.numbers(name, lambda one: one.made - one.kept))
        )
    return rows


def bounds_of(rounds: Rounds[Traced]) -> list[Bound]:
    ours = partial(rounds.numbers, OURS)
    bounds = [
        Bound("ms added to a step", median(ours(lambda one: one.added_median)), ADDED_AT_MOST_MILLISECONDS),
        Bound(
            "ms added to the 99.9th percentile",
            median(ours(lambda one: one.p999_added)),
            P999_ADDED_AT_MOST_MILLISECONDS,
        ),
        Bound("steps lost at 2,000 a second", worst(ours(lambda one: one.made - one.kept)), LOST_AT_MOST),
        Bound(
            "share of that pace that was kept",
            worst(ours(lambda one: one.a_second / PACE), min),
            at_least=PACE_KEPT_AT_LEAST,
        ),
    ]
    if has_gpu():
        share = rounds.numbers(ON_GPU, lambda one: one.added_on_average / one.step)
        bounds.append(Bound("share added to a 5 ms step on a GPU", median(share), ADDED_ON_GPU_AT_MOST))
    return bounds


def notes_of(rounds: Rounds[Traced]) -> list[str]:
    every = [added for one in rounds.measured[OURS] if one is not None for added in one.added()]
    notes = [] if has_gpu() else ["no GPU here: the variant with steps of 5 ms on one was SKIPPED."]
    if len(every) > 5:
        low, high = bound_of_median(every)
        notes.append(
            f"95 % bound of what we add, over {len(every)} pairs: {low:.4f} to {high:.4f} ms a step."
        )
    return notes


def main() -> int:
    options = parse_options(__doc__ or "")
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    rounds = interleave(contenders(options.quick), repetitions, warm_up=False)
    outcome = Outcome(
        title="What tracing costs",
        repetitions=repetitions,
        rows=rows_of(rounds),
        bounds=bounds_of(rounds),
        missing=rounds.missing,
        failures=rounds.failures,
        notes=notes_of(rounds),
        samples={
            name: [
                None if one is None else {"added_ms": one.added(), "made": one.made, "kept": one.kept}
                for one in ones
            ]
            for name, ones in rounds.measured.items()
        },
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
