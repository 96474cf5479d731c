"""Trainers of boosted trees: what they take in place of a training function, their checkpoints, their network."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import powertrain
from powertrain import CheckpointConfig, RunConfig, ScalingConfig
from powertrain.errors import CheckpointError, ConfigError

TRAINERS = {"xgboost": "XGBoostTrainer", "lightgbm": "LightGBMTrainer"}
PARAMS = {
    "xgboost": {"objective": "binary:logistic", "nthread": 1},
    "lightgbm": {"objective": "binary", "verbosity": -1, "num_threads": 1, "metric": "binary_logloss"},
}
LOSS = {"xgboost": "logloss", "lightgbm": "binary_logloss"}


@pytest.fixture(params=TRAINERS)
def name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    pytest.importorskip(name)
    return name


def frame(rows: int = 80) -> pd.DataFrame:
    values = np.random.default_rng(0).normal(size=(rows, 3))
    made = pd.DataFrame(values, columns=["a", "b", "c"])
    made["y"] = (values.sum(axis=1) > 0).astype(int)
    return made


def trainer(name: str, storage: Path, function: Any = None, **options: Any) -> Any:
    kind = getattr(importlib.import_module(f"powertrain.{name}"), TRAINERS[name])
    rules = options.pop("checkpoint_config", CheckpointConfig())
    return kind(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=str(storage), checkpoint_config=rules, verbose=0),
        **options,
    )


def test_params_and_datasets_are_enough_and_more_rounds_continue_the_model(name: str, tmp_path: Path) -> None:
    datasets = {
        "valid": powertrain.data.from_pandas(frame(20)),
        "train": powertrain.data.from_pandas(frame()),
    }
    given = {"params": PARAMS[name], "label_column": "y", "datasets": datasets}
    rules = CheckpointConfig(checkpoint_frequency=2, checkpoint_at_end=True)
    result = trainer(name, tmp_path, **given, num_boost_round=5, checkpoint_config=rules).fit()
    assert set(result.metrics) == {f"train-{LOSS[name]}", f"valid-{LOSS[name]}"}
    assert len(result.best_checkpoints) == 3, "after the rounds 2 and 4, and at the end"

    longer = trainer(name, tmp_path, **given, num_boost_round=8, checkpoint_config=rules)
    model = type(longer).get_model(longer.fit().checkpoint)
    assert (model.num_boosted_rounds() if name == "xgboost" else model.current_iteration()) == 8


def test_a_finished_number_of_rounds_trains_nothing_more(name: str, tmp_path: Path) -> None:
    given = {
        "params": PARAMS[name], "label_column": "y", "num_boost_round": 2,
        "datasets": {"train": powertrain.data.from_pandas(frame())},
    }  # fmt: skip
    first = trainer(name, tmp_path, **given).fit()
    again = trainer(name, tmp_path, **given).fit()
    assert again.checkpoint.path == first.checkpoint.path


def test_what_is_missing_without_a_function_is_named(name: str, tmp_path: Path) -> None:
    train = powertrain.data.from_pandas(frame())
    with pytest.raises(
        ConfigError, match=r"no training function.*datasets=\{'train': \.\.\.\}; it was given none"
    ):
        trainer(name, tmp_path, params={}, label_column="y")
    with pytest.raises(ConfigError, match=r"it was given 'valid'"):
        trainer(name, tmp_path, label_column="y", datasets={"valid": train})
    with pytest.raises(ConfigError, match=r"label_column=None.*name the column"):
        trainer(name, tmp_path, datasets={"train": train})
    with pytest.raises(ConfigError, match=r"params=3.*dict"):
        trainer(name, tmp_path, params=3, label_column="y", datasets={"train": train})
    with pytest.raises(ConfigError, match=r"num_boost_round=\.\.\."):
        trainer(name, tmp_path, num_boost_round=0, label_column="y", datasets={"train": train})


def test_params_beside_a_function_are_accepted_and_said_to_be_unused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = trainer(
        name, tmp_path, lambda: None, params={"eta": 1}, num_boost_round=3, early_stopping_rounds=2
    )
    assert given._standing_remarks == [
        f"{TRAINERS[name]} does not use params=, num_boost_round=, early_stopping_rounds= because it was given a "
        "training function. Use them in the function, or leave the function out."
    ]


def test_a_checkpoint_holds_one_booster(name: str, tmp_path: Path) -> None:
    library = importlib.import_module(name)
    data = frame()
    matrix = (library.DMatrix if name == "xgboost" else library.Dataset)(
        data[["a", "b", "c"]], label=data["y"]
    )
    booster = library.train(PARAMS[name], matrix, 3)
    kind = getattr(
        importlib.import_module(f"powertrain.{name}"), TRAINERS[name].replace("Trainer", "Checkpoint")
    )
    for checkpoint in (kind.from_model(booster), kind.from_model(booster, path=str(tmp_path))):
        model = checkpoint.get_model()
        assert (model.num_boosted_rounds() if name == "xgboost" else model.current_iteration()) == 3
        assert checkpoint.get_preprocessor() is None
    with pytest.raises(CheckpointError, match="not a directory"):
        kind.from_model(booster, path=str(tmp_path / "none"))
    with pytest.raises(CheckpointError, match="preprocessors"):
        kind.from_model(booster, preprocessor=object())


def test_the_names_of_ray_are_the_same_callbacks(name: str) -> None:
    module = importlib.import_module(f"powertrain.{name}")
    assert module.RayTrainReportCallback is module.ReportCallback


def test_network_params_outside_of_a_run_are_none_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    from powertrain.lightgbm import get_network_params

    with caplog.at_level(logging.WARNING, "powertrain"):
        assert get_network_params() == {}
    assert "only the training function of a LightGBMTrainer" in caplog.text


def test_arrow_types_become_types_that_lightgbm_takes() -> None:
    from powertrain.lightgbm import normalize_pandas_for_lightgbm

    table = pa.table(
        {"i": pa.array([1, 2], pa.int32()), "f": [0.5, 1.5], "b": [True, False], "t": ["x", "y"]}
    )
    arrow = table.to_pandas(types_mapper=pd.ArrowDtype)
    made = normalize_pandas_for_lightgbm(arrow)
    assert [str(kind) for kind in made.dtypes[:3]] == ["Int32", "Float64", "boolean"]
    assert made.dtypes["t"] == arrow.dtypes["t"]
    plain = frame()
    assert normalize_pandas_for_lightgbm(plain) is plain
