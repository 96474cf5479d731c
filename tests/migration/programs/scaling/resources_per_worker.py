"""``resources_per_worker`` says how many CPUs each worker reserves; the number of workers is what was asked for."""

import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def train_func():
    return ray.train.get_context().get_world_size()


scaling_config = ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 1})
assert scaling_config.num_workers == 2
assert scaling_config.resources_per_worker == {"CPU": 1}
assert TorchTrainer(train_func, scaling_config=scaling_config).fit().return_value == 2
