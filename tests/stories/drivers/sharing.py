"""Runs that share a machine: each wants something of which there is not enough for all."""

from __future__ import annotations

import fcntl
import json
import os
from typing import Any

import loops
import story

import powertrain
import powertrain as train
from powertrain import DataParallelTrainer, ScalingConfig
from powertrain.engine import resources
from powertrain.worker import main

#: The one GPU that the machine is taken to have, as the driver of it would call it.
GPU = "GPU-pretended"
#: The run's name, and what it wants of the machine: options of ScalingConfig.
NAME, WANTS = "STORY_RUN", "STORY_WANTS"


def fit() -> dict[str, Any]:
    """Not caught: how the script ends is the story."""
    resources._gpu_names, resources._gpu_uuids = (lambda: ("Pretended GPU",)), (lambda: (GPU,))
    main._choose_gpu = lambda device: None  # of which torch knows nothing
    powertrain.init(resources={"license": 1.0})
    name = os.environ[NAME]
    trainer = DataParallelTrainer(
        use_it,
        train_loop_config={"name": name},
        scaling_config=ScalingConfig(num_workers=1, **json.loads(os.environ[WANTS])),
        run_config=story.run_config(name),
    )
    return {"metrics": trainer.fit().metrics}


def use_it(config: dict[str, Any]) -> None:
    """Hold what two must never hold at once, until the story lets go of it."""
    name = config["name"]
    note, in_use = (
        os.open(story.directory() / file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        for file in ("notes", "in use")
    )
    fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.write(note, f"{name} begins on {os.environ.get('CUDA_VISIBLE_DEVICES', 'no GPU')}\n".encode())
    epoch = loops.restored_epoch()
    with loops.saved(epoch) as checkpoint:
        train.report({"epoch": epoch}, checkpoint, checkpoint_upload_mode="SYNC")
    story.tell(f"{name} uses it", str(os.getppid()))
    story.await_told(f"{name} may end")
    os.write(note, f"{name} ends\n".encode())
