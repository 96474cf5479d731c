"""``storage_path`` and ``name`` say where everything of a run is kept."""

import os
import pathlib
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    with tempfile.TemporaryDirectory() as directory:
        pathlib.Path(directory, "weights.txt").write_text("1.5")
        ray.train.report({"done": 1}, checkpoint=Checkpoint.from_directory(directory))


storage = pathlib.Path("kept").absolute()
run_config = RunConfig(name="by-name", storage_path=storage)
result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=1), run_config=run_config).fit()

assert run_config.name == "by-name"
assert os.path.realpath(result.path) == os.path.realpath(storage / "by-name")
assert os.path.realpath(result.checkpoint.path).startswith(os.path.realpath(result.path))
assert pathlib.Path(result.checkpoint.path, "weights.txt").read_text() == "1.5"
