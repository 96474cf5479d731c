"""Every worker reports its part; the parts are merged into one checkpoint, and each worker loads its own."""

import os
import tempfile

import ray.train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    rank = ray.train.get_context().get_world_rank()
    with tempfile.TemporaryDirectory() as directory:
        with open(os.path.join(directory, f"shard-{rank}.txt"), "w") as file:
            file.write(f"weights of rank {rank}")
        if rank == 0:
            os.mkdir(os.path.join(directory, "tokenizer"))
            with open(os.path.join(directory, "tokenizer", "vocabulary.txt"), "w") as file:
                file.write("a b c")
        ray.train.report({"step": 1}, checkpoint=Checkpoint.from_directory(directory))


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.abspath("runs")),
).fit()
with result.checkpoint.as_directory() as directory:
    for rank in range(2):
        with open(os.path.join(directory, f"shard-{rank}.txt")) as file:
            assert file.read() == f"weights of rank {rank}"
    with open(os.path.join(directory, "tokenizer", "vocabulary.txt")) as file:
        assert file.read() == "a b c"
