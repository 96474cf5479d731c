"""Models and datasets that are classes of the script itself."""

import os
import tempfile

import ray.train
import torch
from ray.train.torch import TorchTrainer


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.tensor([float(index) ** 2])


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(1, width), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )

    def forward(self, x):
        return self.layers(x)


def train_func(config):
    loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(Squares(), batch_size=4))
    model = ray.train.torch.prepare_model(Net(config["width"]))
    seen = 0
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
        seen += len(x)
    with tempfile.TemporaryDirectory() as directory:
        torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
        ray.train.report({"seen": seen}, checkpoint=ray.train.Checkpoint.from_directory(directory))


result = TorchTrainer(
    train_func,
    train_loop_config={"width": 4},
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(storage_path=os.path.abspath("runs")),
).fit()
assert result.metrics["seen"] == 8
with result.checkpoint.as_directory() as directory:
    model = Net(4)
    model.load_state_dict(torch.load(os.path.join(directory, "model.pt")))
assert model(torch.ones(2, 1)).shape == (2, 1)
