"""``elastic_resize_monitor_interval_s`` is part of an elastic ScalingConfig."""

import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    return ray.train.get_context().get_world_size()


scaling_config = ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=5.0)
assert scaling_config.elastic_resize_monitor_interval_s == 5.0
assert TorchTrainer(train_func, scaling_config=scaling_config).fit().return_value in (1, 2)
