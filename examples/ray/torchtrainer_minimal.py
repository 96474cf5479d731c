"""Minimal traced training: two workers, a small model, and a card with the time of each phase at the end.

It runs on this machine, or on the Ray cluster that ``--ray-address`` names. With a delay for each batch, the card says
that the run waits for its input, and what would help::

    python examples/ray/torchtrainer_minimal.py
    python examples/ray/torchtrainer_minimal.py --input-delay-ms=100
    python examples/ray/torchtrainer_minimal.py --ray-address=auto --num-workers=2 --steps=100 --use-gpu
    python examples/ray/torchtrainer_minimal.py --smoke
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

import powertrain
from powertrain import RunConfig, ScalingConfig
from powertrain.trace.integrations.ray import TraceMLRayConfig, TraceMLTorchTrainer

BATCH_SIZE = 64


def delayed(batches: Iterable[Any], seconds: float) -> Iterator[Any]:
    """Return the same batches from a slower source."""
    for batch in batches:
        time.sleep(seconds)
        yield batch


def train_loop_per_worker(config: dict[str, Any]) -> None:
    """Training function of every worker: ``config["steps"]`` steps over its share of the rows, repeatedly."""
    from torch import nn, optim

    import powertrain.trace as traceml
    from powertrain import torch as train

    model = train.prepare_model(
        nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    )
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    rows = powertrain.get_dataset_shard("train")

    step = 0
    while step < config["steps"]:
        batches: Iterable[Any] = rows.iter_torch_batches(batch_size=BATCH_SIZE, prefetch_batches=1)
        if config["input_delay"]:
            batches = delayed(batches, config["input_delay"])
        for batch in traceml.wrap_dataloader_fetch(batches):
            with traceml.trace_step(model):
                optimizer.zero_grad(set_to_none=True)
                loss = criterion(model(batch["x"]), batch["y"])
                loss.backward()
                optimizer.step()
            step += 1
            if step == config["steps"]:
                break
        powertrain.report({"steps": step, "loss": loss.detach()})


def rows(count: int) -> powertrain.data.Dataset:
    """Return points in four classes."""
    generator = np.random.default_rng(0)
    classes = generator.integers(0, 4, count)
    points = generator.normal(size=(count, 32)) + classes[:, None] * 0.5
    return powertrain.data.from_numpy({"x": points.astype(np.float32), "y": classes})


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train a small model, and see where its time goes.")
    arguments.add_argument("--ray-address", help='a Ray cluster, or "auto"; this machine when left out')
    arguments.add_argument("--name", help="the run; one of its own when left out")
    arguments.add_argument("--storage-path", help="where runs are kept; the default when left out")
    arguments.add_argument("--num-workers", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--use-gpu", action="store_true", help="one GPU for each worker")
    arguments.add_argument(
        "--input-delay-ms", type=float, default=0.0, help="how much later each batch comes"
    )
    arguments.add_argument("--smoke", action="store_true", help="few steps")
    options = arguments.parse_args()
    if options.smoke:
        options.steps = 60

    if options.ray_address and importlib.util.find_spec("ray") is None:
        print("Ray is not installed, so this trains on this machine.")
    elif options.ray_address:
        powertrain.init(address=options.ray_address)

    trainer = TraceMLTorchTrainer(
        train_loop_per_worker,
        train_loop_config={"steps": options.steps, "input_delay": options.input_delay_ms / 1000},
        scaling_config=ScalingConfig(num_workers=options.num_workers, use_gpu=options.use_gpu),
        run_config=RunConfig(name=options.name, storage_path=options.storage_path),
        datasets={"train": rows(max(options.num_workers, 1) * BATCH_SIZE * 50)},
        traceml_config=TraceMLRayConfig(mode="summary"),
    )
    print(trainer.fit())


if __name__ == "__main__":
    main()
