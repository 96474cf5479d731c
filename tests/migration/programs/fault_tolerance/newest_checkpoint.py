"""``get_checkpoint`` in the middle of a run gives the checkpoint that was reported last."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    found = [ray.train.get_checkpoint()]
    for step in range(2):
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "step"), "w") as file:
                file.write(str(step))
            ray.train.report(
                {"step": step},
                checkpoint=Checkpoint.from_directory(directory),
                checkpoint_upload_mode=CheckpointUploadMode.SYNC,
            )
        newest = ray.train.get_checkpoint()
        with newest.as_directory() as directory, open(os.path.join(directory, "step")) as file:
            found.append(file.read())
    return found


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.return_value == [None, "0", "1"]
