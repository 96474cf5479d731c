"""COMMITTED does not wait for validations: a checkpoint is listed as pending."""

import os
import tempfile
import time

import ray.train
from ray.train import (
    Checkpoint,
    CheckpointConsistencyMode,
    ReportedCheckpointStatus,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
)
from ray.train.torch import TorchTrainer


def validate(checkpoint, gate=""):
    while not os.path.exists(gate):
        time.sleep(0.01)
    return {"score": 1}


def train_func(config):
    with tempfile.TemporaryDirectory() as directory:
        open(os.path.join(directory, "model.pt"), "w").close()
        ray.train.report(
            {"loss": 1.0},
            checkpoint=Checkpoint.from_directory(directory),
            validation=ray.train.ValidationTaskConfig(fn_kwargs={"gate": config["gate"]}),
        )
    (early,) = ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
    open(config["gate"], "w").close()
    (late,) = ray.train.get_all_reported_checkpoints(CheckpointConsistencyMode.VALIDATED)
    return [early.status.name, late.status.name, late.metrics]


result = TorchTrainer(
    train_func,
    train_loop_config={"gate": os.path.abspath("gate")},
    validation_config=ValidationConfig(fn=validate),
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert ReportedCheckpointStatus.PENDING_VALIDATION.name == "PENDING_VALIDATION"
assert result.return_value == ["PENDING_VALIDATION", "VALIDATED", {"loss": 1.0, "score": 1}]
