"""``ray.init`` before the trainer and ``ray.shutdown`` after it, as scripts for clusters have them."""

import ray
import ray.train
from ray.train.torch import TorchTrainer


def train_func():
    return ray.train.get_context().get_world_size()


ray.init(ignore_reinit_error=True)
assert ray.is_initialized()
ray.init(ignore_reinit_error=True)
result = TorchTrainer(train_func, scaling_config=ray.train.ScalingConfig(num_workers=2)).fit()
assert result.return_value == 2
ray.shutdown()
assert not ray.is_initialized()
