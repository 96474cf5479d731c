"""``CheckpointUploadMode.SYNC``: when ``report`` returns, the checkpoint is in the storage."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "model.txt"), "w") as file:
            file.write("weights")
        ray.train.report(
            {"step": 1},
            checkpoint=Checkpoint.from_directory(directory),
            checkpoint_upload_mode=CheckpointUploadMode.SYNC,
        )
        kept = os.listdir(directory)
    newest = ray.train.get_all_reported_checkpoints()[-1].checkpoint
    with newest.as_directory() as directory, open(os.path.join(directory, "model.txt")) as file:
        return "model.txt" in kept, file.read()


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.return_value == (True, "weights")
