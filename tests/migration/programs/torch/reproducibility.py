"""``enable_reproducibility`` seeds everything: two runs draw the same numbers."""

import random

import numpy as np
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, enable_reproducibility


def train_func(config):
    enable_reproducibility(seed=config["seed"])
    return torch.rand(3).tolist(), random.random(), float(np.random.rand())


def fit(seed):
    return (
        TorchTrainer(
            train_func, train_loop_config={"seed": seed}, scaling_config=ScalingConfig(num_workers=1)
        )
        .fit()
        .return_value
    )


first = fit(7)
assert fit(7) == first
assert fit(8) != first
