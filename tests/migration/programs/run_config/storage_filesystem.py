"""A pyarrow file system of one's own, with the storage path as a path on it."""

import os
import tempfile

import pyarrow.fs
import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "weights.txt"), "w") as file:
            file.write("2.5")
        ray.train.report({"done": 1}, checkpoint=Checkpoint.from_directory(directory))


filesystem = pyarrow.fs.SubTreeFileSystem(os.getcwd(), pyarrow.fs.LocalFileSystem())
result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(name="run", storage_path="bucket", storage_filesystem=filesystem),
).fit()

assert result.path.endswith("bucket/run")
assert os.path.isdir("bucket/run")
listed = result.filesystem.get_file_info(pyarrow.fs.FileSelector(result.checkpoint.path))
assert "weights.txt" in [info.base_name for info in listed]
with result.checkpoint.as_directory() as directory, open(os.path.join(directory, "weights.txt")) as file:
    assert file.read() == "2.5"
