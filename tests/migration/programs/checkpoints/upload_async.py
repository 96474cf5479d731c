"""``CheckpointUploadMode.ASYNC``: training goes on, and the local directory is deleted after the upload."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    directories = []
    for step in range(3):
        directory = tempfile.mkdtemp()
        directories.append(directory)
        with open(os.path.join(directory, "model.txt"), "w") as file:
            file.write(f"step {step}")
        ray.train.report(
            {"step": step},
            checkpoint=Checkpoint.from_directory(directory),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        )
    uploaded = ray.train.get_all_reported_checkpoints()
    return [one.metrics["step"] for one in uploaded], [os.path.exists(path) for path in directories]


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.return_value == ([0, 1, 2], [False] * 3)
with result.checkpoint.as_directory() as directory, open(os.path.join(directory, "model.txt")) as file:
    assert file.read() == "step 2"
