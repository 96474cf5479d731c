"""A UserCallback gets the metrics of all workers at every report, and the checkpoint if there is one."""

import json
import os
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer


class Recorder(UserCallback):
    def __init__(self, path):
        self.path = path

    def after_report(self, run_context, metrics, checkpoint):
        with open(self.path, "a") as file:
            file.write(json.dumps([run_context.run_config.name, metrics, checkpoint is not None]) + "\n")


def train_func():
    rank = ray.train.get_context().get_world_rank()
    ray.train.report({"step": 0, "rank": rank})
    with tempfile.TemporaryDirectory() as directory:
        saved = None
        if rank == 0:
            open(os.path.join(directory, "model.pt"), "w").close()
            saved = Checkpoint.from_directory(directory)
        ray.train.report({"step": 1, "rank": rank}, checkpoint=saved)


path = os.path.abspath("reports.jsonl")
TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="watched", storage_path=os.path.abspath("runs"), callbacks=[Recorder(path)]),
).fit()
with open(path) as file:
    lines = [json.loads(line) for line in file]
assert lines == [
    ["watched", [{"step": 0, "rank": 0}, {"step": 0, "rank": 1}], False],
    ["watched", [{"step": 1, "rank": 0}, {"step": 1, "rank": 1}], True],
]
