"""``report`` without a checkpoint: the run has metrics and no checkpoint."""

import json
import os

import ray.train
from ray.train import RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer


class Keep(UserCallback):
    def __init__(self, path):
        self.path = path

    def after_report(self, run_context, metrics, checkpoint):
        with open(self.path, "a") as file:
            file.write(json.dumps(metrics[0]) + "\n")


def train_func():
    for step in range(3):
        ray.train.report({"step": step, "loss": 1.0 / (step + 1)})


path = os.path.abspath("metrics.jsonl")
result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("runs"), callbacks=[Keep(path)]),
).fit()
assert result.checkpoint is None
assert result.best_checkpoints == []
with open(path) as file:
    assert [json.loads(line)["step"] for line in file] == [0, 1, 2]
