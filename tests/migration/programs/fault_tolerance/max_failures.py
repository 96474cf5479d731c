"""``max_failures``: a worker that raises is replaced, and training goes on from the newest checkpoint."""

import os
import tempfile

import ray.train
import ray.train.collective
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func(config):
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            start = torch.load(os.path.join(directory, "state.pt"))["epoch"] + 1
    for epoch in range(start, 4):
        with tempfile.TemporaryDirectory() as directory:
            saved = None
            if ray.train.get_context().get_world_rank() == 0:
                torch.save({"epoch": epoch}, os.path.join(directory, "state.pt"))
                saved = Checkpoint.from_directory(directory)
            ray.train.report({"epoch": epoch, "start": start}, checkpoint=saved)
        if epoch == 1 and not os.path.exists(config["crashed"]):
            ray.train.get_all_reported_checkpoints()
            ray.train.collective.barrier()
            if ray.train.get_context().get_world_rank() == 1:
                open(config["crashed"], "w").close()
                raise RuntimeError("once")
            ray.train.collective.barrier()
    return start


result = TorchTrainer(
    train_func,
    train_loop_config={"crashed": os.path.abspath("crashed")},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="retried",
        storage_path=os.path.abspath("runs"),
        failure_config=FailureConfig(max_failures=1),
    ),
).fit()
assert result.error is None
assert os.path.exists("crashed")
assert result.metrics == {"epoch": 3, "start": 2}
assert [metrics["epoch"] for _, metrics in result.best_checkpoints] == [0, 1, 2, 3]
