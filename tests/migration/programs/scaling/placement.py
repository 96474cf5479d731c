"""``placement_strategy`` by name; PACK puts both workers on one node."""

import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    context = ray.train.get_context()
    return context.get_local_world_size(), context.get_node_rank()


scaling_config = ScalingConfig(num_workers=2, placement_strategy="PACK")
assert scaling_config.placement_strategy == "PACK"
assert TorchTrainer(train_func, scaling_config=scaling_config).fit().return_value == (2, 0)
