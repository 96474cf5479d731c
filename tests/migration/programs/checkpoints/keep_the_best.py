"""``checkpoint_score_attribute`` with an order keeps the best checkpoints, and always the newest."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

LOSSES = [0.5, 0.1, 0.3, 0.9]


def train_func():
    for epoch, loss in enumerate(LOSSES):
        with tempfile.TemporaryDirectory() as directory:
            open(os.path.join(directory, "model.pt"), "w").close()
            checkpoint = Checkpoint.from_directory(directory)
            ray.train.report({"epoch": epoch, "val_loss": loss}, checkpoint=checkpoint)


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(
        storage_path=os.path.abspath("runs"),
        checkpoint_config=CheckpointConfig(
            num_to_keep=2, checkpoint_score_attribute="val_loss", checkpoint_score_order="min"
        ),
    ),
).fit()
kept = {metrics["val_loss"] for _, metrics in result.best_checkpoints}
assert {0.1, 0.3} <= kept, kept
assert 0.5 not in kept, kept
assert result.metrics["val_loss"] == 0.9
best = result.get_best_checkpoint("val_loss", "min")
assert {c.path: m["epoch"] for c, m in result.best_checkpoints}[best.path] == 1
