"""Train on preemptible machines: with as many workers as available, and the same result at any number.

A worker about to be preempted gets SIGTERM, as from a cloud's spot notice. The run saves at its next report and
continues with the remaining workers; when there is room again, it grows. ``batch_plan`` keeps the 64 samples of each
optimizer step the same throughout. With ``--notice-at`` rank 1 sends itself the signal at that step::

    python examples/elastic_spot.py --max-workers 4 --notice-at 100
    powertrain resize elastic-spot 2                  # meanwhile, in another terminal
    python examples/elastic_spot.py --smoke           # a minute on two cores
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powertrain as train
from powertrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer, prepare_model

#: Samples of each optimizer step, at any number of workers.
GLOBAL_BATCH = 64


def samples(step: int, start: int, size: int) -> tuple[Tensor, Tensor]:
    """Return samples ``start`` to ``start + size`` of a step: points, and their side of a curve."""
    points = torch.rand(GLOBAL_BATCH, 2, generator=torch.Generator().manual_seed(step)) * 4 - 2
    labels = (points[:, 1] > torch.sin(2 * points[:, 0])).long()
    return points[start : start + size], labels[start : start + size]


def train_curve(config: dict[str, Any]) -> None:
    """Training function of every worker."""
    torch.manual_seed(0)
    context = train.get_context()
    model: Any = prepare_model(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    progress = {"step": 0}
    train.register_state(
        model=model, optimizer=optimizer, progress=progress
    )  # the run saves by itself when necessary
    saved = train.load_state()
    if saved:
        progress.update(saved["progress"])
    plan = context.batch_plan(global_batch_size=GLOBAL_BATCH, max_micro_batch=16)
    while progress["step"] < config["steps"]:
        optimizer.zero_grad()
        for micro in plan:
            points, labels = samples(progress["step"], micro.start, micro.size)
            with contextlib.nullcontext() if micro.is_last else model.no_sync():
                loss = F.cross_entropy(model(points), labels)
                (loss * micro.loss_scale).backward()
        optimizer.step()
        progress["step"] += 1
        if progress["step"] == config["notice_at"] and context.get_world_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        train.report({"step": progress["step"], "loss": loss.item(), "workers": context.get_world_size()})


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train on machines that may be taken away.")
    arguments.add_argument(
        "--name", default="elastic-spot", help="the run; the same name again goes on with it"
    )
    arguments.add_argument("--storage-path", help="where runs are kept; the default when left out")
    arguments.add_argument("--max-workers", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=2000)
    arguments.add_argument(
        "--notice-at", type=int, default=0, help="rank 1 sends itself SIGTERM at this step"
    )
    arguments.add_argument("--smoke", action="store_true", help="few steps, and a notice on the way")
    options = arguments.parse_args()
    if options.smoke:
        options.steps, options.notice_at = 60, 20

    result = TorchTrainer(
        train_curve,
        train_loop_config={"steps": options.steps, "notice_at": options.notice_at},
        scaling_config=ScalingConfig(
            num_workers=(1, options.max_workers), resources_per_worker={"CPU": 0.25}
        ),
        run_config=RunConfig(
            name=options.name,
            storage_path=options.storage_path,
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2, checkpoint_frequency=20),
        ),
    ).fit()
    table = result.metrics_dataframe
    assert table is not None
    sizes = table.groupby("workers")["step"].count()
    print("steps by number of workers:", {int(workers): int(steps) for workers, steps in sizes.items()})
    print(f"loss {table['loss'].iloc[-1]:.3f} after {table['step'].iloc[-1]} steps; {result.path}")


if __name__ == "__main__":
    main()
