"""Small facts are kept with a checkpoint as its metadata."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, "model.txt"), "w") as file:
            file.write("weights")
        checkpoint = Checkpoint.from_directory(directory)
        checkpoint.set_metadata({"framework": "torch"})
        checkpoint.update_metadata({"layers": 3})
        ray.train.report({"step": 1}, checkpoint=checkpoint)


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.checkpoint.get_metadata() == {"framework": "torch", "layers": 3}
