"""``checkpoint_dir_name`` names the directory of a checkpoint in the storage."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    for epoch in range(2):
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if ray.train.get_context().get_world_rank() == 0:
                open(os.path.join(directory, "model.pt"), "w").close()
                saved = Checkpoint.from_directory(directory)
            ray.train.report({"epoch": epoch}, checkpoint=saved, checkpoint_dir_name=f"epoch-{epoch:03}")


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="named", storage_path=os.path.abspath("runs")),
).fit()
assert os.path.basename(result.checkpoint.path) == "epoch-001"
assert [os.path.basename(checkpoint.path) for checkpoint, _ in result.best_checkpoints] == [
    "epoch-000",
    "epoch-001",
]
