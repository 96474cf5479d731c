"""A distributed validation: the validation function starts a trainer of its own on the checkpoint."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig, ValidationConfig
from ray.train.torch import TorchTrainer


def evaluate(config):
    world_size = ray.train.get_context().get_world_size()
    with config["checkpoint"].as_directory() as directory:
        with open(os.path.join(directory, "model.txt")) as file:
            score = float(file.read()) * world_size
        with tempfile.TemporaryDirectory() as saved:
            open(os.path.join(saved, "done"), "w").close()
            ray.train.report({"score": score}, checkpoint=Checkpoint.from_directory(saved))


def validate(checkpoint, storage=""):
    trainer = TorchTrainer(
        evaluate,
        train_loop_config={"checkpoint": checkpoint},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=storage),
    )
    return {"score": trainer.fit().metrics["score"]}


def train_func(config):
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "model.txt"), "w") as file:
            file.write("0.25")
        ray.train.report(
            {"loss": 1.0},
            checkpoint=Checkpoint.from_directory(directory),
            validation=ray.train.ValidationTaskConfig(fn_kwargs={"storage": config["storage"]}),
        )


result = TorchTrainer(
    train_func,
    train_loop_config={"storage": os.path.abspath("validations")},
    validation_config=ValidationConfig(fn=validate),
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
((_, metrics),) = result.best_checkpoints
assert metrics == {"loss": 1.0, "score": 0.5}
