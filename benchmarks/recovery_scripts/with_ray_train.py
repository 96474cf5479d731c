"""The training function under Ray Train: python with_ray_train.py DIRECTORY"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import ray.train as train
from diary import ENTERED, Diary
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from workload import CHECKPOINT_EVERY, load, new_model, new_optimizer, save, steps_from, take_step


def train_function(config: dict[str, Any]) -> None:
    rank = train.get_context().get_world_rank()
    diary = Diary(config["directory"], rank)
    diary.write(ENTERED)
    model = train.torch.prepare_model(new_model())
    optimizer = new_optimizer(model)
    done = 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as directory:
            done = load(os.path.join(directory, "state.pt"), model, optimizer)
    for step in steps_from(done + 1, diary):
        take_step(model, optimizer, diary, step)
        if step % CHECKPOINT_EVERY != 0:
            continue
        if rank != 0:
            train.report({"step": step})
            continue
        with tempfile.TemporaryDirectory() as directory:
            save(os.path.join(directory, "state.pt"), model, optimizer, step)
            train.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))


directory = os.path.abspath(sys.argv[1])
trainer = TorchTrainer(
    train_function,
    train_loop_config={"directory": directory},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="recovery",
        storage_path=os.path.join(directory, "storage"),
        failure_config=FailureConfig(max_failures=100),
    ),
)
result = trainer.fit()
print(f"Final metrics: {result.metrics}")
