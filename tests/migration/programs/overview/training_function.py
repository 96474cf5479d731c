"""A training function on two workers: prepared model and loader, metrics and a checkpoint in every epoch."""

import os
import tempfile

import ray.train
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset


def train_func():
    torch.manual_seed(0)
    inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = prepare_data_loader(DataLoader(TensorDataset(inputs, 3 * inputs), batch_size=8, shuffle=True))
    model = prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    for epoch in range(3):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for features, labels in loader:
            loss = torch.nn.functional.mse_loss(model(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        with tempfile.TemporaryDirectory() as directory:
            torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
            ray.train.report(
                {"loss": loss.item(), "epoch": epoch}, checkpoint=Checkpoint.from_directory(directory)
            )
        if ray.train.get_context().get_world_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(name="first", storage_path=os.path.abspath("runs")),
    )
    result = trainer.fit()

    assert result.error is None
    assert result.metrics["epoch"] == 2
    assert result.metrics["loss"] < 0.1
    with result.checkpoint.as_directory() as directory:
        trained = torch.nn.Linear(1, 1)
        trained.load_state_dict(torch.load(os.path.join(directory, "model.pt")))
    assert abs(trained.weight.item() - 3) < 0.5
