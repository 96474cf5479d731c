"""What the training function returns on rank 0 is ``Result.return_value``."""

from ray.train import ScalingConfig, get_context
from ray.train.torch import TorchTrainer


def train_func():
    return {"rank": get_context().get_world_rank(), "values": [1, 2, 3]}


result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit()
assert result.return_value == {"rank": 0, "values": [1, 2, 3]}
