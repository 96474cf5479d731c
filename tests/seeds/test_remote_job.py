"""The blocks of seeds/003, written anew: one job in one process, and the checkpoint of a wrapped model."""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import powertrain
import powertrain.torch
from powertrain import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from powertrain.errors import ResourceError, TaskError
from powertrain.torch import TorchTrainer


@pytest.fixture(autouse=True)
def _shut_down() -> Iterator[None]:
    yield
    powertrain.shutdown()


def build_model() -> torch.nn.Module:
    convolution = torch.nn.Conv2d(1, 4, 3)
    return torch.nn.Sequential(convolution, torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 10))


def get_data_loader(batch_size: int) -> DataLoader[Any]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    return DataLoader(dataset, batch_size, shuffle=True, drop_last=True)


def train_on_one_process(num_epochs: int, local_path: str) -> int:
    """The seed's baseline: no trainer, a CSV of metrics, the model's state in a file."""
    model = build_model()
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(num_epochs):
        for images, labels in get_data_loader(128):
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        os.makedirs(local_path, exist_ok=True)
        with open(os.path.join(local_path, "metrics.csv"), "a") as file:
            csv.writer(file).writerow([loss.item(), epoch])
        torch.save(model.state_dict(), os.path.join(local_path, "model.pt"))
    return os.getpid()


def test_a_single_job_trains_in_a_process_of_its_own(tmp_path: Path) -> None:
    import pandas as pd

    @powertrain.remote(num_gpus=0, resources={"accelerator_type:T4": 0.0001})
    def run_single_job() -> int:
        return train_on_one_process(num_epochs=2, local_path=str(tmp_path / "single"))

    powertrain.init(resources={"accelerator_type:T4": 1})
    powertrain.init(ignore_reinit_error=True)
    assert powertrain.is_initialized()
    assert powertrain.get(run_single_job.remote()) != os.getpid()

    metrics = pd.read_csv(tmp_path / "single" / "metrics.csv", names=["loss", "epoch"])
    assert metrics["epoch"].tolist() == [0, 1]
    loaded_model = build_model()
    loaded_model.load_state_dict(torch.load(tmp_path / "single" / "model.pt", map_location="cpu"))
    loaded_model.eval()
    with torch.no_grad():
        images, labels = next(iter(get_data_loader(500)))
        accuracy = (loaded_model(images).argmax(1) == labels).float().mean().item()
    assert accuracy > 0.5


def test_a_job_that_requests_an_absent_accelerator_is_refused() -> None:
    @powertrain.remote(resources={"accelerator_type:T4": 0.0001})
    def job() -> None: ...

    powertrain.init(ignore_reinit_error=True)
    with pytest.raises(ResourceError, match="accelerator_type:T4"):
        job.remote()


def test_several_jobs_give_their_values_and_a_failed_one_its_traceback() -> None:
    @powertrain.remote
    def divide(a: int, b: int) -> float:
        return a / b

    assert powertrain.get([divide.remote(6, b) for b in (1, 2, 3)]) == [6.0, 3.0, 2.0]
    with pytest.raises(TaskError, match="ZeroDivisionError"):
        powertrain.get(divide.remote(1, 0))


# --------------------------------------------------------------------------- migrated to the trainer


def save_checkpoint_and_report_metrics(model: Any, metrics: dict[str, float]) -> None:
    with tempfile.TemporaryDirectory() as temp_checkpoint_dir:
        checkpoint = None
        if powertrain.get_context().get_world_rank() == 0:
            torch.save(model.module.state_dict(), os.path.join(temp_checkpoint_dir, "model.pt"))
            checkpoint = powertrain.Checkpoint.from_directory(temp_checkpoint_dir)
        powertrain.report(metrics, checkpoint=checkpoint)


def train_loop_per_worker(config: dict[str, Any]) -> None:
    model = powertrain.torch.prepare_model(build_model())
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    per_worker = config["batch_size"] // powertrain.get_context().get_world_size()
    loader = powertrain.torch.prepare_data_loader(get_data_loader(per_worker))
    for epoch in range(config["epochs"]):
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save_checkpoint_and_report_metrics(model, {"loss": loss.item(), "epoch": epoch})


def test_the_state_of_the_wrapped_module_loads_into_a_bare_model() -> None:
    result = TorchTrainer(
        train_loop_per_worker=train_loop_per_worker,
        train_loop_config={"lr": 1e-2, "batch_size": 128, "epochs": 2},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(name="digits_demo", failure_config=powertrain.FailureConfig(max_failures=3)),
    ).fit()
    assert str(result.metrics) in f"Training finished. Result: {result}"
    assert isinstance(result.checkpoint, Checkpoint)
    assert powertrain.FailureConfig is FailureConfig
    with result.checkpoint.as_directory() as ckpt_dir:
        build_model().load_state_dict(torch.load(os.path.join(ckpt_dir, "model.pt"), map_location="cpu"))
