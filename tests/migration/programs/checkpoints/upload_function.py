"""``checkpoint_upload_fn`` copies the files itself and returns the checkpoint that it made."""

import os
import shutil
import tempfile

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def upload(checkpoint, name):
    storage = ray.train.get_context().get_storage()
    target = storage.build_checkpoint_path_from_name(name)
    shutil.copytree(checkpoint.path, target, dirs_exist_ok=True)
    with open(os.path.join(target, "uploaded-by.txt"), "w") as file:
        file.write("me")
    return Checkpoint(target, storage.storage_filesystem)


def train_func():
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "model.txt"), "w") as file:
            file.write("weights")
        ray.train.report(
            {"step": 1},
            checkpoint=Checkpoint.from_directory(directory),
            checkpoint_upload_mode=CheckpointUploadMode.SYNC,
            checkpoint_upload_fn=upload,
        )


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(name="uploads", storage_path=os.path.abspath("runs")),
).fit()
with result.checkpoint.as_directory() as directory:
    files = sorted(name for name in os.listdir(directory) if name.endswith(".txt"))
assert files == ["model.txt", "uploaded-by.txt"]
