"""``worker_runtime_env`` sets environment variables of the workers, and not of the script."""

import os

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    return os.environ.get("MY_FLAG")


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(worker_runtime_env={"env_vars": {"MY_FLAG": "on"}}),
).fit()
assert result.return_value == "on"
assert "MY_FLAG" not in os.environ
