"""Cost of everything that Powertrain does in a run, beside bare replicated training under torchrun.

Both sides train one loop: a model of four square layers with AdamW. Powertrain's side is traced, reports two metrics
in each step, and saves model and optimizer every 100 steps; torchrun's does nothing of that. The figure is the mean
time of a step after warm-up on the slowest rank, with all that the loop does in it. Runs of both sides alternate, and
the ratio is that of neighbouring runs.

On CPUs the steps take 20 ms, with as many ranks as there are cores (two at most) and one thread each. ``--cuda``
measures steps of 10 and 30 ms on one GPU, one after the other in each run and in turns the one or the other first.
``--parts`` measures also with some of the parts only, between those two: none, the trace, the trace and reports. The
limit is torchrun's own time.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
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
    median_ratio,
    parse_options,
    things_left,
)

SCRIPTS = Path(__file__).resolve().parent / "overhead_scripts"
REPETITIONS, CUDA_REPETITIONS, QUICK_REPETITIONS = 9, 7, 2
SECONDS, QUICK_SECONDS = 10.0, 3.0
#: A checkpoint every so many steps.
EVERY = 100
AT_MOST = 1.01
OURS, THEIRS = "Powertrain, everything on", "torchrun, bare"
#: The parts of Powertrain that a run uses, by the name of its contender.
PARTS = {
    "Powertrain, nothing on": (),
    "Powertrain, trace": ("trace",),
    "Powertrain, trace and reports": ("trace", "reports"),
    OURS: ("trace", "reports", "checkpoints"),
}
TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Steps:
    """The steps of one run on its slowest rank: by size the mean and the median, in milliseconds."""

    mean: tuple[float, ...]
    middle: tuple[float, ...]
    left_behind: tuple[str, ...]


def measure(name: str, settings: dict[str, Any], rounds: Iterator[int]) -> Steps:
    """Run one contender once. In every second of its ``rounds`` the sizes come in the opposite order."""
    is_ours = name in PARTS
    order = -1 if next(rounds) % 2 else 1
    settings = {**settings, "parts": PARTS.get(name, ()), "sizes": settings["sizes"][::order]}
    script = str(SCRIPTS / ("with_powertrain.py" if is_ours else "with_torchrun.py"))
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={settings['workers']}")
    command = (sys.executable, *(() if is_ours else launcher), script)
    with tempfile.TemporaryDirectory(prefix="ptb-") as directory:
        workspace = Path(directory)
        kept = workspace / "steps"
        kept.mkdir()
        ended = run_to_end(
            (*command, str(kept), json.dumps(settings)),
            workspace=workspace,
            timeout=TIMEOUT_SECONDS,
            grace=5.0,
        )
        ranks = [json.loads(file.read_text()) for file in sorted(kept.glob("rank-*.json"))]
    if len(ranks) != settings["workers"]:
        raise MeasurementFailed(
            f"{len(ranks)} of {settings['workers']} ranks wrote the times of their steps."
        )
    slowest = [max(of_size, key=fmean) for of_size in zip(*ranks, strict=True)][::order]
    return Steps(
        tuple(1e3 * fmean(steps) for steps in slowest),
        tuple(1e3 * median(steps) for steps in slowest),
        ended.left_behind if is_ours else ended.left_processes,
    )


def settings_for(steps: Sequence[int], device: str, seconds: float) -> dict[str, Any]:
    """Return the settings of both sides, for steps of about so many milliseconds one after the other."""
    import torch

    sys.path.insert(0, str(SCRIPTS))
    from training import rows_for

    torch.set_num_threads(1)
    sizes = [
        {"rows": rows_for(one / 1000, device), "steps": max(EVERY, round(seconds * 1000 / one))}
        for one in steps
    ]
    workers = 1 if device == "cuda" else min(2, os.cpu_count() or 1)
    return {"device": device, "workers": workers, "threads": 1, "every": EVERY, "sizes": sizes}


def contenders_of(settings: dict[str, Any], names: Sequence[str]) -> list[Contender[Steps]]:
    return [
        Contender(
            name,
            ("torch", "powertrain") if name in PARTS else ("torch",),
            partial(measure, name, settings, itertools.count()),
        )
        for name in names
    ]


def rows_of(what: str, size: int, rounds: Rounds[Steps], names: Sequence[str]) -> list[Row]:
    """Return the mean and the median step of all contenders, in milliseconds."""
    rows = []
    for figure, take in (("mean", _mean(size)), ("median", _middle(size))):
        ours = rounds.numbers(OURS, take)
        for name in names:
            numbers = rounds.numbers(name, take)
            ratio = median_ratio(ours, numbers) if name != OURS else None
            rows.append(
                Row(f"{what}, {figure}", name, "ms", numbers, ratio, "is the limit" * (name == THEIRS))
            )
    return rows


def bound_of(what: str, size: int, rounds: Rounds[Steps]) -> Bound:
    ours, theirs = (rounds.numbers(name, _mean(size)) for name in (OURS, THEIRS))
    return Bound(f"{what}: everything on / bare", median_ratio(ours, theirs), at_most=AT_MOST)


def _mean(size: int) -> Callable[[Steps], float]:
    return lambda steps: steps.mean[size]


def _middle(size: int) -> Callable[[Steps], float]:
    return lambda steps: steps.middle[size]


def main(arguments: list[str]) -> int:
    is_cuda = "--cuda" in arguments
    names = (THEIRS, *PARTS) if "--parts" in arguments else (THEIRS, OURS)
    options = parse_options(__doc__ or "", [one for one in arguments if one not in ("--cuda", "--parts")])
    repetitions = CUDA_REPETITIONS if is_cuda else REPETITIONS
    repetitions = QUICK_REPETITIONS if options.quick else repetitions
    steps = (10, 30) if is_cuda else (20,)
    seconds = QUICK_SECONDS if options.quick else SECONDS
    settings = settings_for(steps, "cuda" if is_cuda else "cpu", seconds)
    # All runs discard their first steps; a whole one for that takes half a minute on a GPU.
    rounds = interleave(contenders_of(settings, names), repetitions, warm_up=not is_cuda)
    left = things_left(rounds)
    rows: list[Row] = []
    bounds = [Bound("things left behind", len(left), at_most=0)]
    samples: dict[str, Any] = {"settings": settings}
    for size, milliseconds in enumerate(steps):
        what = f"step of {milliseconds} ms on {'a GPU' if is_cuda else 'CPUs'}"
        rows += rows_of(what, size, rounds, names)
        bounds.append(bound_of(what, size, rounds))
        samples[what] = {name: rounds.numbers(name, _mean(size)) for name in names}
    outcome = Outcome(
        "Everything on, beside bare replicated training",
        repetitions, rows, bounds, rounds.missing, rounds.failures, left, samples,
    )  # fmt: skip
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
