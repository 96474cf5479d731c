"""Mixed precision with torch's own tools: autocast to bfloat16 on a prepared model, and a GradScaler."""

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_model


def train_func():
    model = prepare_model(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(get_device().type, enabled=False)
    with torch.autocast(get_device().type, dtype=torch.bfloat16):
        output = model(torch.ones(2, 4, device=get_device()))
        loss = output.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return str(output.dtype), str(model.module.weight.grad.dtype)


result = TorchTrainer(train_func, scaling_config=ScalingConfig(num_workers=2)).fit()
assert result.return_value == ("torch.bfloat16", "torch.float32")
