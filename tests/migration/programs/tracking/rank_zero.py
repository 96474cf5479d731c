"""Experiment tracking inside of the loop: rank 0 writes to the tracker, here a file of JSON lines."""

import json
import os

import ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


class Tracker:
    def __init__(self, directory, project):
        os.makedirs(directory, exist_ok=True)
        self.file = open(os.path.join(directory, f"{project}.jsonl"), "a")

    def log(self, values):
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()

    def finish(self):
        self.file.close()


def train_func(config):
    tracker = None
    if ray.train.get_context().get_world_rank() == 0:
        tracker = Tracker(config["directory"], ray.train.get_context().get_experiment_name())
    for step in range(3):
        metrics = {"step": step, "loss": 1 / (step + 1)}
        if tracker:
            tracker.log(metrics)
        ray.train.report(metrics)
    if tracker:
        tracker.finish()


directory = os.path.abspath("tracked")
TorchTrainer(
    train_func,
    train_loop_config={"directory": directory},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="experiment", storage_path=os.path.abspath("runs")),
).fit()
with open(os.path.join(directory, "experiment.jsonl")) as file:
    assert [json.loads(line)["step"] for line in file] == [0, 1, 2]
