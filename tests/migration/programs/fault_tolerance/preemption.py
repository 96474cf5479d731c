"""``get_preemption_info`` is None while no node is about to go away."""

import os

import ray.train
from ray.train import FailureConfig, PreemptionInfo, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    seen = []
    for _ in range(3):
        seen.append(ray.train.get_preemption_info())
    return seen


result = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        storage_path=os.path.abspath("runs"), failure_config=FailureConfig(max_preemption_failures=2)
    ),
).fit()
assert result.return_value == [None, None, None]
info = PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"b": [3, 2], "a": [0]})
assert info.preempted_node_ids == ["a", "b"]
assert info.preempted_ranks == [0, 2, 3]
