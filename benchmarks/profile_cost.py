"""What a profile of a live run costs its training: the time that it adds, and the steps that it makes longer.

A run with one worker trains steps of about 20 ms on a CPU (``--cuda``: 10 ms on a GPU). ``powertrain profile`` records
three of them, again and again; then the time is summed by which the steps from each request to two seconds after its
answer were longer than the median step outside. Beside it the same loop with torch's own profiler in its code, which
writes the trace within the loop. The limit is that profiler's own cost for the three steps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness import (
    Contender,
    MeasurementFailed,
    Outcome,
    Rounds,
    Row,
    conclude,
    interleave,
    median_ratio,
    parse_options,
)

SCRIPTS = Path(__file__).resolve().parent / "profile_scripts"
sys.path.extend([str(SCRIPTS), str(SCRIPTS.parent / "overhead_scripts")])

REPETITIONS, QUICK_REPETITIONS = 5, 1
PROFILED = 3
OURS, THEIRS = "powertrain profile", "torch's profiler in the loop"
SETTLING_SECONDS, TIMEOUT_SECONDS = 2.0, 120.0
#: A step counts as longer from this multiple of the median on.
LONGER = 1.5


@dataclass(frozen=True)
class Cost:
    """What one profile cost, in seconds, and the number of steps that were longer."""

    added: float
    longer: int
    longest: float
    usual: float
    answered: float
    table: str = ""


def await_file(file: Path, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + TIMEOUT_SECONDS
    while not file.exists():
        if process.poll() is not None or time.monotonic() > until:
            raise MeasurementFailed(f"There was no {file.name!r} within {TIMEOUT_SECONDS:g} s.")
        time.sleep(0.01)


@contextmanager
def training(script: str, settings: dict[str, Any]) -> Any:
    """A process that trains; it is ended after the block."""
    directory = Path(settings["directory"])
    with open(directory / "output", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / script), json.dumps(settings)],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory,
        )
    try:
        await_file(directory / "trains", process)
        yield process
        (directory / "enough").touch()
        if process.wait(TIMEOUT_SECONDS) != 0:
            raise MeasurementFailed(f"{script} failed: {(directory / 'output').read_text()[-500:]}")
    finally:
        process.kill()
        process.wait()


def measure(script: str, request: Callable[[Path, Any], str], settings: dict[str, Any]) -> Cost:
    """Profile one run once."""
    with tempfile.TemporaryDirectory(prefix="ptb-") as name:
        directory = Path(name)
        with training(script, {**settings, "directory": name, "storage": f"{name}/runs"}) as process:
            time.sleep(SETTLING_SECONDS)
            asked = time.monotonic()
            table = request(directory, process)
            answered = time.monotonic()
            time.sleep(2 * SETTLING_SECONDS)
        steps = json.loads((directory / "steps.json").read_text())
    within = [took for began, took in steps if asked <= began + took and began <= answered + SETTLING_SECONDS]
    usual = median(took for began, took in steps if began + took < asked)
    return Cost(
        added=sum(max(0.0, took - usual) for took in within if took > LONGER * usual),
        longer=sum(took > LONGER * usual for took in within),
        longest=max(within),
        usual=usual,
        answered=answered - asked,
        table=table,
    )


def ask_powertrain(directory: Path, process: Any) -> str:
    command = [sys.executable, "-m", "powertrain", "profile", "profiled", "--storage", f"{directory}/runs"]
    done = subprocess.run([*command, "--steps", str(PROFILED)], capture_output=True, text=True, cwd=directory)
    if done.returncode != 0:
        raise MeasurementFailed(f"powertrain profile failed: {done.stdout[-300:]} {done.stderr[-300:]}")
    return done.stdout


def ask_loop(directory: Path, process: Any) -> str:
    (directory / "request").touch()
    await_file(directory / "answer", process)
    return ""


def rows_of(rounds: Rounds[Cost]) -> list[Row]:
    rows = []
    ways: tuple[tuple[str, str, Callable[[Cost], float]], ...] = (
        ("time that a profile adds", "ms", lambda one: one.added * 1e3),
        ("steps that it makes longer", "", lambda one: one.longer),
        ("the longest of them", "ms", lambda one: one.longest * 1e3),
        ("a usual step", "ms", lambda one: one.usual * 1e3),
        ("request to table or trace", "s", lambda one: one.answered),
    )
    for what, unit, take in ways:
        ours, theirs = (rounds.numbers(who, take) for who in (OURS, THEIRS))
        rows.append(Row(what, OURS, unit, ours))
        rows.append(Row(what, THEIRS, unit, theirs, median_ratio(ours, theirs)))
    return rows


def main(arguments: list[str]) -> int:
    import torch
    from training import rows_for

    is_cuda = "--cuda" in arguments
    options = parse_options(__doc__ or "", [one for one in arguments if one != "--cuda"])
    torch.set_num_threads(1)
    device, seconds = ("cuda", 0.01) if is_cuda else ("cpu", 0.02)
    settings = {"device": device, "rows": rows_for(seconds, device), "profiled": PROFILED}
    contenders = [
        Contender(THEIRS, ("torch",), lambda: measure("with_torch.py", ask_loop, settings)),
        Contender(
            OURS, ("torch", "powertrain"), lambda: measure("with_powertrain.py", ask_powertrain, settings)
        ),
    ]
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    rounds = interleave(contenders, repetitions, warm_up=not options.quick)
    last = next((one for one in reversed(rounds.measured[OURS]) if one is not None), None)
    print(last.table if last else "")
    samples = {who: [vars(one) if one else None for one in costs] for who, costs in rounds.measured.items()}
    outcome = Outcome(
        f"Profiling {PROFILED} steps of a live run on a {'GPU' if is_cuda else 'CPU'}",
        repetitions, rows_of(rounds), [], rounds.missing, rounds.failures, [], samples,
    )  # fmt: skip
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
