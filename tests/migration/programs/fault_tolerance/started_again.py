"""A run that failed is resumed when the script is started again with the same name and storage path."""

import os
import subprocess
import sys
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory, open(os.path.join(directory, "epoch")) as file:
            start = int(file.read()) + 1
    for epoch in range(start, 3):
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "epoch"), "w") as file:
                file.write(str(epoch))
            ray.train.report({"epoch": epoch}, checkpoint=Checkpoint.from_directory(directory))
        ray.train.get_all_reported_checkpoints()
        if epoch == 0 and config["is_first"]:
            raise RuntimeError("the first start ends here")
    return start


def fit(is_first):
    return TorchTrainer(
        train_func,
        train_loop_config={"is_first": is_first},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name="resumed", storage_path=os.path.abspath("runs")),
    ).fit()


if len(sys.argv) > 1:
    fit(is_first=True)
else:
    first = subprocess.run([sys.executable, __file__, "first"], capture_output=True, text=True)
    assert first.returncode != 0
    assert "the first start ends here" in first.stdout + first.stderr
    result = fit(is_first=False)
    assert result.return_value == 1
    assert result.metrics == {"epoch": 2}
