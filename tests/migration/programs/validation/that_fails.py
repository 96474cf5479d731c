"""A validation that raises does not end the training; the checkpoint says that it failed."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, ReportedCheckpointStatus, RunConfig, ScalingConfig, ValidationConfig
from ray.train.torch import TorchTrainer


def validate(checkpoint):
    raise ValueError("no data to validate with")


def train_func():
    with tempfile.TemporaryDirectory() as directory:
        open(os.path.join(directory, "model.pt"), "w").close()
        ray.train.report({"loss": 1.0}, checkpoint=Checkpoint.from_directory(directory), validation=True)
    (only,) = ray.train.get_all_reported_checkpoints()
    return only.status is ReportedCheckpointStatus.VALIDATION_FAILED, only.metrics


result = TorchTrainer(
    train_func,
    validation_config=ValidationConfig(fn=validate),
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.error is None
assert result.return_value == (True, {"loss": 1.0})
