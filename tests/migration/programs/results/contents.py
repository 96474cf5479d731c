"""What a Result has: metrics, checkpoint, path, error, best checkpoints, return value."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    for epoch in range(3):
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if ray.train.get_context().get_world_rank() == 0:
                open(os.path.join(directory, "model.pt"), "w").close()
                saved = Checkpoint.from_directory(directory)
            ray.train.report({"epoch": epoch, "accuracy": 0.5 + epoch / 10}, checkpoint=saved)
    return "returned"


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="looked-at", storage_path=os.path.abspath("runs")),
).fit()
assert isinstance(result, Result)
assert result.metrics == {"epoch": 2, "accuracy": 0.7}
assert result.error is None
assert result.return_value == "returned"
assert os.path.basename(result.path) == "looked-at"
assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0, 1, 2]
assert all(isinstance(checkpoint, Checkpoint) for checkpoint, _ in result.best_checkpoints)
assert result.best_checkpoints[-1][0].path == result.checkpoint.path
assert result.filesystem.get_file_info(result.checkpoint.path).is_file is False
assert "looked-at" in repr(result)
