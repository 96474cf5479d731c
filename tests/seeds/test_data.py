"""The data blocks of seeds/000, 001 and 003, written anew: items, Parquet on S3, tables of images, resuming."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from tests.s3_server import BUCKET, S3Server

import powertrain
import powertrain as train
import powertrain.data
from powertrain import Checkpoint, DataConfig, FailureConfig, RunConfig, ScalingConfig
from powertrain.storage import open_storage
from powertrain.torch import TorchTrainer, get_device, prepare_model

TWO = ScalingConfig(num_workers=2, use_gpu=False, resources_per_worker={"CPU": 0.5})


# --------------------------------------------------------------------------- seeds/000: items, so many steps


def some_steps(config: dict[str, Any]) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = torch.nn.CrossEntropyLoss()
    train_ds = train.get_dataset_shard("train")
    train_loader = train_ds.iter_torch_batches(batch_size=64, prefetch_batches=1)
    shapes = []
    for step, batch in enumerate(train_loader):
        if step >= config["steps"]:
            break
        x, y = batch["x"], batch["y"].long()
        optimizer.zero_grad(set_to_none=True)
        criterion(model(x), y).backward()
        optimizer.step()
        shapes.append((tuple(x.shape), str(x.dtype)))
    return {"shapes": shapes}


def test_lists_of_python_floats_are_batches_of_the_default_dtype(tmp_path: Path) -> None:
    dataset = powertrain.data.from_items([{"x": [0.0] * 32, "y": 0} for _ in range(4096)])
    result = TorchTrainer(
        some_steps,
        train_loop_config={"steps": 10},
        scaling_config=ScalingConfig(num_workers=4, use_gpu=False, resources_per_worker={"CPU": 0.25}),
        run_config=RunConfig(storage_path=str(tmp_path)),
        datasets={"train": dataset},
    ).fit()
    assert result.return_value == {"shapes": [((64, 32), "torch.float32")] * 10}


# --------------------------------------------------------------------------- seeds/001: a pipeline over S3


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


def tokenize_function(row: dict[str, Any]) -> dict[str, Any]:
    tokens = [ord(letter) % 50 for letter in row["text"]][:8]
    return {"input_ids": np.array(tokens + [0] * (8 - len(tokens))), "labels": row["label"]}


def over_epochs(config: dict[str, Any]) -> dict[str, Any]:
    train_ds = powertrain.get_dataset_shard("train")
    eval_ds = powertrain.get_dataset_shard("eval")
    seen: list[list[int]] = []
    for _ in range(config["epochs"]):
        labels: list[int] = []
        for batch in train_ds.iter_torch_batches(batch_size=32, device="cpu"):
            assert batch["input_ids"].shape[1:] == (8,)
            labels += batch["labels"].tolist()
        seen.append(labels)
    held_out = sum(len(batch["labels"]) for batch in eval_ds.iter_torch_batches(batch_size=32))
    powertrain.report({"seen": seen, "held_out": held_out})
    return {}


def test_parquet_on_s3_is_tokenized_and_shuffled_anew_for_each_epoch(s3: S3Server, tmp_path: Path) -> None:
    storage = open_storage(s3.uri("training-data"))
    for number in range(2):
        labels = list(range(number * 50, number * 50 + 50))
        table = pa.table({"text": [f"text {n}" for n in labels], "label": labels})
        pq.write_table(table, tmp_path / "part.parquet", row_group_size=20)
        storage.put(f"part-{number}.parquet", (tmp_path / "part.parquet").read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3.environment.items():
            patch.setenv(name, value)
        frame = fitted_from_s3(s3, tmp_path).dataframe(ranks="all")
    rows = frame["seen"].tolist()
    for epoch in range(2):
        assert sorted(label for seen in rows for label in seen[epoch]) == list(range(100))
    assert rows[0][0] != rows[0][1]
    assert frame["held_out"].sum() == 10


def fitted_from_s3(s3: S3Server, tmp_path: Path) -> powertrain.Result:
    ds = powertrain.data.read_parquet(f"s3://{BUCKET}/training-data/")
    ds = ds.map(tokenize_function)
    ds = ds.random_shuffle()
    trainer = TorchTrainer(
        over_epochs,
        train_loop_config={"epochs": 2},
        scaling_config=TWO,
        run_config=RunConfig(
            storage_path=str(tmp_path / "runs"), worker_runtime_env={"env_vars": s3.environment}
        ),
        datasets={"train": ds, "eval": ds.limit(10)},
        dataset_config=DataConfig(datasets_to_split="all"),
    )
    return trainer.fit()


# --------------------------------------------------------------------------- seeds/003: images in a table


def image_table(path: str) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (64, 28, 28), dtype=np.uint8)
    frame = pd.DataFrame({"image": images.tolist(), "label": np.arange(64) % 10})
    powertrain.data.from_pandas(frame).write_parquet(path)


def get_dataset(path: str) -> powertrain.data.Dataset:
    ds = powertrain.data.read_parquet(path, file_extensions=["parquet"])

    def transform_images(row: dict[str, Any]) -> dict[str, Any]:
        image = np.asarray(Image.fromarray(np.array(row["image"], dtype=np.uint8)))
        row["image"] = (torch.from_numpy(image.copy()).float().unsqueeze(0) / 255 - 0.5) / 0.5
        return row

    return ds.map(transform_images)


def save_checkpoint_and_report_metrics(model: Any, metrics: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = None
        if powertrain.get_context().get_world_rank() == 0:
            torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
            checkpoint = Checkpoint.from_directory(directory)
        powertrain.report(metrics, checkpoint=checkpoint)


def classify(config: dict[str, Any]) -> None:
    model = prepare_model(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)))
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    per_worker = config["batch_size"] // powertrain.get_context().get_world_size()
    shard = powertrain.get_dataset_shard("train")
    dataloader = shard.iter_torch_batches(
        batch_size=per_worker,
        dtypes={"image": torch.float32, "label": torch.long},
        device=get_device(),
    )
    for epoch in range(config["epochs"]):
        rows = 0
        for batch in dataloader:
            inputs, labels = batch["image"], batch["label"]
            assert inputs.shape[1:] == (1, 28, 28)
            assert inputs.dtype == torch.float32
            loss = criterion(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows += len(labels)
        save_checkpoint_and_report_metrics(model, {"loss": loss.item(), "epoch": epoch, "rows": rows})


def test_images_written_as_nested_lists_come_back_as_a_tensor(tmp_path: Path) -> None:
    path = str(tmp_path / "train_data")
    image_table(path)
    result = TorchTrainer(
        classify,
        train_loop_config={"lr": 1e-3, "batch_size": 16, "epochs": 2},
        scaling_config=TWO,
        run_config=RunConfig(storage_path=str(tmp_path / "runs")),
        datasets={"train": get_dataset(path)},
    ).fit()
    frame = result.dataframe(ranks="all")
    assert frame.groupby("epoch")["rows"].sum().tolist() == [64, 64]
    assert result.checkpoint is not None
    state = torch.load(os.path.join(result.checkpoint.path, "model.pt"))
    assert state["1.weight"].shape == (10, 784)


# --------------------------------------------------------------------------- seeds/003: resuming in mid-epoch


def resumes_in_mid_epoch(config: dict[str, Any]) -> None:
    context = powertrain.get_context()
    iterator_state, checkpoint = None, powertrain.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as ckpt_dir:
            iterator_state = torch.load(os.path.join(ckpt_dir, "iterator_state.pt"))
    dataset_shard = powertrain.get_dataset_shard("train", state_dict=iterator_state)
    dataloader: Any = dataset_shard.iter_torch_batches(batch_size=8)
    for step, batch in enumerate(dataloader):
        if context.get_attempt() == 0 and step == 3:
            raise RuntimeError("in the middle")
        with tempfile.TemporaryDirectory() as ckpt_dir:
            saved = None
            if context.get_world_rank() == 0:
                torch.save(dataloader.state_dict(), os.path.join(ckpt_dir, "iterator_state.pt"))
                saved = Checkpoint.from_directory(ckpt_dir)
            powertrain.report({"ids": batch["id"].tolist()}, checkpoint=saved)


def test_an_iterator_state_in_a_checkpoint_brings_each_row_once(tmp_path: Path) -> None:
    result = TorchTrainer(
        resumes_in_mid_epoch,
        scaling_config=TWO,
        run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=1)),
        datasets={"train": powertrain.data.range(100).random_shuffle(seed=1)},
    ).fit()
    seen = [row for ids in result.dataframe(ranks="all")["ids"] for row in ids]
    assert sorted(seen) == list(range(100))
