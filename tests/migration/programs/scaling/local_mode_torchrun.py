"""Local mode under torchrun: the processes are torchrun's, the script is the same."""

import os
import subprocess
import sys

if "LOCAL_RANK" not in os.environ:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 0 of 2: 3.0" in done.stdout
    assert "rank 1 of 2: 3.0" in done.stdout
    sys.exit()

import ray.train
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train_func():
    context = ray.train.get_context()
    prepare_model(torch.nn.Linear(1, 1))
    values = torch.tensor([context.get_world_rank() + 1.0])
    torch.distributed.all_reduce(values)
    print(f"rank {context.get_world_rank()} of {context.get_world_size()}: {values.item()}", flush=True)
    ray.train.report({"total": values.item()})


TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=0)).fit()
