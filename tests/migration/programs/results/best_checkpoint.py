"""``get_best_checkpoint`` by a metric and a mode, and its error for a metric that was never reported."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    for epoch, score in enumerate([0.2, 0.9, 0.4]):
        with tempfile.TemporaryDirectory() as directory:
            with open(os.path.join(directory, "epoch.txt"), "w") as file:
                file.write(str(epoch))
            ray.train.report({"score": score}, checkpoint=Checkpoint.from_directory(directory))


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
for mode, epoch in (("max", "1"), ("min", "0")):
    best = result.get_best_checkpoint("score", mode)
    with best.as_directory() as directory, open(os.path.join(directory, "epoch.txt")) as file:
        assert file.read() == epoch
try:
    result.get_best_checkpoint("scor", "max")
except Exception as error:
    assert "score" in str(error)
else:
    raise AssertionError("a metric that does not exist was accepted")
