"""``get_device`` and ``get_devices`` of a worker without GPUs."""

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, get_devices


def train_func():
    assert isinstance(get_device(), torch.device)
    return str(get_device()), [str(device) for device in get_devices()]


result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2, use_gpu=False)).fit()
assert result.return_value == ("cpu", ["cpu"])
