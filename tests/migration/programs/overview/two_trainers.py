"""A sweep in one script: each trainer sees the script as it is when ``fit`` is called."""

import ray.train
from ray.train.torch import TorchTrainer

LEARNING_RATE = 0.0


def train_func():
    return LEARNING_RATE


seen = []
for rate in (0.1, 0.01, 0.001):
    LEARNING_RATE = rate
    trainer = TorchTrainer(train_func, scaling_config=ray.train.ScalingConfig(num_workers=1))
    seen.append(trainer.fit().return_value)
assert seen == [0.1, 0.01, 0.001]
