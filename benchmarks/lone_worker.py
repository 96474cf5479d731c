"""Cost of wrapping with one worker: a prepared model beside the bare model and torch's DistributedDataParallel.

All models are in one process with a gloo group of one rank. Each round trains each of them for a block of steps with
the same batch, and the median of the block is its figure. The small model shows the cost per call and per parameter,
the large one that of copying gradients. The limit is the bare model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from harness import Bound, Contender, Outcome, Row, conclude, interleave, median_ratio, parse_options

REPETITIONS, QUICK_REPETITIONS = 15, 5
STEPS, QUICK_STEPS = 40, 15
PLAIN, OURS, DDP = "bare model", "prepare_model", "DistributedDataParallel"
#: By name: the width and number of layers of a multilayer perceptron.
MODELS = {"small model (16 layers of 64)": (64, 16), "large model (3 layers of 768)": (768, 3)}
#: Maximum slowdown of a step relative to the bare model.
AT_MOST = 1.03


def make_model(kind: str, width: int, layers: int) -> Any:
    """Make a model of one kind; all begin with the same weights."""
    from torch import manual_seed, nn
    from torch.nn.parallel import DistributedDataParallel

    from powertrain.torch import prepare_model

    manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    if kind == PLAIN:
        return model
    return DistributedDataParallel(model) if kind == DDP else prepare_model(model, move_to_device=False)


def step_of(kind: str, width: int, layers: int) -> Callable[[], None]:
    """Return a function that makes one training step."""
    import torch

    model = make_model(kind, width, layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.ones(8, width)

    def step() -> None:
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()

    return step


def median_step(step: Callable[[], None], steps: int) -> float:
    """Milliseconds of the median step of a block."""
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


def main() -> int:
    """Measure, print, and return the exit code."""
    import torch
    import torch.distributed as dist

    options = parse_options(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    repetitions, steps = (QUICK_REPETITIONS, QUICK_STEPS) if options.quick else (REPETITIONS, STEPS)
    rows, bounds, failures, samples = [], [], [], {}
    for what, (width, layers) in MODELS.items():
        contenders = [
            Contender(kind, ("torch",), partial(median_step, step_of(kind, width, layers), steps))
            for kind in (PLAIN, OURS, DDP)
        ]
        rounds = interleave(contenders, repetitions, warm_up=True)
        ours = rounds.measured[OURS]
        for kind in (OURS, PLAIN, DDP):
            ratio = None if kind == OURS else median_ratio(ours, rounds.measured[kind])
            rows.append(Row(what, kind, "ms", rounds.measured[kind], ratio))
        bounds.append(
            Bound(
                f"{what}: a step / that of the {PLAIN}",
                median_ratio(ours, rounds.measured[PLAIN]),
                at_most=AT_MOST,
            )
        )
        failures += rounds.failures
        samples[what] = dict(rounds.measured)
    dist.destroy_process_group()
    outcome = Outcome("One worker", repetitions, rows, bounds, (), failures, samples=samples)
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
