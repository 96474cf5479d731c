"""After a failure the checkpoints up to it are there, and the run can be read from its directory."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, Result, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchTrainer


def train_func():
    with tempfile.TemporaryDirectory() as directory:
        open(os.path.join(directory, "model.pt"), "w").close()
        ray.train.report({"epoch": 0}, checkpoint=Checkpoint.from_directory(directory))
    ray.train.get_all_reported_checkpoints()
    raise RuntimeError("out of patience")


storage = os.path.abspath("runs")
try:
    TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="failed", storage_path=storage),
    ).fit()
except TrainingFailedError as error:
    assert "out of patience" in str(error)
else:
    raise AssertionError("fit() returned although a worker failed")
result = Result.from_path(os.path.join(storage, "failed"))
assert result.metrics == {"epoch": 0}
assert os.path.exists(os.path.join(result.checkpoint.path, "model.pt"))
