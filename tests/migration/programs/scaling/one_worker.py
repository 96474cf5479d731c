"""One worker is the default, and the same code runs with it: a model, a loader, a report."""

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model


def train_func():
    model = prepare_model(torch.nn.Linear(1, 1))
    data = torch.utils.data.TensorDataset(torch.arange(10.0).unsqueeze(1))
    rows = 0
    for (batch,) in prepare_data_loader(torch.utils.data.DataLoader(data, batch_size=4)):
        model(batch).sum().backward()
        rows += len(batch)
    ray.train.report({"rows": rows})
    return rows, ray.train.get_context().get_world_size()


assert ray.train.ScalingConfig().num_workers == 1
assert TorchTrainer(train_func).fit().return_value == (10, 1)
