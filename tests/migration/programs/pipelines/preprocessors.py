"""Preprocessors fitted to a dataset, used in training, kept with the checkpoint and used again for a batch."""

import tempfile

import numpy as np
import pandas as pd
import ray.data
import ray.train
import torch
from ray.data.preprocessors import (
    Chain,
    Concatenator,
    LabelEncoder,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    SimpleImputer,
    StandardScaler,
)
from ray.train import Checkpoint, ScalingConfig
from ray.train.torch import TorchTrainer

frame = pd.DataFrame(
    {
        "age": [20.0, 40.0, None, 60.0],
        "income": [1.0, 2.0, 3.0, 6.0],
        "city": ["Rome", "Bonn", "Rome", "Lima"],
        "label": ["no", "yes", "no", "yes"],
    }
)
dataset = ray.data.from_pandas(frame)

scaler = MinMaxScaler(columns=["income"])
assert [row["income"] for row in scaler.fit_transform(dataset).take_all()] == [0.0, 0.2, 0.4, 1.0]
assert scaler.stats_ == {"min(income)": 1.0, "max(income)": 6.0}
codes = OrdinalEncoder(columns=["city"], output_columns=["code"]).fit_transform(dataset)
assert [row["code"] for row in codes.take_all()] == [2, 0, 2, 1]
labels = LabelEncoder("label")
labelled = labels.fit_transform(dataset)
assert [row["label"] for row in labelled.take_all()] == [0, 1, 0, 1]
assert [row["label"] for row in labels.inverse_transform(labelled).take_all()] == frame["label"].tolist()

chain = Chain(
    SimpleImputer(columns=["age"], strategy="mean"),
    StandardScaler(columns=["age", "income"]),
    OneHotEncoder(columns=["city"]),
    Concatenator(columns=["age", "income"], output_column_name="features", dtype=np.float32),
)
train = chain.fit_transform(labelled)
first = train.take(1)[0]
assert list(first["city"]) == [0, 0, 1]
assert abs(first["features"][0] + np.sqrt(2)) < 1e-6


def train_func(config):
    shard = ray.train.get_dataset_shard("train")
    rows = 0
    for batch in shard.iter_torch_batches(batch_size=2, device="cpu"):
        assert batch["features"].dtype == torch.float32
        assert batch["features"].shape[1] == 2
        rows += len(batch["label"])
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Checkpoint.from_directory(directory)
        checkpoint.update_metadata({"scaler": config["scaler"]})
        ray.train.report({"rows": rows}, checkpoint=checkpoint)


def as_text(preprocessor):
    found = preprocessor.serialize()
    return found if isinstance(found, str) else found.hex()


def from_text(text):
    return MinMaxScaler.deserialize(bytes.fromhex(text) if text[:8] == b"CPKL".hex() else text)


result = TorchTrainer(
    train_func,
    train_loop_config={"scaler": as_text(scaler)},
    datasets={"train": train},
    scaling_config=ScalingConfig(num_workers=1),
).fit()
assert result.metrics["rows"] == 4
again = from_text(result.checkpoint.get_metadata()["scaler"])
assert again.transform_batch(pd.DataFrame({"income": [3.5]}))["income"].tolist() == [0.5]
