"""Arguments of a validation: defaults from the trainer, replaced for single checkpoints in ``report``."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig, ValidationConfig, ValidationTaskConfig
from ray.train.torch import TorchTrainer


def validate(checkpoint, batch_size=0, split="none"):
    return {"batch_size": batch_size, "split": split}


def train_func():
    for validation in (True, ValidationTaskConfig(fn_kwargs={"batch_size": 8})):
        with tempfile.TemporaryDirectory() as directory:
            open(os.path.join(directory, "model.pt"), "w").close()
            checkpoint = Checkpoint.from_directory(directory)
            ray.train.report({"loss": 1.0}, checkpoint=checkpoint, validation=validation)
    return [one.metrics for one in ray.train.get_all_reported_checkpoints()]


result = TorchTrainer(
    train_func,
    validation_config=ValidationConfig(
        fn=validate,
        task_config=ValidationTaskConfig(fn_kwargs={"batch_size": 4, "split": "test"}),
        ray_remote_kwargs={"num_cpus": 1},
    ),
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.return_value == [
    {"loss": 1.0, "batch_size": 4, "split": "test"},
    {"loss": 1.0, "batch_size": 8, "split": "test"},
]
