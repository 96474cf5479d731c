"""A validation function runs beside training on reported checkpoints; its metrics join those of the checkpoint."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, ReportedCheckpointStatus, RunConfig, ScalingConfig, ValidationConfig
from ray.train.torch import TorchTrainer


def validate(checkpoint):
    with checkpoint.as_directory() as directory, open(os.path.join(directory, "model.txt")) as file:
        return {"score": int(file.read()) * 10}


def train_func():
    for epoch in range(2):
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "model.txt"), "w") as file:
                file.write(str(epoch))
            ray.train.report(
                {"epoch": epoch}, checkpoint=Checkpoint.from_directory(directory), validation=True
            )
    reported = ray.train.get_all_reported_checkpoints()
    assert all(one.status is ReportedCheckpointStatus.VALIDATED for one in reported)
    return [one.metrics for one in reported]


result = TorchTrainer(
    train_func,
    validation_config=ValidationConfig(fn=validate),
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.return_value == [{"epoch": 0, "score": 0}, {"epoch": 1, "score": 10}]
assert [metrics["score"] for _, metrics in result.best_checkpoints] == [0, 10]
assert result.get_best_checkpoint("score", "max").path == result.checkpoint.path
