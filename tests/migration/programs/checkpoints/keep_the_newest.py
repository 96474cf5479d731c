"""``num_to_keep`` without a score keeps the newest checkpoints and deletes the others."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    for epoch in range(4):
        with tempfile.TemporaryDirectory() as directory:
            open(os.path.join(directory, "model.pt"), "w").close()
            ray.train.report(
                {"epoch": epoch},
                checkpoint=Checkpoint.from_directory(directory),
                checkpoint_dir_name=f"epoch-{epoch}",
            )


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(
        storage_path=os.path.abspath("runs"), checkpoint_config=CheckpointConfig(num_to_keep=2)
    ),
).fit()
assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [2, 3]
for checkpoint, _ in result.best_checkpoints:
    assert os.path.exists(os.path.join(checkpoint.path, "model.pt"))
parent = os.path.dirname(result.checkpoint.path)
assert not {"epoch-0", "epoch-1"} & set(os.listdir(parent))
