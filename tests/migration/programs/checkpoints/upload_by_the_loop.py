"""``CheckpointUploadMode.NO_UPLOAD``: the loop itself writes to the storage and reports where."""

import os

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    storage = ray.train.get_context().get_storage()
    path = storage.build_checkpoint_path_from_name("by-hand")
    filesystem = storage.storage_filesystem
    filesystem.create_dir(path, recursive=True)
    with filesystem.open_output_stream(os.path.join(path, "model.txt")) as stream:
        stream.write(b"weights")
    ray.train.report(
        {"step": 1},
        checkpoint=Checkpoint(path, filesystem),
        checkpoint_dir_name="by-hand",
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(name="own", storage_path=os.path.abspath("runs")),
).fit()
assert os.path.basename(result.checkpoint.path) == "by-hand"
with result.checkpoint.as_directory() as directory, open(os.path.join(directory, "model.txt")) as file:
    assert file.read() == "weights"
