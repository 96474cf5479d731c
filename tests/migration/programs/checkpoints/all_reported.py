"""``get_all_reported_checkpoints`` inside of the loop, with the status of each checkpoint."""

import os
import tempfile

import ray.train
from ray.train import (
    Checkpoint,
    CheckpointConsistencyMode,
    ReportedCheckpointStatus,
    RunConfig,
    ScalingConfig,
)
from ray.train.torch import TorchTrainer


def train_func():
    for epoch in range(3):
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if ray.train.get_context().get_world_rank() == 0:
                open(os.path.join(directory, "model.pt"), "w").close()
                saved = Checkpoint.from_directory(directory)
            ray.train.report({"epoch": epoch}, checkpoint=saved)
    reported = ray.train.get_all_reported_checkpoints(
        consistency_mode=CheckpointConsistencyMode.COMMITTED, timeout_s=60
    )
    assert all(one.status is ReportedCheckpointStatus.COMMITTED for one in reported)
    assert all(isinstance(one.checkpoint, Checkpoint) for one in reported)
    return [one.metrics["epoch"] for one in reported]


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.return_value == [0, 1, 2]
