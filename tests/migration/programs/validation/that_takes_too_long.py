"""``ValidationTaskConfig(timeout_s=...)`` ends a validation that takes too long."""

import os
import tempfile
import time

import ray.train
from ray.train import (
    Checkpoint,
    ReportedCheckpointStatus,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    ValidationTaskConfig,
)
from ray.train.torch import TorchTrainer


def validate(checkpoint):
    time.sleep(600)
    return {}


def train_func():
    with tempfile.TemporaryDirectory() as directory:
        open(os.path.join(directory, "model.pt"), "w").close()
        ray.train.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(directory), validation=True)
    (only,) = ray.train.get_all_reported_checkpoints()
    return only.status is ReportedCheckpointStatus.VALIDATION_TIMEOUT


result = TorchTrainer(
    train_func,
    validation_config=ValidationConfig(fn=validate, task_config=ValidationTaskConfig(timeout_s=1.0)),
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.return_value is True
