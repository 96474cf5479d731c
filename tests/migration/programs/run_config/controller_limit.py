"""A FailureConfig with all of its fields."""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    return "done"


failure_config = FailureConfig(max_failures=1, controller_failure_limit=2, max_preemption_failures=3)
assert (failure_config.max_failures, failure_config.controller_failure_limit) == (1, 2)
result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(failure_config=failure_config),
).fit()
assert result.return_value == "done"
