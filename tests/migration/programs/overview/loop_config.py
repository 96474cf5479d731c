"""``train_loop_config`` is the argument of the training function."""

import ray.train.torch
from ray.train import ScalingConfig


def train_loop_per_worker(config):
    return {"seen": config, "lr": config["lr"] * 2}


trainer = ray.train.torch.TorchTrainer(
    train_loop_per_worker,
    train_loop_config={"lr": 0.5, "layers": [16, 8], "name": "small"},
    scaling_config=ScalingConfig(num_workers=2),
)
result = trainer.fit()
assert result.return_value == {"seen": {"lr": 0.5, "layers": [16, 8], "name": "small"}, "lr": 1.0}
