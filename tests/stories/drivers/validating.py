"""Training functions that ask for validations, and functions that validate."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loops
import story

import powertrain as train
from powertrain import (
    Checkpoint,
    CheckpointConsistencyMode,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    ValidationTaskConfig,
)


def three_epochs(config: dict[str, Any]) -> list[Any] | None:
    """A checkpoint per epoch, each to be validated; returned is what the run knows of them, if that is asked for."""
    asked = ValidationTaskConfig(**config["task"]) if "task" in config else True
    for epoch in range(loops.restored_epoch(), config.get("epochs", 3)):
        with loops.saved(epoch) as checkpoint:
            train.report({"epoch": epoch}, checkpoint, validation=asked)
    if "told" in config:
        story.tell(f"{config['told']}-{loops.rank()}")
    if "consistency" not in config:
        return None
    mode = CheckpointConsistencyMode[config["consistency"]]
    return [
        (found.status.value, found.metrics)
        for found in train.get_all_reported_checkpoints(mode, timeout_s=60)
    ]


def epoch_of(checkpoint: Checkpoint) -> int:
    with checkpoint.as_directory() as directory:
        return int(Path(directory, "rank-0").read_text())


def score(checkpoint: Checkpoint, best: int = 1, distance: Callable[[int], int] = abs) -> dict[str, Any]:
    """Best for epoch ``best``."""
    epoch = epoch_of(checkpoint)
    print(f"validating epoch {epoch}")
    return {"score": -distance(epoch - best), "validated_by": os.getpid()}


def score_after_the_training(checkpoint: Checkpoint) -> dict[str, Any]:
    story.await_told("trained-0")
    return score(checkpoint, best=0)


def refuse_the_first(checkpoint: Checkpoint) -> dict[str, Any]:
    if epoch_of(checkpoint) == 0:
        raise ValueError("epoch 0 is not worth it")
    return score(checkpoint)


def die_at_the_first(checkpoint: Checkpoint) -> dict[str, Any]:
    if epoch_of(checkpoint) == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return score(checkpoint)


def return_a_number(checkpoint: Checkpoint) -> Any:
    return 0.5


def return_an_object(checkpoint: Checkpoint) -> Any:
    return {"model": object(), "score": 1}


def score_with_a_trainer(checkpoint: Checkpoint, directory: str) -> dict[str, Any]:
    """Runs two workers of its own on the checkpoint."""
    result = DataParallelTrainer(
        double_the_epoch,
        train_loop_config={"checkpoint": checkpoint},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name=os.path.basename(checkpoint.path), storage_path=f"{directory}/validations"),
    ).fit()
    assert result.metrics is not None
    return {"doubled": result.metrics["doubled"], "workers": result.return_value}


def double_the_epoch(config: dict[str, Any]) -> int:
    train.report({"doubled": 2 * epoch_of(config["checkpoint"])})
    return train.get_context().get_world_size()


def show_gpus(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "rank": os.environ.get("RANK")}


def sleep_with_a_child(checkpoint: Checkpoint) -> dict[str, Any]:
    """Sleeps, and so does a process that it has started."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    story.tell("asleep", f"{os.getpid()} {child.pid}")
    time.sleep(600)
    return {}


def sleep_the_first_time(checkpoint: Checkpoint, greeting: str) -> dict[str, Any]:
    """The second time it is called it returns at once."""
    if not story.told("asleep"):
        sleep_with_a_child(checkpoint)
    return {"greeting": greeting}
